"""How a launch cuts a state into programs of one warp."""

from typing import NamedTuple

from replayssm.ops.records import Recurrence


class Tiling(NamedTuple):
    """The shape of the programs; powers of two, but for ``flushers``.

    Attributes:
        block_p: rows of a state that a program owns.
        read_p: rows of them that it holds at once while it reads.
        fold_p: rows that it holds at once while it folds.
        fold_n: keys that it holds at once while it folds.
        records: records that a program reads at once.
        abreast: rows that stand side by side in a warp.
        lanes: keys that stand side by side in a warp.
        flushers: most programs of a step that fold.
    """

    block_p: int
    read_p: int
    fold_p: int
    fold_n: int
    records: int
    abreast: int
    lanes: int
    flushers: int


def choose_tiling(batch: int, nheads: int, headdim: int, d_state: int, recurrence: Recurrence) -> Tiling:
    """The tiling for a shape."""
    rows = max(16, 1 << (headdim - 1).bit_length())
    block_p = min(64, rows)
    return Tiling(block_p=block_p, read_p=16, fold_p=16, fold_n=32, records=8, abreast=4, lanes=32, flushers=1056)
