"""How a launch cuts a state into programs of one warp."""

from typing import NamedTuple


class Tiling(NamedTuple):
    """The shape of the programs. Rows and records are powers of two.

    Attributes:
        block_p: rows of a state that a program reads.
        read_p: rows of them that it holds at once.
        fold_p: rows of a state that a program folds.
        records: records that a program reads at once.
        registers: most a thread may have, or None; few let more programs share a processor.
        flushers: most programs of a step that fold.
    """

    block_p: int
    read_p: int
    fold_p: int
    records: int
    registers: int | None
    flushers: int = 2112  # 16 on each of 132 processors


# the best of a sweep on an H200 with triton 3.6, at batch 256 and 32 (LARGE) and 1 and 8 (SMALL)
LARGE = Tiling(128, 16, 16, 8, 168), Tiling(64, 16, 16, 16, 128)
SMALL = Tiling(32, 32, 8, 16, None), Tiling(16, 16, 8, 16, None)
ENOUGH = 1000  # programs that keep such a processor busy


def choose_tiling(batch: int, nheads: int, headdim: int) -> Tiling:
    """The tallest programs of which there are enough; short states have short ones."""
    for tiling in LARGE + SMALL[:1]:
        if tiling.block_p < 2 * headdim and batch * nheads * -(-headdim // tiling.block_p) >= ENOUGH:
            return tiling
    return SMALL[-1]
