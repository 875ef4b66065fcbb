"""Tile sizes of the kernels that make one step."""

from typing import NamedTuple

from pallas_kernels.targets import Target
from pallas_kernels.tile import Tiles, power_of_two


class StepTiles(NamedTuple):
    """How a step is cut up.

    Attributes:
        tiles: of the output of a program with matmuls.
        rows: of a program without, where the gates need whole rows; None makes it all in one.
        block_k: features of ``h`` that one piece of the matmul takes.
        unroll: steps in the body of XLA's loop, which adds a launch of its own to each turn.
    """

    tiles: Tiles
    rows: Tiles | None
    block_k: int
    unroll: int


def step(hidden: int, itemsize: int, target: Target, whole_rows: bool) -> StepTiles:
    """Tiles of a step: 16 rows, the fewest of a matmul, so that many programs share the work.

    Two stages of the pipeline hold a piece of ``h`` and of each gate's matrix, in bfloat16 a few
    ten KiB. float32 at full precision runs on the ordinary cores; half the columns and a quarter of
    a piece keep it in registers: with pieces of 32, an LSTM of H = 768 spilled 16 bytes on an A100.
    """
    block_h = min(32, power_of_two(hidden)) if itemsize < 4 else 16
    block_k = min(64, power_of_two(hidden)) if itemsize < 4 else 16
    tiles = Tiles(block_b=16, block_h=block_h, warps=4, stages=2)
    # One row a program: what the gates of layer norm need of it has to fit into registers.
    block = power_of_two(hidden)
    rows = Tiles(block_b=1, block_h=block, warps=min(16, max(4, block // 128)))
    # The interpreter compiles every step of the body; one is enough there.
    unroll = 1 if target.interpret else 8
    return StepTiles(tiles, rows if whole_rows else None, block_k, unroll)
