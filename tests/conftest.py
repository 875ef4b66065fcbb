"""JAX on the CPU, seen as eight devices, before any test imports it."""

import os

# What the user has set wins. Eight devices cost nothing where a test uses one of them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import pytest


@pytest.fixture
def x64():
    """Double precision inside one test; it is off elsewhere, as it is for users."""
    with jax.enable_x64(True):
        yield
