"""Softmax attention for hybrid models, with keys and values governed by the cache's own counters.

Rollback is not advancing: the key and value of a rejected token lie beyond ``seqlen``; they are masked there, and
overwritten later.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replayssm.cache.packing import Packing, masked
from replayssm.cache.ring import read_rings, write_rings
from replayssm.cache.step import ModuleState, Step
from replayssm.checks import expect, expect_choice, expect_positive, expect_shape, refuse_grad
from replayssm.trees import Tree

PIECE = 256  # queries attended at once under a sliding window narrower than this
MASK_ELEMENTS = 2**24  # of one piece of a scan over a full buffer: 64 MiB where the backend makes floats of the mask


class KVState(ModuleState):
    """Keys and values of one attention layer; token i lies in slot i % slots.

    Attributes:
        k, v: (batch, slots, kv_heads, headdim), keys already rotated.
    """

    def __init__(self, k: Tensor, v: Tensor):
        self.k, self.v = k, v

    def tensors(self) -> dict[str, Tensor]:
        return {"kv.k": self.k, "kv.v": self.v}

    def rings(self) -> Sequence[Sequence[Tensor]]:
        return [[self.k, self.v]]


class Attention(nn.Module):
    """Causal softmax attention: grouped heads, and where asked for rotary positions and a sliding window.

    Args:
        d_model: size of the residual stream.
        nheads: query heads.
        headdim: size of a head; even with rotary positions.
        kv_heads: key and value heads, a divisor of ``nheads``; None is ``nheads``. Query head h reads
            head h // (nheads / kv_heads).
        window: tokens that a token sees, itself included; None is all before it. Bounds the cache.
        rope_theta: base of the rotary frequencies (arXiv 2104.09864); None leaves positions out.
        bias: biases in the four projections.
    """

    def __init__(
        self,
        d_model: int,
        nheads: int,
        headdim: int,
        *,
        kv_heads: int | None = None,
        window: int | None = None,
        rope_theta: float | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        kv_heads = nheads if kv_heads is None else kv_heads
        expect_positive("Attention", d_model=d_model, nheads=nheads, headdim=headdim, kv_heads=kv_heads)
        if window is not None:
            expect_positive("Attention", window=window)
        expect(
            nheads % kv_heads == 0,
            f"Attention: kv_heads must be a divisor of nheads={nheads}; got {kv_heads}. Every key head serves the "
            "same number of query heads.",
        )
        expect_choice("Attention", "bias", bias, (False, True))
        if rope_theta is not None:
            expect(
                isinstance(rope_theta, int | float) and not isinstance(rope_theta, bool) and rope_theta > 0,
                f"Attention: rope_theta must be a positive number; got {rope_theta!r}. Use None for no positions.",
            )
            expect(
                headdim % 2 == 0,
                f"Attention: headdim must be even with rope_theta; got {headdim}. Rotations act on pairs of channels.",
            )
        self.d_model, self.nheads, self.headdim, self.kv_heads = d_model, nheads, headdim, kv_heads
        self.window, self.rope_theta = window, rope_theta
        self.q_proj = nn.Linear(d_model, nheads * headdim, bias, device, dtype)
        self.k_proj = nn.Linear(d_model, kv_heads * headdim, bias, device, dtype)
        self.v_proj = nn.Linear(d_model, kv_heads * headdim, bias, device, dtype)
        self.o_proj = nn.Linear(nheads * headdim, d_model, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Draw every parameter anew, in place."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            projection.reset_parameters()

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
    ) -> KVState:
        """All memory for the keys and values of ``batch`` rows.

        Full attention keeps max_seqlen tokens. Under a sliding window no step reads more than the window before its
        first token, so window - 1 + step_tokens slots serve any length. The other arguments are for replay layers.

        Raises:
            ValueError: full attention without max_seqlen.
        """
        if self.window is None:
            if max_seqlen is None:
                raise ValueError(
                    "Attention.alloc_state: max_seqlen must be an int, because attention without a window keeps every "
                    "token; got None. Give ReplayStateCache(..., max_seqlen=prompt + new tokens of the longest row)."
                )
            slots = max_seqlen
        else:
            slots = self.window - 1 + step_tokens
            slots = slots if max_seqlen is None else min(slots, max_seqlen)
        weight = self.k_proj.weight
        shape = (batch, slots, self.kv_heads, self.headdim)
        device = weight.device if device is None else device
        k = torch.zeros(shape, device=device, dtype=weight.dtype)
        return KVState(k, torch.zeros_like(k))

    def forward(
        self,
        x: Tensor,
        state: KVState | None = None,
        *,
        attention_mask: Tensor | None = None,
        rows: Tensor | None = None,
        parents: Tensor | None = None,
    ) -> Tensor:
        """Attend to everything before each token: all of ``x`` without a state, the sequences it holds with one.

        Args:
            x: (batch, t, d_model).
            state: what ``cache.state_of(self)`` returns; the step stays open until ``cache.commit``.
            attention_mask: (batch, t), 1 = a token. A masked position is as if it were not there.
            rows: (batch,) int, the cache row of each row of x, -1 for off; None is all rows in order.
            parents: (t,) or (batch, t) int, the tokens are the nodes of a draft tree: the column of each node's parent,
                -1 for the last committed token. A node follows what is committed and its ancestors, and no other node;
                ``cache.commit`` then names a path. Needs t <= step_tokens and no attention_mask.

        Returns:
            (batch, t, d_model); exact zeros at masked positions and for rows that are off.
        """
        self._check_input(x, state, rows, parents)
        if state is None:
            return self._forward_whole(x, attention_mask)
        refuse_grad("Attention.forward", self, x)
        step = state.open_step(x.shape[1], rows, attention_mask, parents)
        q, k, v = self._project(step.pack(x), step.position())
        return state.finish_step(self.o_proj(self._attend_cached(q, k, v, state, step).flatten(2)))

    def _forward_whole(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        packing = Packing.checked("Attention.forward", attention_mask, x)
        q, k, v = self._project(packing.pack(x), torch.arange(x.shape[1], device=x.device).unsqueeze(0))
        return packing.unpack(self.o_proj(self._attend_whole(q, k, v).flatten(2)))

    def _project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (batch, t, heads, headdim) of packed x at (batch or 1, t) positions."""
        q = self.q_proj(x).unflatten(-1, (self.nheads, self.headdim))
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.headdim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.headdim))
        if self.rope_theta is None:
            return q, k, v
        return rotate(q, position, self.rope_theta), rotate(k, position, self.rope_theta), v

    def _check_input(self, x: Tensor, state: KVState | None, rows: Tensor | None, parents: Tensor | None) -> None:
        """Refuse bad arguments before the step opens; opening it checks those that concern the cache."""
        where = "Attention.forward"
        batch: int | str = "batch"
        if state is None:
            expect(
                rows is None and parents is None,
                f"{where}: rows and parents must come with a state; got none. Pass cache.state_of(layer).",
            )
        else:
            expect(
                isinstance(state, KVState) and tuple(state.k.shape[2:]) == (self.kv_heads, self.headdim),
                f"{where}: state must be this layer's part of a cache; got {type(state).__name__} of another geometry "
                "or kind. Pass cache.state_of(layer).",
            )
            expect(
                state.k.dtype == self.k_proj.weight.dtype,
                f"{where}: state must be in the layer's dtype {self.k_proj.weight.dtype}; got {state.k.dtype}. Build "
                "the cache after converting the model.",
            )
            expect(
                x.device == state.k.device,
                f"{where}: x must be on the state's device {state.k.device}; got {x.device}. Move x there first.",
            )
            batch = state.clock.batch_of(where, rows)
        advice = f"The layer was built with d_model={self.d_model}, and a cache takes one row for each of its rows."
        expect_shape(where, "x", x, (batch, "t", self.d_model), advice)
        expect(x.shape[1] >= 1, f"{where}: x must have at least 1 token; got {tuple(x.shape)}. Skip the call instead.")
        expect(
            x.dtype == self.q_proj.weight.dtype or torch.is_autocast_enabled(x.device.type),
            f"{where}: x must have the layer's dtype {self.q_proj.weight.dtype}; got {x.dtype}. Convert x, or call "
            "under torch.autocast.",
        )

    def _attend_whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A whole sequence. Padding lies behind the real tokens, where causality hides it."""
        if self.window is not None and self.window < q.shape[1]:
            return _attend_banded(q, k, v, self.window, before=0, live=None)
        group = self.nheads // self.kv_heads
        # the fused kernels of the CPU have no grouped heads, so the heads are copied rather than declared
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return y.transpose(1, 2)

    def _attend_cached(self, q: Tensor, k: Tensor, v: Tensor, state: KVState, step: Step) -> Tensor:
        slots = state.k.shape[1]
        if step.scan and self.window is not None and slots >= self.window:
            # the new tokens push out old ones that the first of them still see: read those before writing
            first = step.start - (self.window - 1)
            token = first.unsqueeze(1) + torch.arange(self.window - 1 + step.t, device=q.device)
            live = token >= 0
            old_k, old_v = read_rings((state.k, state.v), step.cache_rows, first, self.window - 1)
            seen_k = masked(torch.cat([old_k.to(k.dtype), k], 1), live)
            seen_v = masked(torch.cat([old_v.to(v.dtype), v], 1), live)
            y = _attend_banded(q, seen_k, seen_v, self.window, before=self.window - 1, live=live)
            write_rings((state.k, state.v), step, (k, v))
            return y
        write_rings((state.k, state.v), step, (k, v))
        end = (step.start + step.length).unsqueeze(1)  # (batch, 1)
        slot = torch.arange(slots, device=q.device)
        token = end - 1 - (end - 1 - slot).remainder(slots)  # (batch, slots): the newest token that a slot can hold
        live = token >= 0
        if self.window is not None:
            live = live & (token > step.start.unsqueeze(1) - self.window)  # rejected tokens may lie in older slots
        key = token if step.tree is None else _positions(token, step.start, step.tree)
        seen_k = masked(step.take(state.k), live).to(q.dtype)
        seen_v = masked(step.take(state.v), live).to(q.dtype)
        piece = step.t
        if step.scan:
            piece = max(1, MASK_ELEMENTS // (len(q) * slots * (self.nheads // self.kv_heads)))
        outputs = []
        for part, query in zip(q.split(piece, 1), step.position().split(piece, 1), strict=True):
            allowed = live.unsqueeze(1) & (key.unsqueeze(1) <= query.unsqueeze(2))
            if self.window is not None:
                allowed = allowed & (key.unsqueeze(1) > query.unsqueeze(2) - self.window)
            if step.tree is not None:  # which is one piece
                allowed = allowed & _committed_or_before(token, step.start, step.tree)
            outputs.append(_attend(part, seen_k, seen_v, allowed))
        return torch.cat(outputs, 1)


def _positions(token: Tensor, start: Tensor, tree: Tree) -> Tensor:
    """Where the cached tokens (batch, slots) stand in their sequences, those from ``start`` (batch,) on as nodes."""
    node = token - start.unsqueeze(1)
    return torch.where(node < 0, token, start.unsqueeze(1) + tree.depth.gather(1, node.clamp(min=0)))


def _committed_or_before(token: Tensor, start: Tensor, tree: Tree) -> Tensor:
    """(batch, t, slots) bool: the cached token (batch, slots) is committed, or the node itself or an ancestor of it."""
    node = (token - start.unsqueeze(1)).unsqueeze(1)
    return (node < 0) | tree.before.gather(2, node.clamp(min=0).expand(-1, tree.t, -1))


def rotate(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Turn the channel pairs (i, i + headdim / 2) of each head by position * theta^(-2 i / headdim).

    Args:
        x: (batch, t, heads, headdim).
        position: (batch or 1, t) int64.

    Returns:
        As x. Angles are in fp32 (fp64 for fp64 x) whatever the dtype of x: bf16 cannot hold a position.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    pairs = x.shape[-1] // 2
    frequency = theta ** (torch.arange(pairs, device=x.device, dtype=dtype) / -pairs)
    angle = (position.unsqueeze(-1) * frequency).unsqueeze(2)  # (batch, t, 1, pairs)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.to(dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Attention under a mask, without a copy of the keys for every query head.

    The query heads of one key head become further queries of it.

    Args:
        q: (batch, t, nheads, headdim).
        k, v: (batch, n, kv_heads, headdim), finite also where the mask hides them.
        allowed: (batch or 1, t, n) bool. A query that may see nothing gets arbitrary values.

    Returns:
        (batch, t, nheads, headdim).
    """
    t, group = q.shape[1], q.shape[2] // k.shape[2]
    queries = q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # (batch, kv_heads, group * t, headdim)
    mask = allowed[:, None, None].expand(-1, 1, group, -1, -1).flatten(2, 3)
    y = F.scaled_dot_product_attention(queries, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return y.unflatten(2, (group, t)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _attend_banded(q: Tensor, k: Tensor, v: Tensor, window: int, before: int, live: Tensor | None) -> Tensor:
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
        outputs.append(_attend(part, k[:, lo:hi], v[:, lo:hi], allowed))
        first += part.shape[1]
    return torch.cat(outputs, 1)
