"""Pools of the decode kernels whose states are kept in fewer bits, and steps of the kernel that stores them."""

import copy
import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from draws import DEVICE
from pools import Pool, Shape, Stream
from torch import Tensor

from replayssm.cache.selection import Selection
from replayssm.cache.stored_state import StoredState
from replayssm.ops import triton_store
from replayssm.ops.records import Records
from replayssm.ops.triton_blocks import write_rows
from replayssm.ops.triton_checkpoints import EXACT, FORMATS, CheckpointFunctions, load_exact

LAYER = 5
AS_FOLDED = "as folded"  # by the kernel that stores other formats


@triton.jit
def store_as_folded(tile, stream, planes, p, P: tl.constexpr, N: tl.constexpr):
    write_rows(tile, planes[0], p, P, N)
    return tile


FORMATS[AS_FOLDED] = CheckpointFunctions(load_exact, store_as_folded)


@functools.cache
def a_stream(shape: Shape, batch: int, seed: int, dtype: torch.dtype) -> Stream:
    """As many tokens as two windows take; q, k and v in ``dtype``, the rest in what is summed in."""
    stream = Stream(shape, batch, 2 * max(shape.window, shape.step_tokens) + 2, seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    k, v, g, beta = stream.records
    stream.q, stream.records = stream.q.to(dtype), Records(k.to(dtype), v.to(dtype), g.to(wide), beta.to(wide))
    stream.state, stream.u = stream.state.to(wide), stream.u.to(wide)
    return stream


@dataclass
class StoredPool:
    """A pool whose states are in ``stored``; row i draws its random words from the stream ``seed[i]``."""

    pool: Pool
    stored: StoredState
    seed: Tensor
    checkpoint: str
    read_format: str | None

    @classmethod
    def of(
        cls,
        shape: Shape,
        stream: Stream,
        start: list[int],
        pending: list[int],
        checkpoint: str,
        read_format: str | None,
    ) -> "StoredPool":
        """Row i holds the first pending[i] tokens of its stream as records, and a state before them."""
        pool = Pool.of(shape, stream, start, pending)
        sizes, seed = tuple(stream.state.shape), torch.tensor([2**30 * row - 7 for row in start], device=DEVICE)
        stored = StoredState(checkpoint, read_format, sizes, stream.state.dtype, DEVICE)
        stored.save(stream.state, Selection(), seed=seed, position=pool.flushed, layer=LAYER)
        return cls(pool, stored, seed, checkpoint, read_format)

    def copy(self) -> "StoredPool":
        return StoredPool(self.pool.copy(), copy.deepcopy(self.stored), self.seed, self.checkpoint, self.read_format)

    def exact(self) -> "StoredPool":
        """One that stores its states as they are folded here; it begins with what is stored."""
        twin = self.copy()
        states = self.states()
        twin.stored = StoredState("fp32", None, tuple(states.shape), states.dtype, DEVICE)
        twin.stored.checkpoint.planes[0].copy_(states)
        twin.checkpoint, twin.read_format = EXACT if self.checkpoint == EXACT else AS_FOLDED, None
        return twin

    def without_copy(self) -> "StoredPool":
        """One that reads its checkpoint."""
        twin = self.copy()
        twin.stored.copy = twin.read_format = None
        return twin

    def states(self) -> Tensor:
        return self.stored.checkpoint.load(Selection())

    def tensors(self) -> dict[str, Tensor]:
        rings = {name: tensor for name, tensor in self.pool.tensors().items() if name != "checkpoint"}
        return {**self.stored.tensors(), **rings}

    def step(
        self,
        flushing: list[bool],
        new: tuple[Tensor, Records] | None = None,
        *,
        rows: list[int] | None = None,
        length: list[int] | None = None,
    ) -> Tensor | None:
        """Fold, answer and store the rows of the call that are due; the outputs, in memory that held NaN."""
        pool, copies = self.pool, self.stored.copy
        y = None
        if new is not None:
            y = torch.full_like(new[1].v, torch.nan, dtype=new[1].beta.dtype)
        triton_store.store(
            None if new is None else (y, *new),
            self.stored.checkpoint.planes,
            () if copies is None else copies.planes,
            pool.ring,
            pool.u,
            torch.tensor(flushing, device=DEVICE),
            pool.seqlen,
            pool.flushed,
            self.seed,
            layer=LAYER,
            checkpoint=self.checkpoint,
            read_format=self.read_format,
            rows=None if rows is None else torch.tensor(rows, device=DEVICE),
            length=None if length is None else torch.tensor(length, device=DEVICE),
            recurrence=pool.shape.recurrence,
        )
        return y
