"""``window="auto"``: a window from shapes alone, so that it is the same on meta, on a GPU and for an estimate."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from replayssm.cache.layer_state import LayerState

PLAIN = 16  # tokens; plain PyTorch moves temporaries too, so that counted bytes say little about its best window
WINDOWS = range(8, 33, 4)  # tokens
# Bytes of state that the rows of one layer must hold before replay pays. On an H200 (bench/results) one row of the
# published Gated DeltaNet and KDA layers, 2 MiB, takes 3.9 and 4.1 us with window 0 and 4.4 and 5.3 with 16; one row of
# Mamba-2, 4 MiB, takes 5.5 and 5.2, and from there on a window is always faster than none.
LEAST_STATE = 4 * 2**20


class LayerBytes(NamedTuple):
    """Bytes of one replay layer and sequence: its state, and the parts of one token."""

    state: int
    q: int
    k: int
    v: int
    g: int
    beta: int
    u: int  # the correction of a delta rule, which kernels keep beside the record and read instead of v; 0 without
    y: int

    @classmethod
    def of(cls, state: LayerState) -> "LayerBytes":
        """The sizes of a layer from its part of a cache, on any device, meta included."""
        geometry, ring = state.geometry, state.ring
        k, v, g, beta = (_nbytes(field, axes=2) for field in ring)
        wide = geometry.nheads * geometry.headdim * ring.beta.itemsize
        return cls(
            state=_nbytes(state.tensors()["checkpoint"], axes=1),
            q=k,
            k=k,
            v=v,
            g=g,
            beta=beta,
            u=wide if geometry.recurrence.delta else 0,
            y=wide,
        )

    @property
    def record(self) -> int:
        """One record as it is written, and as a flush reads it."""
        return self.k + self.v + self.g + self.beta

    @property
    def live_record(self) -> int:
        """One record as a step reads it that does not flush."""
        return self.k + self.g + self.u if self.u else self.record


def choose(backend: str, batch: int, step_tokens: int, layers: Sequence[LayerBytes]) -> int:
    """The window of ``WINDOWS`` that moves the fewest bytes, or 0 where replay does not pay.

    A state of S bytes that is written once in L tokens, and L / 2 records of r bytes that are read at each of them,
    cost least near ``L = sqrt(2 S / r)``, summed over the layers of the model; around it the cost is flat. With bf16
    activations and fp32 states, the published Mamba-2, Gated DeltaNet and KDA layers of docs/math.md, section 5, get
    20, 16 and 12.

    Args:
        backend: "torch" or "triton", what the steps will run on.
        batch: rows of the cache.
        step_tokens: most new tokens of a step. With drafts, window 0 would write the state at each verification, and
            rolling back is what replay is for: it is never chosen.
        layers: the replay layers; none gives the window of plain PyTorch, which nothing then reads.

    Returns:
        Tokens: 0, or a multiple of 4 from 8 to 32, or ``step_tokens`` where that is larger.
    """
    if backend == "torch" or not layers:
        return max(PLAIN, step_tokens)
    state = sum(layer.state for layer in layers)
    if step_tokens == 1 and batch * state < LEAST_STATE * len(layers):
        return 0
    record = sum(layer.live_record for layer in layers)
    return max(min(WINDOWS, key=lambda window: state / window + record * window / 2), step_tokens)


def _nbytes(tensor: Tensor, axes: int) -> int:
    """Bytes of one entry of the first ``axes`` axes, which are never empty."""
    return tensor.nbytes // math.prod(tensor.shape[:axes])
