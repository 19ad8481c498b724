"""The memory that decode kernels work on, in the middle of a decode, and steps of the kernels over it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from draws import DEVICE, draw
from oracles import token_loop
from records import make_records, tokens_of
from torch import Tensor

from replayssm.ops import triton_decode
from replayssm.ops.records import Records, Recurrence
from replayssm.ops.tiling import Tiling

Alloc = Callable[..., Tensor]  # (batch, ...) sizes and a dtype -> memory, all NaN


def dense(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


@dataclass(frozen=True)
class Shape:
    recurrence: Recurrence
    heads: tuple[int, int]  # value heads, key groups
    headdim: int
    d_state: int
    window: int
    step_tokens: int

    @property
    def slots(self) -> int:
        return max(self.window, self.step_tokens) + self.step_tokens


class Stream:
    """Random tokens for every row, the state before them, and what the fp64 token loop makes of both."""

    def __init__(self, shape: Shape, batch: int, tokens: int, seed: int, gate: str = "random", keys: str = "random"):
        nheads, _ = shape.heads
        delta = shape.recurrence.delta
        q, records = make_records(
            decay=shape.recurrence.decay,
            delta=delta,
            batch=batch,
            t=tokens,
            heads=shape.heads,
            headdim=shape.headdim,
            d_state=shape.d_state,
            gate=gate,
            keys=keys,
            seed=seed,
        )
        state = draw(seed + 9, batch, nheads, shape.headdim, shape.d_state)
        self.q, self.records, self.state = q, records, state
        exact = tokens_of(q, records)
        self.y, after = token_loop(exact, delta=delta, state=state)
        self.states = torch.cat([state.unsqueeze(1), after], 1)  # (batch, 1 + tokens, ...)
        held = torch.einsum("bthpn,bthn->bthp", self.states[:, :-1] * exact.g.exp().unsqueeze(-2), exact.k)
        self.u = exact.beta.unsqueeze(-1) * (exact.v - held)

    def at(self, rows: list[int], first: list[int], t: int) -> tuple[Tensor, Records]:
        """t tokens of some rows, each from its own place."""

        def cut(x: Tensor) -> Tensor:
            return torch.stack([x[row, begin : begin + t] for row, begin in zip(rows, first, strict=True)])

        return cut(self.q), Records(*(cut(x) for x in self.records))


@dataclass
class Pool:
    """Rows of a cache; row i has taken its first ``seqlen[i] - start[i]`` tokens of a stream."""

    shape: Shape
    start: list[int]
    checkpoint: Tensor
    ring: Records
    u: Tensor | None
    seqlen: Tensor
    flushed: Tensor

    @classmethod
    def of(cls, shape: Shape, stream: Stream, start: list[int], pending: list[int], alloc: Alloc = dense) -> "Pool":
        """Row i holds the first pending[i] tokens of its stream as records; all other slots are NaN."""
        batch, dtype = len(start), stream.state.dtype
        checkpoint = alloc(*stream.state.shape, dtype=dtype)
        checkpoint.copy_(stream.state)
        ring = Records(*(alloc(batch, shape.slots, *x.shape[2:], dtype=x.dtype) for x in stream.records))
        u = alloc(batch, shape.slots, *stream.u.shape[2:], dtype=dtype) if shape.recurrence.delta else None
        for row, (first, count) in enumerate(zip(start, pending, strict=True)):
            slots = [(first + i) % shape.slots for i in range(count)]
            for field, new in zip(ring, stream.records, strict=True):
                field[row, slots] = new[row, :count]
            if u is not None:
                u[row, slots] = stream.u[row, :count].to(dtype)
        flushed = torch.tensor(start, device=DEVICE)
        return cls(shape, start, checkpoint, ring, u, flushed + torch.tensor(pending, device=DEVICE), flushed)

    def taken(self) -> list[int]:
        """Tokens of the stream that each row has committed."""
        return [int(n) - first for n, first in zip(self.seqlen, self.start, strict=True)]

    def tensors(self) -> dict[str, Tensor]:
        named = {"checkpoint": self.checkpoint, **self.ring._asdict()}
        return named if self.u is None else {**named, "u": self.u}

    def copy(self) -> "Pool":
        return replace(
            self,
            checkpoint=self.checkpoint.clone(),
            ring=Records(*(x.clone() for x in self.ring)),
            u=None if self.u is None else self.u.clone(),
            seqlen=self.seqlen.clone(),
            flushed=self.flushed.clone(),
        )

    def step(
        self,
        q: Tensor,
        records: Records,
        *,
        rows: list[int] | None = None,
        length: list[int] | None = None,
        tiling: Tiling | None = None,
    ) -> Tensor:
        """One step of the kernels, all of it kept; the outputs, in memory that held NaN."""
        batch, t = len(self.start), q.shape[1]
        called = list(range(batch)) if rows is None else rows
        new = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
        for place, row in enumerate(called):
            if row >= 0:
                new[row] = t if length is None else length[place]
        pending = self.seqlen - self.flushed
        flushing = (pending + new > self.shape.window).logical_and(new > 0)
        torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
        try:
            y = triton_decode.replay(
                q,
                records,
                self.checkpoint,
                self.ring,
                self.u,
                flushing,
                self.seqlen,
                self.flushed,
                rows=None if rows is None else torch.tensor(rows, device=DEVICE),
                length=None if length is None else torch.tensor(length, device=DEVICE),
                recurrence=self.shape.recurrence,
                tiling=tiling,
            )
        finally:
            torch.use_deterministic_algorithms(False)
        self.flushed = torch.where(flushing, self.seqlen, self.flushed)
        self.seqlen = self.seqlen + new
        return y

    def flush(self, which: list[bool], tiling: Tiling | None = None) -> None:
        due = torch.tensor(which, device=DEVICE)
        triton_decode.flush(
            due,
            self.checkpoint,
            self.ring,
            self.seqlen,
            self.flushed,
            recurrence=self.shape.recurrence,
            tiling=tiling,
        )
        self.flushed = torch.where(due, self.seqlen, self.flushed)
