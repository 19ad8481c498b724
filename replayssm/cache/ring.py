"""Rings of recent tokens: the slot of token i is i % slots. Records, convolution inputs and attention's KV use them.

What stands in a slot outside the live tokens is dead: readers mask it, nobody clears it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm.cache.step import Step


def read_rings(rings: Sequence[Tensor], rows: Tensor | None, first: Tensor, count: int) -> list[Tensor]:
    """``count`` consecutive tokens of each row, oldest first, from rings of one length.

    Args:
        rings: each (batch, slots, ...).
        rows: (rows,) int64, the cache rows to read; None is all, in order.
        first: (rows,) int64, the first token; it may be negative. The caller masks tokens that are not live.
        count: tokens, at most ``slots``.

    Returns:
        For each ring (rows, count, ...), a new tensor.
    """
    batch, slots = rings[0].shape[:2]
    tokens = first.unsqueeze(1) + torch.arange(count, device=first.device)
    rows = torch.arange(batch, device=first.device) if rows is None else rows
    index = rows.unsqueeze(1), tokens.remainder(slots)
    return [ring[index] for ring in rings]


def write_rings(rings: Sequence[Tensor], step: Step, values: Sequence[Tensor]) -> None:
    """Write the new tokens of a step into their slots, in place; of more than ``slots`` tokens, the last ones.

    Args:
        rings: each (batch, slots, ...). Rows that are off and slots of other tokens keep their bits.
        step: says where each row starts and how many of its tokens are real.
        values: for each ring (rows of the call, t, ...), real tokens first.
    """
    slots = rings[0].shape[1]
    rows, _, _, own = step.around(0, slots)
    if own is not None:  # nothing to pass over, in half the launches
        for ring, new in zip(rings, values, strict=True):
            ring.index_put_((rows, own), new.to(ring.dtype))
        return
    count = min(step.t, slots)
    newest = (step.length - count).clamp(min=0).unsqueeze(1) + torch.arange(count, device=step.length.device)
    tokens = step.put((step.start.unsqueeze(1) + newest).remainder(slots))
    real = step.put(newest < step.length.unsqueeze(1))
    if step.present is not None:
        real = real.logical_and(step.present.unsqueeze(1))
    called = torch.arange(len(newest), device=newest.device).unsqueeze(1)
    index = torch.arange(len(real), device=real.device).unsqueeze(1), tokens
    for ring, new in zip(rings, values, strict=True):
        new = step.put(new[called, newest] if step.t > slots else new).to(ring.dtype)
        # the slots of a row are distinct, so a position that is not real can write back what it finds
        ring.index_put_(index, torch.where(real.reshape(real.shape + (1,) * (ring.ndim - 2)), new, ring[index]))


def pass_on(ring: Tensor, step: Step, values: Tensor, history: int) -> Tensor:
    """The ``history`` tokens before those of a step, and these behind them, which are written into their slots.

    Args:
        ring: (batch, slots, channels), with at least ``history`` slots beside those of the new tokens.
        values: (rows of the call, t, channels), real tokens first.

    Returns:
        (rows of the call, history + t, channels), a new tensor; before a sequence's first token stand zeros.
    """
    rows, slots, missing, new = step.around(history, ring.shape[1])
    if new is not None and values.dtype == ring.dtype and not values.requires_grad:
        ring.index_put_((rows, new), values)
        return ring[rows, slots].masked_fill_(missing, 0)  # written and read back: one launch less than to join them
    past = ring[rows, slots[:, :history]].masked_fill_(missing[:, :history], 0)
    write_rings((ring,), step, (values.detach(),))
    return torch.cat([past.to(values.dtype), values], dim=1)


def keep_path(rings: Sequence[Tensor], start: Tensor, nodes: Tensor, kept: Tensor) -> None:
    """Bring the nodes of a path through a draft tree to the front of a step's tokens, in place.

    Args:
        rings: each (batch, slots, ...); the node in column j stands at token start + j.
        start: (batch,) int64, the first token of the step.
        nodes: (batch, n) int64, columns from the root, n at most ``slots``.
        kept: (batch,) int64, how many of them count; the others may be anything.
    """
    slots = rings[0].shape[1]
    order = torch.arange(nodes.shape[1], device=nodes.device)
    target = (start.unsqueeze(1) + order).remainder(slots)
    source = (start.unsqueeze(1) + nodes).remainder(slots)
    source = torch.where(order < kept.unsqueeze(1), source, target)  # what is not kept is written back as it is
    row = torch.arange(len(nodes), device=nodes.device).unsqueeze(1)
    for ring in rings:
        ring.index_put_((row, target), ring[row, source])  # all is read before any is written
