"""How a launch cuts states into programs of one warp."""

from functools import cache as memoized
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
    warps: int = 1
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


@memoized
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
    """The shape of the programs of a step of several tokens. Rows, keys and records are powers of two, at least 16.

    Attributes:
        block_p: rows of a state that a program reads.
        keys: of a state that it multiplies at once.
        stages: blocks of so many keys that are on their way or in use.
        records: that a program folds at once.
        registers: most that a thread may have, or None; with few, more programs share a processor.
        warps: of a program that reads.
        fold_p: rows of a state that a program folds, a warp for 16.
        flushers: most programs that fold.
    """

    block_p: int
    keys: int
    stages: int
    records: int
    registers: int | None
    warps: int = 1
    fold_p: int = 64
    flushers: int = 528


def choose_tokens_tiling(batch: int, nheads: int, headdim: int, recurrence: Recurrence) -> TokensTiling:
    """The best of sweeps on an H200 at batch 256, cut shorter until there are enough programs."""
    block_p = _enough(batch, nheads, headdim)
    keys = 16 if recurrence.decay == "channel" else 32  # decays by channel take registers of their own
    return TokensTiling(block_p, keys, 3, 16, None if recurrence.delta else 128, fold_p=block_p)


def _enough(batch: int, nheads: int, headdim: int) -> int:
    """Rows of a program, 64 at most, such that there are enough programs."""
    block_p = 64
    while block_p > 16 and (block_p >= 2 * headdim or batch * nheads * -(-headdim // block_p) < ENOUGH):
        block_p //= 2
    return block_p


class CopyTiling(NamedTuple):
    """The shape of the programs of a step of one token that reads states in a format. Rows are a power of two, >= 16.

    Attributes:
        block_p: rows of a state that a program reads.
        records: that it reads at once.
        registers: most that a thread may have, or None.
    """

    block_p: int
    records: int
    registers: int | None


LEAN = ("nvfp4", "int8")  # formats whose products need few registers: more programs are then resident


def choose_copy_tiling(batch: int, nheads: int, headdim: int, recurrence: Recurrence, name: str) -> CopyTiling:
    """For states in the format of this name; the best of sweeps on an H200 at batch 256."""
    records = 4 if recurrence.decay == "channel" else 8
    return CopyTiling(_enough(batch, nheads, headdim), records, 128 if name in LEAN else None)


class StoreTiling(NamedTuple):
    """The shape of the programs that store states. Rows and keys are powers of two.

    Attributes:
        rows: of the state that a program folds and stores.
        keys: at least as many as there are.
        warps: of a program.
        registers: most that a thread may have, or None.
        programs: most of a launch.
    """

    rows: int
    keys: int
    warps: int
    registers: int | None
    programs: int


OF_A_HEAD = ("nvfp4_sr",)  # checkpoints with a scale of the head, which belongs to one program


def choose_store_tiling(
    batch: int, nheads: int, headdim: int, d_state: int, recurrence: Recurrence, checkpoint: str
) -> StoreTiling:
    """Pieces as for states as they are, or whole heads."""
    whole = whole_heads(headdim, d_state)
    if checkpoint in OF_A_HEAD:
        return whole
    cut = choose_tiling(batch, nheads, headdim, d_state, recurrence)
    return StoreTiling(cut.fold_p, whole.keys, cut.warps, None, cut.flushers)


def whole_heads(headdim: int, d_state: int) -> StoreTiling:
    """Programs that own a head: 16 rows of 128 keys a warp, so that a thread holds 64 numbers."""
    rows, keys = max(4, 1 << (headdim - 1).bit_length()), max(32, 1 << (d_state - 1).bit_length())
    return StoreTiling(rows, keys, min(16, rows // 4, max(1, rows * keys // 2048)), None, 528)
