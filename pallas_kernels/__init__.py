"""Fused kernels for the time loop: arrays in, arrays out, no autodiff rules.

A kernel is generic over the cell: it receives the gates as a function (see `equations`).
"""
