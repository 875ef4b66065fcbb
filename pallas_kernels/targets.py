"""The GPU that kernels are planned for, and its limits."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import jax


class Target(NamedTuple):
    """The GPU that kernels are planned for.

    Attributes:
        name: for messages.
        capability: compute capability, (9, 0) for an H200.
        shared_memory: bytes a block may use.
        interpret: kernels run in Pallas' interpreter, on any machine.
    """

    name: str
    capability: tuple[int, int]
    shared_memory: int
    interpret: bool = False


# Shared memory a block may opt in to: CUDA C++ programming guide, "technical specifications per
# compute capability", less the kilobyte that the system keeps.
SHARED_MEMORY = {
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 7): 166_912,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (10, 3): 232_448,
    (12, 0): 101_376,
}

TARGETS = {
    "a100": Target("A100", (8, 0), SHARED_MEMORY[8, 0]),
    "h100": Target("H100", (9, 0), SHARED_MEMORY[9, 0]),
    "h200": Target("H200", (9, 0), SHARED_MEMORY[9, 0]),
    "b200": Target("B200", (10, 0), SHARED_MEMORY[10, 0]),
    "interpreter": Target("Pallas interpreter", (9, 0), SHARED_MEMORY[9, 0], interpret=True),
}

# `jax.jit` traces again under another value.
_chosen = jax.make_user_context(None)


@contextlib.contextmanager
def compiling_for(name: str) -> Iterator[None]:
    """Plans kernels for a GPU by name, whatever this machine has; see `TARGETS`.

    "interpreter" runs the kernels without a GPU, slowly: for tests.

    Raises:
        ValueError: for another name.
    """
    named(name)
    with _chosen(name):
        yield


def named(name: str) -> Target:
    """The target of that name.

    Raises:
        ValueError: There is none.
    """
    if name not in TARGETS:
        raise ValueError(f"no GPU is called {name!r}; there are {', '.join(TARGETS)}")
    return TARGETS[name]


def current() -> Target | None:
    """The GPU of `compiling_for`, else this machine's, else None."""
    if _chosen.value is not None:
        return TARGETS[_chosen.value]
    if jax.default_backend() != "gpu":
        return None
    device = jax.devices()[0]
    major, _, minor = str(getattr(device, "compute_capability", "0.0")).partition(".")
    capability = int(major), int(minor or 0)
    if not device.device_kind.startswith("NVIDIA"):
        capability = (0, 0)
    return Target(device.device_kind, capability, SHARED_MEMORY.get(capability, 49_152))
