"""The two counters of every row, and the step between a model call and its commit.

``Clock`` owns the counters and opens and closes steps. ``Step`` says which tokens of a call are real and which cache
rows they belong to. ``ModuleState`` is the base of what one module keeps in a cache. All of a step's arithmetic stays
on the device; a value is read only where reading is free (``checks.readable``).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from replayssm.cache.packing import Packing, expect_mask, has_interior_padding, refuse_interior_padding
from replayssm.checks import expect, expect_device, expect_integers, expect_shape, readable
from replayssm.trees import Tree, expect_parents, misplaced

ERRORS = (
    "commit was given a kept count outside 0 .. new tokens of its row (it was clamped)",
    "an attention_mask had padding between tokens (the tokens were packed)",
    "a row was given more tokens than max_seqlen leaves room for (the surplus was dropped)",
    "parents had a node whose parent does not stand before it (it was moved there)",
    "commit was given a path that leaves the tree (it was cut there)",
)
KEPT, INTERIOR, OVERFLOW, PARENTS, PATH = range(5)


class Around(NamedTuple):
    """Where the tokens before a step and its own stand in a ring.

    Attributes:
        rows: (rows of the call, 1) int64, the cache row of each.
        slots: (rows of the call, history + t) int64, of the tokens before the step, oldest first, and of its own; of
            those before alone where ``new`` is None.
        missing: (rows of the call, tokens of ``slots``, 1) bool, what stands before a sequence's first token.
        new: (rows of the call, t) int64, the slots of its own; None where some tokens are to be passed over, or where
            the ring has no room for all beside those before.
    """

    rows: Tensor
    slots: Tensor
    missing: Tensor
    new: Tensor | None


class Step(Packing):
    """One open step: t new positions for some cache rows, of which some are real tokens.

    Attributes:
        t: positions of the call, padding included.
        scan: t > step_tokens, so the new tokens go straight into the checkpoint.
        tree: of drafts, for the rows of the call; None is a chain.
        index: (rows of the call,) int64, contiguous, the cache row of each, -1 for off; None is all, in order.
        cache_rows: (rows of the call,) int64, with an arbitrary row for a row that is off; None is all, in order.
        start: (rows of the call,) int64, tokens committed before the step; 0 for a row that is off.
        asked: (rows of the call,) int64, real new tokens that the call brings; 0 for a row that is off.
        length: (rows of the call,) int64, those of them for which max_seqlen leaves room.
        present: (batch,) bool, cache rows that take part, or None if all do, in order.
        row_length: (batch,) int64, ``length`` by cache row.
        flushing: (batch,) bool, cache rows whose committed records are folded at the start of the step.
    """

    def __init__(
        self, clock: "Clock", t: int, rows: Tensor | None, attention_mask: Tensor | None, parents: Tensor | None
    ):
        self.t, self.rows, self.attention_mask, self.parents = t, rows, attention_mask, parents
        self.scan = t > clock.step_tokens
        batch, device = clock.batch, clock.seqlen.device
        self.present = self._source = self.index = self.cache_rows = self.off = None
        if rows is not None:
            self.index = rows.long().contiguous()
            self.off, self.cache_rows = self.index < 0, self.index.clamp(min=0)
            slot = torch.where(self.off, batch, self.index)  # rows that are off share a slot behind the last row
            self._source = slot.new_zeros(batch + 1).scatter(0, slot, torch.arange(len(rows), device=device))[:batch]
            self.present = torch.zeros(batch + 1, dtype=torch.bool, device=device).scatter(0, slot, True)[:batch]
        self.start = self._if_on(self.take(clock.seqlen))
        self.tree = None if parents is None else Tree(parents, len(self.start))
        self.asked = torch.full_like(self.start, t) if attention_mask is None else (attention_mask != 0).sum(1)
        self.asked = self._if_on(self.asked)
        self.length = self.asked
        if clock.max_seqlen is not None:
            self.length = self.asked.minimum(clock.max_seqlen - self.start)
        all_real = attention_mask is None and rows is None and clock.max_seqlen is None
        super().__init__(attention_mask, t, None if all_real else self.length)
        self.row_length = self.put(self.length)
        pending = clock.seqlen - clock.flushed
        room = 0 if self.scan else clock.window - (t if all_real else self.row_length)
        self.flushing = pending > room
        self._around: dict[tuple[int, int], Around] = {}
        if self.present is not None:
            self.row_length = torch.where(self.present, self.row_length, 0)
            self.flushing = self.flushing.logical_and(self.present)

    def position(self) -> Tensor:
        """(rows of the call, t) int64: where each new token stands in its sequence, in packed order."""
        offset = torch.arange(self.t, device=self.start.device) if self.tree is None else self.tree.depth
        return self.start.unsqueeze(1) + offset

    def around(self, history: int, slots: int) -> Around:
        """Where its tokens and the ``history`` ones before stand in rings of ``slots``; found once for all modules."""
        if (history, slots) not in self._around:
            every_token = self.valid is None and history + self.t <= slots
            offset = torch.arange(-history, self.t if every_token else 0, device=self.start.device)
            tokens = self.start.unsqueeze(1) + offset
            rows = torch.arange(len(tokens), device=tokens.device) if self.cache_rows is None else self.cache_rows
            found = tokens.remainder(slots)
            new = found[:, history:] if every_token else None
            self._around[history, slots] = Around(rows.unsqueeze(1), found, (tokens < 0).unsqueeze(2), new)
        return self._around[history, slots]

    def take(self, cached: Tensor) -> Tensor:
        """Cache rows -> rows of the call; an arbitrary row stands in for a row that is off."""
        return cached if self.cache_rows is None else cached.index_select(0, self.cache_rows)

    def put(self, values: Tensor) -> Tensor:
        """Rows of the call -> cache rows; arbitrary values where a cache row is not ``present``."""
        return values if self._source is None else values.index_select(0, self._source)

    def _if_on(self, counts: Tensor) -> Tensor:
        return counts if self.off is None else torch.where(self.off, 0, counts)


class Clock:
    """The counters of every row of a cache; both only grow until a row is reset.

    Attributes:
        seqlen: (batch,) int64, tokens committed.
        flushed: (batch,) int64, tokens inside the checkpoint; seqlen - flushed records are pending.
        seed: (batch,) int64, the random stream of each row.
        errors: (len(ERRORS),) bool, set on the device where a value could not be checked on the host.
        step: the open step, or None.
    """

    def __init__(self, seed: Tensor, window: int, step_tokens: int, max_seqlen: int | None):
        batch, device = len(seed), seed.device
        self.batch, self.window, self.step_tokens, self.max_seqlen = batch, window, step_tokens, max_seqlen
        self.seed = seed
        self.seqlen = torch.zeros(batch, dtype=torch.int64, device=device)
        self.flushed = torch.zeros_like(self.seqlen)
        self.errors = torch.zeros(len(ERRORS), dtype=torch.bool, device=device)
        self.step: Step | None = None

    @property
    def capacity(self) -> int:
        """Most records that are live at once: a full window, or the tokens of one step."""
        return max(self.window, self.step_tokens)

    @property
    def slots(self) -> int:
        """Of a ring of records; step_tokens more than are live, so that new records never meet them."""
        return self.slots_for(self.window, self.step_tokens)

    @staticmethod
    def slots_for(window: int, step_tokens: int) -> int:
        """``slots`` of a cache with this window and these step_tokens."""
        return max(window, step_tokens) + step_tokens

    def open(
        self, where: str, t: int, rows: Tensor | None, attention_mask: Tensor | None, parents: Tensor | None
    ) -> Step:
        """Open a step, or join the open one.

        Raises:
            ValueError: rows, attention_mask or parents have a wrong shape, dtype or device, or values that can be seen
                to be out of range; nothing has changed then.
            RuntimeError: the arguments differ from those of the open step.
        """
        if self.step is not None:
            return self._join(where, t, rows, attention_mask, parents)
        self._check_arguments(where, t, rows, attention_mask, parents)
        step = Step(self, t, rows, attention_mask, parents)
        self._check_values(where, step)
        self.step = step
        return step

    def batch_of(self, where: str, rows: Tensor | None) -> int:
        """How many rows a call must have."""
        if rows is None:
            return self.batch
        advice = "Give the cache row of each row of the input, -1 for off."
        expect_shape(where, "rows", rows, ("batch",), advice)
        expect(len(rows) > 0, f"{where}: rows must name at least 1 row; got none. {advice}")
        return len(rows)

    def refuse_open(self, where: str) -> None:
        """Raise RuntimeError between a step and its commit, when some modules have moved on and others not."""
        if self.step is not None:
            raise RuntimeError(
                f"{where}: the cache must be between a commit and the next step; got an open step of t={self.step.t}. "
                "Call cache.commit() first; after a step that failed half way, cache.reset()."
            )

    def close(self, kept: Tensor) -> None:
        """Advance the counters by ``kept`` (batch,) new tokens of each row; the rest is rolled back."""
        step = self.step
        assert step is not None
        torch.where(step.flushing, self.seqlen, self.flushed, out=self.flushed)
        self.seqlen.add_(kept)
        if step.scan:  # a scan leaves no records
            scanned = self.seqlen if step.present is None else torch.where(step.present, self.seqlen, self.flushed)
            self.flushed.copy_(scanned)
        self.step = None

    def _join(
        self, where: str, t: int, rows: Tensor | None, attention_mask: Tensor | None, parents: Tensor | None
    ) -> Step:
        step = self.step
        assert step is not None
        same = t == step.t and rows is step.rows and attention_mask is step.attention_mask and parents is step.parents
        if not same:
            raise RuntimeError(
                f"{where}: an open step must get the same t, rows, attention_mask and parents objects from every "
                f"module; got t={t} after t={step.t}, or another rows, attention_mask or parents object. Commit the "
                "open step first, and pass one object through the whole model."
            )
        return step

    def _check_arguments(
        self, where: str, t: int, rows: Tensor | None, attention_mask: Tensor | None, parents: Tensor | None
    ) -> None:
        device = self.seqlen.device
        expect(t >= 1, f"{where}: a step must have at least 1 token; got t={t}. Skip the call instead.")
        batch = self.batch_of(where, rows)
        if rows is not None:
            expect_integers(where, "rows", rows)
            expect_device(where, "rows", rows, device)
            if readable(rows):
                index = rows.long()
                on = index[index >= 0]
                expect(
                    bool((index >= -1).all()) and bool((on < self.batch).all()) and len(on.unique()) == len(on),
                    f"{where}: rows must be -1 or distinct cache rows 0 .. {self.batch - 1}; got {rows.tolist()}. "
                    "Give each cache row at most once.",
                )
        if attention_mask is not None:
            expect_mask(where, attention_mask, (batch, t), device)
        if parents is not None:
            expect(
                t <= self.step_tokens,
                f"{where}: parents must come with at most step_tokens={self.step_tokens} tokens; got t={t}. Give a "
                "smaller tree, or build the cache with more step_tokens.",
            )
            expect(
                attention_mask is None,
                f"{where}: attention_mask must be None with parents; got both. Fill up the tree of a row with fewer "
                "drafts: nodes off the path that is committed change nothing.",
            )
            expect_device(where, "parents", parents, device)
            expect_parents(where, parents, (batch, t))

    def _check_values(self, where: str, step: Step) -> None:
        """Raise where values may be read, set the error flags where they may not."""
        if step.attention_mask is not None:
            interior = has_interior_padding(step.attention_mask)
            if readable(interior) or (step.scan and not torch.compiler.is_compiling()):
                refuse_interior_padding(where, interior)
            else:
                self.errors[INTERIOR].logical_or_(interior)
        if step.parents is not None and not readable(step.parents):
            self.errors[PARENTS].logical_or_(misplaced(step.parents))
        if self.max_seqlen is None:
            return
        total = step.start + step.asked
        if readable(total):
            expect(
                bool((total <= self.max_seqlen).all()),
                f"{where}: seqlen + new tokens must be at most max_seqlen={self.max_seqlen}; got "
                f"{int(total.max())}. Build the cache with a larger max_seqlen, or reset the row.",
            )
            return
        expect(
            step.t <= self.max_seqlen,
            f"{where}: t must be at most max_seqlen={self.max_seqlen}; got {step.t}. "
            "Build the cache with a larger max_seqlen.",
        )
        self.errors[OVERFLOW].logical_or_((total > self.max_seqlen).any())


class ModuleState:
    """What one stateful module keeps in a cache. A subclass adds its tensors and names them in ``tensors``.

    Attributes:
        clock: the cache's counters; set by the cache.
        name: the module's name in the model; set by the cache.
        step: the open step in which the module has been called, or None.
        finished: the module's call in the open step has come to its end.
    """

    clock: Clock
    name: str
    step: Step | None = None
    finished: bool = False

    @property
    def where(self) -> str:
        """How errors name this state."""
        return f"{type(self).__name__} ({self.name})"

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor, cache row first; reset, reorder, copies and byte counts work on these alone."""
        raise NotImplementedError

    def rings(self) -> Sequence[Sequence[Tensor]]:
        """Groups of tensors (batch, slots, ...) of equal slots, in which token i stands in slot i % slots.

        A commit of a path through a draft tree brings the tokens of the path together in these alone.
        """
        raise NotImplementedError

    def fold(self, which: Tensor) -> None:
        """Fold the pending records of the cache rows in ``which`` (batch,) bool; most modules have none."""

    def open_step(
        self,
        t: int,
        rows: Tensor | None = None,
        attention_mask: Tensor | None = None,
        parents: Tensor | None = None,
    ) -> Step:
        """Open the step of this model call, or join it; once a step.

        Args:
            t: positions of the call, padding included.
            rows: (rows of the call,) int, cache row of each row of the call, -1 for off; None is all rows in order.
            attention_mask: (rows of the call, t), 1 = a token; None is all tokens.
            parents: (t,) or (rows of the call, t) int, of a draft tree; see ``replayssm.trees``. None is a chain.

        Raises:
            ValueError: see ``Clock.open``.
            RuntimeError: this module has been called in the open step, or the step was opened with other arguments.
        """
        if self.step is not None:
            raise RuntimeError(
                f"{self.where}: a module must be called once in a step; got a second call before commit. "
                "Call cache.commit() after each model step; after a step that failed half way, cache.reset()."
            )
        step = self.clock.open(self.where, t, rows, attention_mask, parents)
        self.step, self.finished = step, False
        return step

    def finish_step(self, y: Tensor) -> Tensor:
        """Bring the module's outputs (rows of the call, t, ...) back from packed order, and mark its call as done.

        A call that raises before this leaves the step incomplete, and ``commit`` refuses it.
        """
        step = self.called()
        y = step.unpack(y)
        self.finished = True
        return y

    def leave_step(self) -> None:
        """Forget the step: it has been committed or given up."""
        self.step, self.finished = None, False

    def called(self) -> Step:
        """The open step in which this module has been called."""
        if self.step is None:
            raise RuntimeError(
                f"{self.where}: a state must be used inside a step; got no open step. Call state.open_step(t) first."
            )
        return self.step


class OwnCache(nn.Module):
    """Base of a part of a model that is called apart from it, over a cache of its own: the model's passes it over."""


@runtime_checkable
class StatefulModule(Protocol):
    """A module that keeps something for each sequence: replay layers and attention."""

    def alloc_state(
        self,
        batch: int,
        *,
        window: int,
        step_tokens: int,
        max_seqlen: int | None,
        checkpoint: str,
        read_format: str | None,
        device: torch.device | str | None,
    ) -> ModuleState:
        """All memory that the module needs for ``batch`` rows."""
        ...
