"""``window="auto"``: a window from shapes alone, so that it is the same on meta, on a GPU and for an estimate."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from replayssm.cache.layer_state import LayerState

PLAIN = 16  # tokens; plain PyTorch moves temporaries too, so that counted bytes say little about its best window
WINDOWS = range(8, 33, 4)  # tokens
# A byte of a record takes as long as this many of a state: it is read in small pieces, and multiplied by every program.
# So on an H200 the windows that move the fewest bytes, 20, 16 and 12, are slower than 16, 12 and 8 or as fast (1 %).
RECORD_COST = 1.5
# A flush that rounds and copies computes for as long as this many times its bytes would take (trials with nvfp4 copies
# on an H200, windows 16 and 32: CHANGELOG.md, Performance).
COPY_COST = 3
# Bytes of state that the rows of one layer must hold before replay pays. On an H200 (bench/results) one row of the
# published Gated DeltaNet and KDA layers, 2 MiB, takes 3.9 and 4.1 us with window 0 and 4.4 and 5.3 with 16; one row of
# Mamba-2, 4 MiB, takes 5.5 and 5.2, and from there on a window is always faster than none.
LEAST_STATE = 4 * 2**20


class LayerBytes(NamedTuple):
    """Bytes of one replay layer and sequence: its state, and the parts of one token."""

    state: int  # as the checkpoint stores it
    q: int
    k: int
    v: int
    g: int
    beta: int
    u: int  # the correction of a delta rule, which kernels keep beside the record and read instead of v; 0 without
    y: int
    copy: int = 0  # that steps read instead of the checkpoint; 0 where they read the checkpoint
    narrowed: int = 0  # what the checkpoint's format saves of a state in the dtype of its sums

    @classmethod
    def of(cls, state: LayerState) -> "LayerBytes":
        """The sizes of a layer from its part of a cache, on any device, meta included."""
        geometry, ring = state.geometry, state.ring
        k, v, g, beta = (_nbytes(field, axes=2) for field in ring)
        wide = geometry.nheads * geometry.headdim * ring.beta.itemsize
        parts: dict[str, int] = {"checkpoint": 0, "copy": 0}
        for name, tensor in state.stored.tensors().items():
            parts[name.split(".")[0]] += _nbytes(tensor, axes=1)
        return cls(
            state=parts["checkpoint"],
            copy=parts["copy"],
            narrowed=wide * geometry.d_state - parts["checkpoint"],
            q=k,
            k=k,
            v=v,
            g=g,
            beta=beta,
            u=wide if geometry.recurrence.delta else 0,
            y=wide,
        )

    @property
    def wide_state(self) -> int:
        """The state in the dtype of its sums, as conventional decoding keeps it."""
        return self.state + self.narrowed

    @property
    def read(self) -> int:
        """The state as a step reads it that does not flush."""
        return self.copy or self.state

    @property
    def flush(self) -> int:
        """What a step that flushes moves of the state beyond what others read: both go out, the checkpoint comes in."""
        return 2 * self.state + self.copy - self.read

    @property
    def record(self) -> int:
        """One record as it is written, and as a flush reads it."""
        return self.k + self.v + self.g + self.beta

    @property
    def live_record(self) -> int:
        """One record as a step reads it that does not flush."""
        return self.k + self.g + self.u if self.u else self.record


def choose(backend: str, batch: int, step_tokens: int, layers: Sequence[LayerBytes]) -> int:
    """The window of ``WINDOWS`` that takes the least time, or 0 where replay does not pay.

    A flush that moves S bytes once in L tokens, and L / 2 records of r bytes that are read at each of them, cost least
    near ``L = sqrt(2 S / (1.5 r))``, summed over the layers of the model; around it the cost is flat. S is a state, or
    six where steps read a copy. With bf16 activations and fp32 states, the published Mamba-2, Gated DeltaNet and KDA
    layers of docs/math.md, section 5, get 16, 12 and 8.

    Args:
        backend: "torch" or "triton", what the steps will run on.
        batch: rows of the cache.
        step_tokens: most new tokens of a step. With drafts, window 0 would write the state at each verification, and
            rolling back is what replay is for: it is never chosen. Nor is it with read copies, which it never reads.
        layers: the replay layers; none gives the window of plain PyTorch, which nothing then reads.

    Returns:
        Tokens: 0, or a multiple of 4 from 8 to 32, or ``step_tokens`` where that is larger.
    """
    if backend == "torch" or not layers:
        return max(PLAIN, step_tokens)
    state, copies = (sum(sizes) for sizes in zip(*((layer.state, layer.copy) for layer in layers), strict=True))
    if step_tokens == 1 and not copies and batch * state < LEAST_STATE * len(layers):
        return 0
    flush, record = (sum(sizes) for sizes in zip(*((layer.flush, layer.live_record) for layer in layers), strict=True))
    flush *= COPY_COST if copies else 1
    return max(min(WINDOWS, key=lambda window: flush / window + RECORD_COST * record * window / 2), step_tokens)


def _nbytes(tensor: Tensor, axes: int) -> int:
    """Bytes of one entry of the first ``axes`` axes, which are never empty."""
    return tensor.nbytes // math.prod(tensor.shape[:axes])
