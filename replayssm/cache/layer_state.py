"""What a replay layer keeps for each sequence: checkpoint and read copy, the ring of records since, and the
convolution's inputs."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.cache.checkpoint import EXACT
from replayssm.cache.packing import masked
from replayssm.cache.ring import pass_on, read_rings, write_rings
from replayssm.cache.selection import Selection
from replayssm.cache.step import Clock, ModuleState, Step
from replayssm.cache.stored_state import StoredState, check_formats
from replayssm.checks import expect, expect_shape
from replayssm.ops import chunked, decode
from replayssm.ops.records import Records, Recurrence
from replayssm.ops.scan import Backend, scan

MOST_IN_A_ROW = 2**31 - 1  # numbers of a ring: a kernel's offsets inside a row have 32 bits


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
        stored: checkpoint and read copy.
        index: which replay layer of the model this is; set by the cache.
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

        self.stored = StoredState(checkpoint, read_format, (batch, nheads, headdim, d_state), wide, device)
        self.index = 0
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
            NotImplementedError: kernels cannot sum formats in the layer's dtype.
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
        if not self.stored.plain and self.ring.beta.dtype == torch.float64:
            raise NotImplementedError(
                f"{self.where}: checkpoint must be 'fp32' and read_format None in an fp64 layer on backend 'triton', "
                f"whose kernels sum formats in fp32; got {self.stored.formats}. Use backend='torch'."
            )
        if self.geometry.recurrence.delta:
            self.u = torch.zeros_like(self.ring.v, dtype=self.ring.beta.dtype)

    def tensors(self) -> dict[str, Tensor]:
        rings = {f"ring.{name}": ring for name, ring in self.ring._asdict().items()}
        if self.u is not None:
            rings["ring.u"] = self.u
        return {**self.stored.tensors(), **rings, "conv": self.conv}

    def rings(self) -> Sequence[Sequence[Tensor]]:
        return [self.ring if self.u is None else [*self.ring, self.u], [self.conv]]

    @property
    def checkpoint(self) -> Tensor:
        """(batch, nheads, headdim, d_state), the stored checkpoint: what the recurrence continues from.

        Of the "fp32" format not a copy (whoever writes into it calls ``rebuild_copy``); of the others the numbers that
        are stored, in a new tensor. To assign states stores them for all rows, rounded as a flush would round them, and
        makes the read copy.
        """
        self.clock.refuse_open(f"{self.where}: checkpoint")
        return self.stored.checkpoint.load(Selection())

    @checkpoint.setter
    def checkpoint(self, states: Tensor) -> None:
        self.clock.refuse_open(f"{self.where}: checkpoint")
        advice = "Give the state of every row of the cache."
        expect_shape(self.where, "checkpoint", states, (self.clock.batch, *self.stored.checkpoint.shape), advice)
        self._store(states, Selection(), self.clock.flushed - 1)

    def rebuild_copy(self) -> None:
        """Make the read copy of all rows again, after something was written straight into ``tensors()``.

        The copy is a function of the stored checkpoint, so what is saved and restored is the checkpoint alone.
        """
        self.clock.refuse_open(f"{self.where}: rebuild_copy")
        self.stored.rebuild_copy(Selection())

    def state(self) -> Tensor:
        """The state after everything committed.

        Returns:
            (batch, nheads, headdim, d_state), fp32 or fp64, a new tensor; the cache is left as it was.
        Cost: one state read, and one written to the new tensor.
        """
        self.clock.refuse_open(f"{self.where}: state()")
        if not self._folds_in_place:
            return self._folded(Selection())
        state = self._exact.clone()
        self._flush(torch.ones_like(self.clock.seqlen, dtype=torch.bool), state)
        return state

    @property
    def _folds_in_place(self) -> bool:
        """Kernels fold into the checkpoint as it is."""
        return self._backend == "triton" and self.stored.checkpoint.exact

    @property
    def _as_stored(self) -> decode.Stored:
        """The states as kernels read and write them."""
        checkpoint, copy = self.stored.checkpoint.planes, self.stored.copy
        return decode.Stored(
            checkpoint, () if copy is None else copy.planes, self.clock.seed, self.index, *self.stored.formats
        )

    @property
    def _exact(self) -> Tensor:
        """The checkpoint as kernels read and write it."""
        return self.stored.checkpoint.planes[0]

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
        window = pass_on(self.conv, step, x, history)
        if step.tree is None:
            return window
        tokens = (step.tree.lookback(history + 1) + history).flatten(1)
        return window.gather(1, tokens.unsqueeze(2).expand(-1, -1, x.shape[2])).unflatten(1, (step.t, -1))

    def replay(self, q: Tensor, records: Records) -> Tensor:
        """Outputs of the new tokens of a step, read from the checkpoint and the records since.

        Rows that have no room for the new records fold their committed ones first, and answer from what they have
        folded; the others read the copy, where there is one. A draft tree is always read in plain PyTorch, from the
        same ring; with kernels, its u is kept for them.

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
                self._as_stored,
                self.ring,
                self.u,
                step.flushing,
                clock.seqlen,
                clock.flushed,
                rows=step.index,
                length=None if step.valid is None else step.length,
                recurrence=self.geometry.recurrence,
            )
        state = self._fold_and_read(step.flushing)
        write_rings(self.ring, step, records)
        first_live = step.take(torch.where(step.flushing, clock.seqlen, clock.flushed))
        # a row with new tokens has at most capacity - length committed ones, so this many reach back to all live ones
        count = clock.capacity + step.t - 1
        live = self._window(step.cache_rows, count, step.start + step.t, first_live, step.length)
        state, recurrence = step.take(state), self.geometry.recurrence
        if step.tree is None:
            return chunked.replay(q, live, state, recurrence)
        y, u = chunked.replay_tree(q, live, step.tree, state, recurrence)
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
        state = step.take(self._committed(step))
        records = Records(*(masked(field, step.valid) for field in records))
        y, final = scan(self.where, q, records, state, self.geometry.recurrence, backend)
        # a row that neither folds nor brings a token keeps the bits that it has
        changed = None if step.valid is None else (step.row_length > 0).logical_or(step.flushing)
        selection = Selection(changed)
        self._store(selection.take(step.put(final)), selection, self.clock.seqlen + step.row_length - 1)
        return y

    def fold(self, which: Tensor) -> None:
        """Fold the committed records of the cache rows in ``which`` (batch,) bool into their checkpoints."""
        if self._backend == "triton":
            clock, recurrence = self.clock, self.geometry.recurrence
            decode.flush(which, self._as_stored, self.ring, clock.seqlen, clock.flushed, recurrence=recurrence)
        else:
            self._fold(which)

    def _flush(self, which: Tensor, checkpoint: Tensor) -> None:
        """Fold into the rows ``which`` of an exact checkpoint, by the kernel; no copy is made."""
        clock, recurrence = self.clock, self.geometry.recurrence
        stored = decode.Stored((checkpoint,), (), clock.seed, self.index, EXACT, None)
        decode.flush(which, stored, self.ring, clock.seqlen, clock.flushed, recurrence=recurrence)

    def _fold(self, which: Tensor) -> tuple[Selection, Tensor | None]:
        """Fold in plain PyTorch; the rows that had something to fold, and their states before they were stored."""
        due = self._due(which)
        if due.none:
            return due, None
        folded = self._folded(due)
        self._store(folded, due, self.clock.seqlen - 1)
        return due, folded

    def _fold_and_read(self, which: Tensor) -> Tensor:
        """Fold the rows in ``which``; the states that a step reads, (batch, nheads, headdim, d_state)."""
        if self._folds_in_place:  # a draft tree
            self.fold(which)
            due = self._due(which)
            folded = None if due.none else due.take(self._exact)
        else:
            due, folded = self._fold(which)
        return self.stored.read(due, folded, every_row_folds=self.clock.window == 0)

    def _committed(self, step: Step) -> Tensor:
        """The states before a scan, of every cache row; kernels fold an exact checkpoint in place."""
        if self._folds_in_place:
            self._flush(step.flushing, self._exact)
            return self._exact
        state, due = self.stored.checkpoint.load(Selection()), self._due(step.flushing)
        if due.none:
            return state
        state = state.clone()
        due.write(state, self._folded(due))
        return state

    def _due(self, which: Tensor) -> Selection:
        """Of the cache rows in ``which``, those that have something to fold."""
        return Selection(which.logical_and(self.clock.seqlen > self.clock.flushed))

    def _folded(self, selection: Selection) -> Tensor:
        """The states of rows with everything committed folded in."""
        clock = self.clock
        seqlen, flushed = selection.take(clock.seqlen), selection.take(clock.flushed)
        committed = self._window(selection.rows, clock.capacity, seqlen, flushed, torch.zeros_like(seqlen))
        return chunked.flush(committed, self.stored.checkpoint.load(selection), self.geometry.recurrence)

    def _store(self, states: Tensor, selection: Selection, position: Tensor) -> None:
        """Keep states (rows worked on, ...) whose last token is ``position`` (batch,) as those of the chosen rows."""
        self.stored.save(states, selection, seed=self.clock.seed, position=position, layer=self.index)

    def _window(self, rows: Tensor | None, count: int, end: Tensor, first_live: Tensor, new: Tensor) -> Records:
        """The ``count`` records before token ``end`` (rows,), with zeros for those that are not live.

        A record is live from ``first_live`` up to the last committed token, and for ``new`` tokens after it.
        """
        first = end - count
        tokens = first.unsqueeze(1) + torch.arange(count, device=first.device)
        seqlen = self.clock.seqlen if rows is None else self.clock.seqlen.index_select(0, rows)
        live = (tokens >= first_live.unsqueeze(1)) & (tokens < (seqlen + new).unsqueeze(1))
        return Records(*(masked(field, live) for field in read_rings(self.ring, rows, first, count)))
