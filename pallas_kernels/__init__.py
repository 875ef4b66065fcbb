"""Fused kernels for the time loop: arrays in, arrays out. Not written yet."""
