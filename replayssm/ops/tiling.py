"""How a launch cuts states into programs of one warp."""

from typing import NamedTuple

from replayssm.ops.records import Recurrence


class Tiling(NamedTuple):
    """The shape of the programs. Rows and records are powers of two.

    Attributes:
        block_p: rows of a state that a program reads.
        read_p: rows of them that it holds at once.
        fold_p: rows of a state that a program folds.
        records: records that a program reads at once.
        registers: most that a thread may have, or None; with few, more programs share a processor.
        flushers: most programs of a step that fold.
    """

    block_p: int
    read_p: int
    fold_p: int
    records: int
    registers: int | None
    flushers: int = 2112  # 16 on each of 132 processors


# The best of sweeps on an H200, d_state 128, bf16, window 16 (CHANGELOG.md, Performance); tallest first. The limits of
# registers were chosen for this version of triton: 3.7.1 to 3.9.0 need more for some of the kernels, and spill.
SWEPT_WITH = "3.6"
PLAIN = Tiling(64, 16, 16, 16, 128), Tiling(32, 32, 8, 16, None), Tiling(16, 16, 8, 16, None)
DELTA = Tiling(128, 32, 16, 8, 168), Tiling(64, 16, 16, 8, 168), Tiling(32, 16, 8, 8, None), PLAIN[-1]
CHANNEL = (
    Tiling(128, 16, 16, 8, 168),
    Tiling(64, 16, 16, 8, 168),
    Tiling(32, 16, 8, 8, None),
    Tiling(16, 16, 8, 8, None),
)
ENOUGH = 1000  # programs that keep such a processor busy


def choose_tiling(batch: int, nheads: int, headdim: int, d_state: int, recurrence: Recurrence) -> Tiling:
    """The tallest programs of which there are enough; a state of more than 128 keys is held in shorter pieces."""
    tilings = CHANNEL if recurrence.decay == "channel" else DELTA if recurrence.delta else PLAIN
    chosen = tilings[-1]
    for tiling in tilings:
        if tiling.block_p < 2 * headdim and batch * nheads * -(-headdim // tiling.block_p) >= ENOUGH:
            chosen = tiling
            break
    shorter = max(1, -(-d_state // 128))
    rows = max(4, chosen.read_p >> (shorter - 1).bit_length()), max(4, chosen.fold_p >> (shorter - 1).bit_length())
    return chosen._replace(read_p=rows[0], fold_p=rows[1])


class TokensTiling(NamedTuple):
    """The shape of the programs of a step of several tokens.

    Attributes:
        block_p: rows of a state that a program reads, in pieces of 16.
        few: programs that fold when there is little to fold.
        flushers: most programs that fold.
        registers: most that a thread may have, or None; with few, more programs share a processor.
        stages: pieces of a state that are on their way or in use at once.
    """

    block_p: int
    few: int
    flushers: int
    registers: int | None
    stages: int


def choose_tokens_tiling(batch: int, nheads: int, headdim: int) -> TokensTiling:
    """The tallest programs of which there are enough: whole heads, halves, quarters, ..."""
    pieces = -(-headdim // 16)
    while pieces > 1 and batch * nheads * -(-headdim // (16 * pieces)) < ENOUGH:
        pieces = -(-pieces // 2)
    return TokensTiling(16 * pieces, 528, 2112, None, 3)
