"""Rings of recent tokens: the slot of token i is i % slots. Records, convolution inputs and attention's KV use them.

What stands in a slot outside the live tokens is dead: readers mask it, nobody clears it.
"""

import torch
from torch import Tensor

from replayssm.cache.step import Step


def read_ring(ring: Tensor, rows: Tensor | None, first: Tensor, count: int) -> Tensor:
    """``count`` consecutive tokens of each row, oldest first.

    Args:
        ring: (batch, slots, ...).
        rows: (rows,) int64, the cache rows to read; None is all, in order.
        first: (rows,) int64, the first token; it may be negative. The caller masks tokens that are not live.
        count: tokens, at most ``slots``.

    Returns:
        (rows, count, ...), a new tensor.
    """
    tokens = first.unsqueeze(1) + torch.arange(count, device=ring.device)
    rows = torch.arange(len(ring), device=ring.device) if rows is None else rows
    return ring[rows.unsqueeze(1), tokens.remainder(ring.shape[1])]


def write_ring(ring: Tensor, step: Step, values: Tensor) -> None:
    """Write the new tokens of a step into their slots, in place; of more than ``slots`` tokens, the last ones.

    Args:
        ring: (batch, slots, ...). Rows that are off and slots of other tokens keep their bits.
        step: says where each row starts and how many of its tokens are real.
        values: (rows of the call, t, ...), real tokens first.
    """
    slots = ring.shape[1]
    count = min(step.t, slots)
    skipped = (step.length - count).clamp(min=0).unsqueeze(1)
    index = skipped + torch.arange(count, device=ring.device)
    tokens = (step.start.unsqueeze(1) + index).remainder(slots)
    real = index < step.length.unsqueeze(1)
    rows = torch.arange(len(values), device=ring.device).unsqueeze(1)
    values = step.put(values[rows, index] if step.t > slots else values).to(ring.dtype)
    tokens, real = step.put(tokens), step.put(real)
    if step.present is not None:
        real = real.logical_and(step.present.unsqueeze(1))
    rows = torch.arange(len(ring), device=ring.device).unsqueeze(1)
    # the slots of a row are distinct, so a position that is not real can write back what it finds
    kept = torch.where(real.reshape(real.shape + (1,) * (ring.ndim - 2)), values, ring[rows, tokens])
    ring.index_put_((rows, tokens), kept)
