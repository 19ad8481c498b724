"""Sequences that the decode kernels alone keep, in memory whose every unused byte is 0xFF: NaN in each float dtype."""

import math

import torch
from draws import DEVICE
from oracles import token_loop
from records import between, to, tokens_of
from torch import Tensor

from replayssm.bench.cases import CASES, Case
from replayssm.ops import triton_decode
from replayssm.ops.records import Records
from replayssm.ops.tiling import Tiling

MAMBA2, GDN, KDA = (case.recurrence for case in CASES)
# Sizes of every kind: no powers of two, 1 to 12 heads a group, d_state on both sides of headdim.
ODD = (
    Case("mamba2", "odd", 6, 80, 48, 2, MAMBA2),
    Case("mamba2", "odd", 12, 5, 7, 1, MAMBA2),
    Case("gdn", "odd", 3, 40, 24, 1, GDN),
    Case("gdn", "odd", 4, 16, 96, 4, GDN),
    Case("kda", "odd", 3, 40, 24, 1, KDA),
    Case("kda", "odd", 4, 5, 80, 2, KDA),
)


def poison_free_memory(largest: int) -> None:
    """Fill what ``torch.empty`` will hand out with 0xFF, in blocks of 1 KiB up to ``largest`` bytes."""
    sizes = [2**power for power in range(10, max(largest, 1024).bit_length())]
    blocks = [torch.full((size,), 255, dtype=torch.uint8, device=DEVICE) for size in sizes for _ in range(4)]
    del blocks  # the allocator keeps them


class Sequences:
    """Rows of a cache, advanced by the kernels, with the counters and the schedule of a ``ReplayStateCache``.

    All they keep is carved out of one pool, row after row: every tensor has the stride of a row, and there are gaps.

    Attributes:
        pool: (batch, bytes of a row) uint8.
        checkpoint, ring, u: views of it, as ``triton_decode.replay`` takes them; NaN in the rings at first.
        name: (batch,) int64, where each row stood at first; row b has decoded 3 b tokens then.
        tiling: of the launches; None is the choice by shape.
    """

    tiling: Tiling | None = None

    def __init__(self, case: Case, batch: int, *, window: int, step_tokens: int = 1, dtype: torch.dtype):
        self.case, self.window, self.step_tokens, self.dtype = case, window, step_tokens, dtype
        self._carve(torch.full((batch, self._carve(None)), 255, dtype=torch.uint8, device=DEVICE))
        self.checkpoint.normal_(generator=torch.Generator(DEVICE).manual_seed(7))
        self.name = torch.arange(batch, device=DEVICE)
        self.seqlen = 3 * self.name
        self.flushed = self.seqlen.clone()

    def _carve(self, pool: Tensor | None) -> int:
        """Make the views of ``pool``, if there is one; the bytes of a row."""
        case, dtype, slots = self.case, self.dtype, max(self.window, self.step_tokens) + self.step_tokens
        head, width = case.nheads, case.recurrence.decay_width(case.d_state)
        shapes = {
            "checkpoint": ((head, case.headdim, case.d_state), torch.float32),
            "k": ((slots, case.ngroups, case.d_state), dtype),
            "v": ((slots, head, case.headdim), dtype),
            "g": ((slots, head, width), torch.float32),
            "beta": ((slots, head), torch.float32),
            "u": ((slots, head, case.headdim), torch.float32),
        }
        views, start = {}, 0
        for name, (shape, kind) in shapes.items():
            end = start + math.prod(shape) * kind.itemsize
            if pool is not None:
                views[name] = pool[:, start:end].view(kind).unflatten(1, shape)
            start = (end // 64 + 2) * 64  # a gap, and an aligned start
        if pool is not None:
            self.pool, self.checkpoint = pool, views["checkpoint"]
            self.ring = Records(*(views[name] for name in Records._fields))
            self.u = views["u"] if case.recurrence.delta else None
        return start

    def take(self, index: Tensor) -> "Sequences":
        """A copy of some rows, in a pool of their own."""
        twin = object.__new__(Sequences)
        twin.case, twin.window, twin.step_tokens, twin.dtype = self.case, self.window, self.step_tokens, self.dtype
        twin.tiling = self.tiling
        twin._carve(self.pool.index_select(0, index))
        twin.name, twin.seqlen, twin.flushed = (x[index] for x in (self.name, self.seqlen, self.flushed))
        return twin

    def copy(self) -> "Sequences":
        return self.take(torch.arange(len(self.pool), device=DEVICE))

    def draw(self, t: int, seed: int = 1) -> tuple[Tensor, Records]:
        """Queries and records of t tokens for every row."""
        return self.case.draw(len(self.pool), t, dtype=self.dtype, device=DEVICE, seed=seed)

    def step(self, q: Tensor, records: Records, rows: Tensor | None = None, length: Tensor | None = None) -> Tensor:
        """Outputs of a step of t new tokens, all kept; ``rows`` and ``length`` as ``triton_decode.replay`` has them."""
        new = torch.full_like(self.seqlen, q.shape[1])
        if rows is not None:
            given = new[: len(rows)] if length is None else length
            new = torch.zeros_like(new)
            for row, tokens in zip(rows.tolist(), given.tolist(), strict=True):
                if row >= 0:
                    new[row] = tokens
        flushing = (self.seqlen - self.flushed + new > self.window) & (new > 0)
        y = triton_decode.replay(
            q, records, self.checkpoint, self.ring, self.u, flushing, self.seqlen, self.flushed,
            rows=rows, length=length, recurrence=self.case.recurrence, tiling=self.tiling,
        )  # fmt: skip
        self.flushed = torch.where(flushing, self.seqlen, self.flushed)
        self.seqlen = self.seqlen + new
        return y

    def flush(self, which: Tensor) -> None:
        """Fold what the rows in ``which`` (batch,) bool have pending."""
        triton_decode.flush(
            which, self.checkpoint, self.ring, self.seqlen, self.flushed, recurrence=self.case.recurrence,
            tiling=self.tiling,
        )  # fmt: skip
        self.flushed = torch.where(which, self.seqlen, self.flushed)

    def decode(self, q: Tensor, records: Records, *, spread: bool = True) -> Tensor:
        """Outputs of all tokens, ``step_tokens`` at a time.

        With ``spread`` one row in ``window`` is flushed after each of the first steps, so that rows are due at
        different ones from then on.
        """
        outputs = []
        for start in range(0, q.shape[1], self.step_tokens):
            end = start + self.step_tokens
            outputs.append(self.step(q[:, start:end], between(records, start, end)))
            if spread and start < self.window:
                self.flush(self.name % self.window == start)
        return torch.cat(outputs, 1)


def exact_and_plain(rows: Sequences, q: Tensor, records: Records) -> list[tuple[Tensor, Tensor]]:
    """Outputs and final state of the token loop from where ``rows`` stand with nothing pending, in fp64 and in fp32."""
    results = []
    for dtype in (torch.float64, torch.float32):
        tokens = tokens_of(q.to(dtype), to(records, dtype))
        y, states = token_loop(tokens, delta=rows.case.recurrence.delta, state=rows.checkpoint.to(dtype))
        results.append((y, states[:, -1]))
    return results
