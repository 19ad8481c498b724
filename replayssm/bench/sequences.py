"""Running sequences of one case, as a layer's cache keeps them: what the kernels are checked and timed on."""

from typing import Protocol

import torch
from torch import Tensor

from replayssm.bench.cases import Case
from replayssm.bench.timing import Cursors
from replayssm.cache.step import Clock
from replayssm.ops.records import Records, Recurrence


class Kernels(Protocol):
    """What the bench calls: the module replayssm.ops.triton_decode."""

    def replay(
        self,
        q: Tensor,
        records: Records,
        checkpoint: Tensor,
        ring: Records,
        u: Tensor | None,
        flushing: Tensor,
        seqlen: Tensor,
        flushed: Tensor,
        *,
        recurrence: Recurrence,
    ) -> Tensor:
        """Outputs (batch, t, nheads, headdim) of t new tokens; flushing rows fold first, the records are appended."""

    def flush(
        self,
        which: Tensor,
        checkpoint: Tensor,
        ring: Records,
        seqlen: Tensor,
        flushed: Tensor,
        *,
        recurrence: Recurrence,
    ) -> None:
        """Fold the committed records of the rows in ``which`` into their checkpoints."""


class Sequences:
    """``batch`` sequences decoded by replay, ``tokens`` a step.

    Attributes:
        checkpoint: (batch, nheads, headdim, d_state) fp32; taken, not copied.
        ring: Records of max(window, tokens) + tokens slots, and
        u: (batch, slots, nheads, headdim) fp32, or None without a delta rule: both hold random numbers at first.
    """

    def __init__(self, case: Case, checkpoint: Tensor, *, window: int, dtype: torch.dtype, seed: int, tokens: int = 1):
        self.case = case
        self.checkpoint = checkpoint
        batch, device = len(checkpoint), checkpoint.device
        slots = Clock.slots_for(window, tokens)
        _, self.ring = case.draw(batch, slots, dtype=dtype, device=device, seed=seed)
        self.u = None
        if case.recurrence.delta:
            self.u = self.ring.beta.unsqueeze(-1) * self.ring.v.float()

    def poison(self) -> None:
        """NaN into every slot: whoever reads a dead one is found out."""
        for field in (*self.ring, self.u):
            if field is not None:
                field.fill_(torch.nan)

    def step(self, kernels: Kernels, q: Tensor, records: Records, cursors: Cursors) -> Tensor:
        """Outputs (batch, tokens, nheads, headdim) of a step; the counters are the caller's."""
        seqlen, flushed, flushing = cursors
        return kernels.replay(
            q,
            records,
            self.checkpoint,
            self.ring,
            self.u,
            flushing,
            seqlen,
            flushed,
            recurrence=self.case.recurrence,
        )

    def flush(self, kernels: Kernels, which: Tensor, seqlen: Tensor, flushed: Tensor) -> None:
        """Fold the committed records of the rows in ``which`` (batch,) bool."""
        kernels.flush(which, self.checkpoint, self.ring, seqlen, flushed, recurrence=self.case.recurrence)
