"""Tile sizes of the kernels that walk through all steps, and what fits."""

from pallas_kernels.equations import Equations
from pallas_kernels.targets import Target
from pallas_kernels.tile import Tiles, power_of_two

# Whole rows keep far more of a step alive in the backward pass. Compiled for an H200 in bfloat16, a
# layer-norm LSTM takes 191 registers at H = 64 with 8 warps, and spills 200 bytes at H = 128 with
# any number of them. So does float32 at H = 128, for cells whose matrix would fit: a GRU 12,776
# bytes, a simple RNN 5,852.
WIDEST_ROW_IN_REGISTERS = 64


def resident(hidden: int, whole_rows: bool) -> Tiles:
    """Tiles of a cell with a recurrent matmul: all features, and the fewest rows of a matmul."""
    block_h = power_of_two(hidden)
    return Tiles(block_b=16, block_h=block_h, warps=8 if block_h > 64 or whole_rows else 4)


def resident_fits(
    equations: Equations, hidden: int, itemsize: int, target: Target, whole_rows: bool
) -> bool:
    """Whether the recurrent matrix and the operands of one matmul fit into shared memory."""
    block_h = power_of_two(hidden)
    if (whole_rows or itemsize > 2) and block_h > WIDEST_ROW_IN_REGISTERS:
        return False
    return (len(equations.h_gates) * block_h + 16) * block_h * itemsize <= target.shared_memory


def elementwise(hidden: int) -> Tiles:
    """Tiles of a cell without a recurrent matmul: as many programs as there is work for."""
    block_h = min(128, power_of_two(hidden))
    return Tiles(block_b=128 // block_h, block_h=block_h, warps=4)
