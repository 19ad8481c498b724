"""Where decoding chooses its backend, and how a step reaches the kernels.

"torch" runs everywhere. "triton" runs on a GPU, and on a CPU through Triton's interpreter, which is for tests; it
raises where it cannot run. "auto" takes triton for what is on a GPU and torch elsewhere. Triton is imported at the
first launch.

A graph that ``torch.compile`` traces cannot hold a launch, so it holds an operator that launches; without a graph the
launch is called directly, because an operator costs about 20 us of a CPU's time for each layer of each step.
"""

import importlib.util
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from replayssm.checks import expect_exists
from replayssm.ops.records import Records, Recurrence

Chosen = Literal["torch", "triton"]
BACKENDS: tuple[str, ...] = ("auto", *get_args(Chosen))


def choose(where: str, backend: str, device: torch.device) -> Chosen:
    """The backend that decodes what lies on ``device``; "triton" is allowed on meta, where nothing is launched.

    Raises:
        NotImplementedError: there is no such backend.
        RuntimeError: backend is "triton" and it cannot run there.
    """
    expect_exists(where, "backend", backend, BACKENDS)
    if backend == "auto":
        return automatic(device)
    if backend == "torch":
        return "torch"
    if device.type != "meta":
        _expect_triton(where, device)
    return "triton"


def automatic(device: torch.device) -> Chosen:
    """What "auto" takes for tensors on ``device``; ROCm's devices are called "cuda" too."""
    return "triton" if device.type == "cuda" and importlib.util.find_spec("triton") is not None else "torch"


def _expect_triton(where: str, device: torch.device) -> None:
    refusal = f"{where}: backend must be 'auto' or 'torch'"
    try:
        from triton.knobs import runtime
    except ImportError as error:
        raise RuntimeError(
            f"{refusal} where triton cannot be imported; got 'triton' ({error}). Install triton, or use 'torch'."
        ) from error
    if device.type != "cuda" and not runtime.interpret:
        raise RuntimeError(
            f"{refusal} on {device}; got 'triton', whose kernels need a GPU (CUDA or ROCm), or Triton's interpreter. "
            "Move the model to a GPU, or use 'torch'."
        )


class Stored(NamedTuple):
    """The states of a layer as kernels find them.

    Attributes:
        planes: of the checkpoint, (batch, nheads, ...); copies: of the read copy, if there is one.
        seed: (batch,) int64, each row's random stream.
        layer: which replay layer of the model.
        checkpoint, read_format: the names of the formats.
    """

    planes: Sequence[Tensor]
    copies: Sequence[Tensor]
    seed: Tensor
    layer: int
    checkpoint: str
    read_format: str | None


def replay(
    q: Tensor,
    records: Records,
    stored: Stored,
    ring: Records,
    u: Tensor | None,
    flushing: Tensor,
    seqlen: Tensor,
    flushed: Tensor,
    *,
    rows: Tensor | None,
    length: Tensor | None,
    recurrence: Recurrence,
) -> Tensor:
    """One step of new tokens by the kernels, or as one operator of a graph; see ``triton_store.replay``."""
    run = _replay_op if torch.compiler.is_compiling() else _replay
    return run(
        q, *records, [*stored.planes], [*stored.copies], *ring, u, flushing, seqlen, flushed, stored.seed, rows, length,
        stored.layer, stored.checkpoint, stored.read_format, recurrence.decay, recurrence.delta,
    )  # fmt: skip


def flush(
    which: Tensor, stored: Stored, ring: Records, seqlen: Tensor, flushed: Tensor, *, recurrence: Recurrence
) -> None:
    """Fold committed records by the kernels, or as one operator of a graph; see ``triton_store.store``."""
    run = _flush_op if torch.compiler.is_compiling() else _flush
    run(
        which, [*stored.planes], [*stored.copies], *ring, seqlen, flushed, stored.seed,
        stored.layer, stored.checkpoint, stored.read_format, recurrence.decay, recurrence.delta,
    )  # fmt: skip


def _replay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    planes: list[Tensor],
    copies: list[Tensor],
    ring_k: Tensor,
    ring_v: Tensor,
    ring_g: Tensor,
    ring_beta: Tensor,
    u: Tensor | None,
    flushing: Tensor,
    seqlen: Tensor,
    flushed: Tensor,
    seed: Tensor,
    rows: Tensor | None,
    length: Tensor | None,
    layer: int,
    checkpoint: str,
    read_format: str | None,
    decay: Literal["head", "channel"],
    delta: bool,
) -> Tensor:
    from replayssm.ops import triton_store

    return triton_store.replay(
        q,
        Records(k, v, g, beta),
        planes,
        copies,
        Records(ring_k, ring_v, ring_g, ring_beta),
        u,
        flushing,
        seqlen,
        flushed,
        seed,
        layer=layer,
        checkpoint=checkpoint,
        read_format=read_format,
        rows=rows,
        length=length,
        recurrence=Recurrence(decay, delta),
    )


def _flush(
    which: Tensor,
    planes: list[Tensor],
    copies: list[Tensor],
    ring_k: Tensor,
    ring_v: Tensor,
    ring_g: Tensor,
    ring_beta: Tensor,
    seqlen: Tensor,
    flushed: Tensor,
    seed: Tensor,
    layer: int,
    checkpoint: str,
    read_format: str | None,
    decay: Literal["head", "channel"],
    delta: bool,
) -> None:
    from replayssm.ops import triton_store

    triton_store.store(
        None,
        planes,
        copies,
        Records(ring_k, ring_v, ring_g, ring_beta),
        None,
        which,
        seqlen,
        flushed,
        seed,
        layer=layer,
        checkpoint=checkpoint,
        read_format=read_format,
        recurrence=Recurrence(decay, delta),
    )


_FORMATS = "int layer, str checkpoint, str? read_format, str decay, bool delta"
_replay_op = torch.library.custom_op(
    "replayssm::replay",
    _replay,
    mutates_args=("planes", "copies", "ring_k", "ring_v", "ring_g", "ring_beta", "u"),
    schema="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!)[] planes, Tensor(b!)[] copies, "
    "Tensor(c!) ring_k, Tensor(d!) ring_v, Tensor(e!) ring_g, Tensor(f!) ring_beta, Tensor(g!)? u, Tensor flushing, "
    f"Tensor seqlen, Tensor flushed, Tensor seed, Tensor? rows, Tensor? length, {_FORMATS}) -> Tensor",
)
_flush_op = torch.library.custom_op(
    "replayssm::flush",
    _flush,
    mutates_args=("planes", "copies"),
    schema="(Tensor which, Tensor(a!)[] planes, Tensor(b!)[] copies, Tensor ring_k, Tensor ring_v, Tensor ring_g, "
    f"Tensor ring_beta, Tensor seqlen, Tensor flushed, Tensor seed, {_FORMATS}) -> ()",
)


@_replay_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *_: object) -> Tensor:
    return beta.new_empty(v.shape)


@_flush_op.register_fake
def _(*_: object) -> None:
    """Nothing to make."""
