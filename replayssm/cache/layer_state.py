"""What a replay layer keeps for each sequence: the checkpoint, the ring of records since, the convolution's inputs."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.cache.packing import masked
from replayssm.cache.ring import read_rings, write_rings
from replayssm.cache.step import Clock, ModuleState
from replayssm.checks import expect, expect_exists, readable
from replayssm.ops import chunked, decode
from replayssm.ops.records import Records, Recurrence
from replayssm.ops.scan import Backend, scan

MOST_IN_A_ROW = 2**31 - 1  # numbers of a ring: a kernel's offsets inside a row have 32 bits


def check_formats(where: str, checkpoint: str, read_format: str | None) -> None:
    """Refuse a checkpoint or read format that does not exist."""
    expect_exists(where, "checkpoint", checkpoint, ("fp32",))
    expect_exists(where, "read_format", read_format, (None,))


class Geometry(NamedTuple):
    """Everything about a replay layer that its state depends on."""

    nheads: int
    headdim: int
    d_state: int
    ngroups: int
    conv_channels: int
    d_conv: int
    recurrence: Recurrence


class LayerState(ModuleState):
    """The state of one replay layer for every row of a cache.

    Attributes:
        ring: Records, axis 1 = slot; the record of token i stands in slot i % slots. k and v as the layer made them,
            g and beta in fp32 (fp64 in an fp64 layer). Slots that are not live hold anything.
        u: (batch, slots, nheads, headdim) fp32 or fp64 by the same rule, the write vectors that kernels read instead of
            v where there is a delta rule; None without one, and for plain PyTorch. A flush never reads it.
        conv: (batch, d_conv - 1 + step_tokens, channels), raw inputs of the short convolution by the same rule.
    """

    def __init__(
        self,
        batch: int,
        geometry: Geometry,
        *,
        window: int,
        step_tokens: int,
        checkpoint: str,
        read_format: str | None,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ):
        check_formats("LayerState", checkpoint, read_format)
        self.geometry = geometry
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        slots = Clock.slots_for(window, step_tokens)
        nheads, headdim, d_state, ngroups, conv_channels, d_conv, recurrence = geometry

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=device)

        self._checkpoint = zeros(nheads, headdim, d_state, dtype=wide)
        self.ring = Records(
            k=zeros(slots, ngroups, d_state, dtype=dtype),
            v=zeros(slots, nheads, headdim, dtype=dtype),
            g=zeros(slots, nheads, recurrence.decay_width(d_state), dtype=wide),
            beta=zeros(slots, nheads, dtype=wide),
        )
        self.conv = zeros(d_conv - 1 + step_tokens, conv_channels, dtype=dtype)
        self.u: Tensor | None = None
        self._backend: decode.Chosen = "torch"

    def use(self, backend: decode.Chosen) -> None:
        """Say what the steps run on, before the first of them; kernels get what they need beside the ring.

        Raises:
            ValueError: kernels cannot address the ring.
        """
        self._backend = backend
        if backend == "torch":
            return
        slots, nheads, widest = self.ring.v.shape[1], self.geometry.nheads, max(self.geometry[1:3])
        numbers = slots * nheads * widest
        expect(
            numbers <= MOST_IN_A_ROW,
            f"{self.where}: window must leave a row's ring at most {MOST_IN_A_ROW} numbers, which kernels count in 32 "
            f"bits; got {slots} slots x {nheads} heads x {widest} = {numbers}. Choose a smaller window, or "
            "backend='torch'.",
        )
        if self.geometry.recurrence.delta:
            self.u = torch.zeros_like(self.ring.v, dtype=self.ring.beta.dtype)

    def tensors(self) -> dict[str, Tensor]:
        rings = {f"ring.{name}": ring for name, ring in self.ring._asdict().items()}
        if self.u is not None:
            rings["ring.u"] = self.u
        return {"checkpoint": self._checkpoint, **rings, "conv": self.conv}

    def rings(self) -> Sequence[Sequence[Tensor]]:
        return [self.ring if self.u is None else [*self.ring, self.u], [self.conv]]

    @property
    def checkpoint(self) -> Tensor:
        """(batch, nheads, headdim, d_state), the stored checkpoint: what the recurrence continues from. Not a copy."""
        self.clock.refuse_open(f"{self.where}: checkpoint")
        return self._checkpoint

    def state(self) -> Tensor:
        """The state after everything committed.

        Returns:
            (batch, nheads, headdim, d_state), fp32 or fp64, a new tensor; the cache is left as it was.
        Cost: one state read, and one written to the new tensor.
        """
        self.clock.refuse_open(f"{self.where}: state()")
        if self._backend == "torch":
            return self._folded(None)
        state = self._checkpoint.clone()
        self._flush(torch.ones_like(self.clock.seqlen, dtype=torch.bool), state)
        return state

    def extend_conv(self, x: Tensor) -> Tensor:
        """Put the convolution's history before its new inputs, and remember those.

        Args:
            x: (rows of the call, t, channels), packed.

        Returns:
            (rows of the call, d_conv - 1 + t, channels); in a draft tree, where a node's past is its own, for each
            (rows of the call, t, d_conv, channels). Inputs before a sequence's first token are zeros.
        """
        step = self.called()
        history = self.geometry.d_conv - 1
        (past,) = read_rings((self.conv,), step.cache_rows, step.start - history, history)
        written = torch.arange(-history, 0, device=x.device) + step.start.unsqueeze(1) >= 0
        write_rings((self.conv,), step, (x.detach(),))
        window = torch.cat([masked(past, written).to(x.dtype), x], dim=1)
        if step.tree is None:
            return window
        tokens = (step.tree.lookback(history + 1) + history).flatten(1)
        return window.gather(1, tokens.unsqueeze(2).expand(-1, -1, x.shape[2])).unflatten(1, (step.t, -1))

    def replay(self, q: Tensor, records: Records) -> Tensor:
        """Outputs of the new tokens of a step, read from the checkpoint and the records since.

        Rows that have no room for the new records fold their committed ones first. A draft tree is always read in plain
        PyTorch, from the same ring; with kernels, its u is kept for them.

        Args:
            q: (rows of the call, t, ngroups, d_state), packed.
            records: of the new tokens, packed.

        Returns:
            (rows of the call, t, nheads, headdim), fp32 or fp64; arbitrary at positions that are not real.
        Cost: one state read. For each row that flushes, one written, and in plain PyTorch one more read; there, where
            the rows cannot be looked at without waiting for the device, for every row.
        """
        step, clock = self.called(), self.clock
        if self._backend == "triton" and step.tree is None:
            # as they will be read back, so that a token sees the same values at once and later
            kept = Records(*(new.to(ring.dtype) for new, ring in zip(records, self.ring, strict=True)))
            return decode.replay(
                q,
                kept,
                self._checkpoint,
                self.ring,
                self.u,
                step.flushing,
                clock.seqlen,
                clock.flushed,
                rows=step.index,
                length=None if step.valid is None else step.length,
                recurrence=self.geometry.recurrence,
            )
        self.fold(step.flushing)
        write_rings(self.ring, step, records)
        first_live = step.take(torch.where(step.flushing, clock.seqlen, clock.flushed))
        # a row with new tokens has at most capacity - length committed ones, so this many reach back to all live ones
        count = clock.capacity + step.t - 1
        live = self._window(step.cache_rows, count, step.start + step.t, first_live, step.length)
        checkpoint, recurrence = step.take(self._checkpoint), self.geometry.recurrence
        if step.tree is None:
            return chunked.replay(q, live, checkpoint, recurrence)
        y, u = chunked.replay_tree(q, live, step.tree, checkpoint, recurrence)
        if self.u is not None:
            write_rings((self.u,), step, (u,))
        return y

    def scan(self, q: Tensor, records: Records, backend: Backend = "auto") -> Tensor:
        """Outputs of a step of any length; the final state becomes the checkpoint.

        Args:
            q: (rows of the call, t, ngroups, d_state), packed.
            records: of the new tokens, packed.
            backend: the layer's ``scan_backend``.

        Returns:
            (rows of the call, t, nheads, headdim), fp32 or fp64, or from fla in the dtype of v; arbitrary at positions
            that are not real.
        Cost: one state read and one written for each row, one more written for rows with pending records.
        """
        step = self.called()
        self.fold(step.flushing)
        records = Records(*(masked(field, step.valid) for field in records))
        checkpoint = step.take(self._checkpoint)
        y, final = scan(self.where, q, records, checkpoint, self.geometry.recurrence, backend)
        final = step.put(final)
        if step.present is not None:
            final = torch.where(step.present[:, None, None, None], final, self._checkpoint)
        self._checkpoint.copy_(final)
        return y

    def fold(self, which: Tensor) -> None:
        """Fold the committed records of the cache rows in ``which`` (batch,) bool into their checkpoints."""
        if self._backend == "triton":
            self._flush(which, self._checkpoint)
            return
        if not readable(which):
            folded = self._folded(None)
            self._checkpoint.copy_(torch.where(which[:, None, None, None], folded, self._checkpoint))
            return
        rows = which.nonzero().squeeze(1)
        if len(rows):
            self._checkpoint.index_copy_(0, rows, self._folded(rows))

    def _flush(self, which: Tensor, checkpoint: Tensor) -> None:
        """Fold into the rows ``which`` of a checkpoint, by the kernel."""
        clock = self.clock
        decode.flush(which, checkpoint, self.ring, clock.seqlen, clock.flushed, recurrence=self.geometry.recurrence)

    def _folded(self, rows: Tensor | None) -> Tensor:
        """The state of ``rows`` (all if None) with everything committed folded in."""
        clock = self.clock
        checkpoint, seqlen, flushed = (
            x if rows is None else x.index_select(0, rows) for x in (self._checkpoint, clock.seqlen, clock.flushed)
        )
        committed = self._window(rows, clock.capacity, seqlen, flushed, torch.zeros_like(seqlen))
        return chunked.flush(committed, checkpoint, self.geometry.recurrence)

    def _window(self, rows: Tensor | None, count: int, end: Tensor, first_live: Tensor, new: Tensor) -> Records:
        """The ``count`` records before token ``end`` (rows,), with zeros for those that are not live.

        A record is live from ``first_live`` up to the last committed token, and for ``new`` tokens after it.
        """
        first = end - count
        tokens = first.unsqueeze(1) + torch.arange(count, device=first.device)
        seqlen = self.clock.seqlen if rows is None else self.clock.seqlen.index_select(0, rows)
        live = (tokens >= first_live.unsqueeze(1)) & (tokens < (seqlen + new).unsqueeze(1))
        return Records(*(masked(field, live) for field in read_rings(self.ring, rows, first, count)))
