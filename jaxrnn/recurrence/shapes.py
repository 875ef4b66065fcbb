"""Named problem sizes, shared by tests, benchmarks and tuning.

B batch, T time, I inputs, H hidden.
"""

import difflib
from typing import NamedTuple


class Shape(NamedTuple):
    """One layer's problem size."""

    name: str
    B: int
    T: int
    I: int  # noqa: E741  (the axis letter of the whole library)
    H: int


CPU = (
    Shape("small", 20, 35, 200, 200),  # a small language model
    Shape("medium", 32, 35, 650, 650),  # the medium one
    Shape("batch", 64, 100, 128, 256),  # many rows, a light matmul
    Shape("long", 16, 512, 64, 128),  # the cost of a step itself
    Shape("wide", 64, 64, 512, 1024),  # matmuls rule
)

GPU = (
    Shape("resident", 64, 256, 128, 128),  # the recurrent matrix stays on the chip
    Shape("flash", 16, 1024, 768, 768),  # where FlashRNN, Haste and cuDNN were compared
    Shape("tagger", 64, 256, 256, 256),
    Shape("awd", 80, 70, 1152, 1152),  # AWD-LSTM's middle layer, rounded up to a multiple of 128
    Shape("rollout", 128, 16, 128, 128),  # reinforcement learning, many resets; the width is ours
)

ALL = CPU + GPU


def named(name: str) -> Shape:
    """The shape of that name.

    Raises:
        ValueError: There is none; the message has the nearest name and all others.
    """
    for shape in ALL:
        if shape.name == name:
            return shape
    names = [shape.name for shape in ALL]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"no shape is called {name!r}; {hint}there are {', '.join(names)}")
