"""The arithmetic of causal softmax attention, over whole sequences and over a cache.

Keys and values are rings of the cache: token i lies in slot i % slots. Rollback is not advancing: what a rejected token
left lies beyond ``seqlen``; it is masked there, and overwritten later.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.cache.packing import masked
from replayssm.cache.ring import read_rings, write_rings
from replayssm.cache.step import Step
from replayssm.trees import Tree

PIECE = 256  # queries attended at once under a sliding window narrower than this
MASK_ELEMENTS = 2**24  # of one piece of a scan over a full buffer: 64 MiB where the backend makes floats of the mask


def attend_whole(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> Tensor:
    """Whole sequences. Padding lies behind the real tokens, where causality hides it.

    Args:
        q: (batch, t, nheads, headdim).
        k, v: (batch, t, kv_heads, headdim or another width); query head h reads head h // (nheads / kv_heads).
        window: tokens that a token sees, itself included; None is all before it.
        scale: of the scores.

    Returns:
        (batch, t, nheads, width of v).
    """
    if window is not None and window < q.shape[1]:
        return _attend_banded(q, k, v, window, before=0, live=None, scale=scale)
    group = q.shape[2] // k.shape[2]
    # the fused kernels of the CPU have no grouped heads, so the heads are copied rather than declared
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale
    )
    return y.transpose(1, 2)


def attend_cached(
    q: Tensor, new: Sequence[Tensor], rings: Sequence[Tensor], step: Step, window: int | None, scale: float
) -> Tensor:
    """The new tokens of a step, which are written to their slots, and see those and what is committed before them.

    Args:
        q: (rows of the call, t, nheads, headdim), packed.
        new: keys and values of the new tokens, (rows of the call, t, kv_heads, headdim or another width), packed; or
            one tensor that is both.
        rings: (batch, slots, kv_heads, width) for each of ``new``.

    Returns:
        (rows of the call, t, nheads, width of the values).
    """
    slots = rings[0].shape[1]
    if step.scan and window is not None and slots >= window:
        # the new tokens push out old ones that the first of them still see: read those before writing
        first = step.start - (window - 1)
        token = first.unsqueeze(1) + torch.arange(window - 1 + step.t, device=q.device)
        live = token >= 0
        old = read_rings(rings, step.cache_rows, first, window - 1)
        seen = [masked(torch.cat([past.to(now.dtype), now], 1), live) for past, now in zip(old, new, strict=True)]
        y = _attend_banded(q, seen[0], seen[-1], window, before=window - 1, live=live, scale=scale)
        write_rings(rings, step, new)
        return y
    write_rings(rings, step, new)
    end = (step.start + step.length).unsqueeze(1)  # (batch, 1)
    slot = torch.arange(slots, device=q.device)
    token = end - 1 - (end - 1 - slot).remainder(slots)  # (batch, slots): the newest token that a slot can hold
    live = token >= 0
    if window is not None:
        live = live & (token > step.start.unsqueeze(1) - window)  # rejected tokens may lie in older slots
    key = token if step.tree is None else _positions(token, step.start, step.tree)
    seen = [masked(step.take(ring), live).to(q.dtype) for ring in rings]
    piece = step.t
    if step.scan:
        piece = max(1, MASK_ELEMENTS // (len(q) * slots * (q.shape[2] // rings[0].shape[2])))
    outputs = []
    for part, query in zip(q.split(piece, 1), step.position().split(piece, 1), strict=True):
        allowed = live.unsqueeze(1) & (key.unsqueeze(1) <= query.unsqueeze(2))
        if window is not None:
            allowed = allowed & (key.unsqueeze(1) > query.unsqueeze(2) - window)
        if step.tree is not None:  # which is one piece
            allowed = allowed & _committed_or_before(token, step.start, step.tree)
        outputs.append(_attend(part, seen[0], seen[-1], allowed, scale))
    return torch.cat(outputs, 1)


def _positions(token: Tensor, start: Tensor, tree: Tree) -> Tensor:
    """Where the cached tokens (batch, slots) stand in their sequences, those from ``start`` (batch,) on as nodes."""
    node = token - start.unsqueeze(1)
    return torch.where(node < 0, token, start.unsqueeze(1) + tree.depth.gather(1, node.clamp(min=0)))


def _committed_or_before(token: Tensor, start: Tensor, tree: Tree) -> Tensor:
    """(batch, t, slots) bool: the cached token (batch, slots) is committed, or the node itself or an ancestor of it."""
    node = (token - start.unsqueeze(1)).unsqueeze(1)
    return (node < 0) | tree.before.gather(2, node.clamp(min=0).expand(-1, tree.t, -1))


def _attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """Attention under a mask, without a copy of the keys for every query head.

    The query heads of one key head become further queries of it.

    Args:
        q: (batch, t, nheads, headdim).
        k, v: (batch, n, kv_heads, headdim or another width), finite also where the mask hides them.
        allowed: (batch or 1, t, n) bool. A query that may see nothing gets arbitrary values.

    Returns:
        (batch, t, nheads, headdim).
    """
    t, group = q.shape[1], q.shape[2] // k.shape[2]
    queries = q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # (batch, kv_heads, group * t, headdim)
    mask = allowed[:, None, None].expand(-1, 1, group, -1, -1).flatten(2, 3)
    y = F.scaled_dot_product_attention(queries, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    return y.unflatten(2, (group, t)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _attend_banded(
    q: Tensor, k: Tensor, v: Tensor, window: int, before: int, live: Tensor | None, scale: float
) -> Tensor:
    """Sliding-window attention in pieces of queries: memory grows with t * window, not t * t.

    Args:
        q: (batch, t, nheads, headdim).
        k, v: (batch, before + t, kv_heads, headdim), ``before`` older tokens in front.
        live: (batch, before + t) bool, keys that exist; None is all.
    """
    first, outputs = 0, []
    for part in q.split(max(window, PIECE), 1):
        lo, hi = max(0, first + before - (window - 1)), first + before + part.shape[1]
        query = torch.arange(first + before, hi, device=q.device).unsqueeze(1)
        key = torch.arange(lo, hi, device=q.device)
        allowed = ((key <= query) & (key > query - window)).unsqueeze(0)
        if live is not None:
            allowed = allowed & live[:, lo:hi].unsqueeze(1)
        outputs.append(_attend(part, k[:, lo:hi], v[:, lo:hi], allowed, scale))
        first += part.shape[1]
    return torch.cat(outputs, 1)
