"""Attention layers of hybrid models, with what they keep governed by the cache's own counters."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from replayssm.cache.packing import Packing
from replayssm.cache.step import ModuleState, Step
from replayssm.checks import expect, expect_choice, expect_positive, expect_shape, refuse_grad
from replayssm.layers.norm import RMSNorm
from replayssm.models.attend import attend_cached, attend_whole
from replayssm.models.rotary import rotate


class KVState(ModuleState):
    """What one attention layer keeps of its tokens; token i lies in slot i % slots.

    Attributes:
        kv: name -> (batch, slots, heads, width): keys, as their queries need them, and values.
    """

    def __init__(self, kv: Mapping[str, Tensor]):
        self.kv = dict(kv)

    def tensors(self) -> dict[str, Tensor]:
        return {f"kv.{name}": ring for name, ring in self.kv.items()}

    def rings(self) -> Sequence[Sequence[Tensor]]:
        return [list(self.kv.values())]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> (heads, width)."""
        return {name: tuple(ring.shape[2:]) for name, ring in self.kv.items()}


class CausalAttention(nn.Module):
    """Base of attention layers: checks, padding, and the step. A subclass says what it keeps and how it attends.

    Args:
        d_model: size of the residual stream.
        window: tokens that a token sees, itself included; None is all before it. Bounds the cache.
    """

    o_proj: nn.Linear  # its dtype is the layer's

    def __init__(self, d_model: int, window: int | None = None):
        super().__init__()
        self.d_model, self.window = d_model, window

    def kept(self) -> dict[str, tuple[int, int]]:
        """Name -> (heads, width) of what is kept of a token."""
        raise NotImplementedError(f"{type(self).__name__}: kept must be written by the subclass.")

    def attend(self, x: Tensor, state: KVState | None, step: Step | None) -> Tensor:
        """Packed (rows, t, d_model) -> same: whole sequences, or a step of those in ``state``."""
        raise NotImplementedError(f"{type(self).__name__}: attend must be written by the subclass.")

    def reset_parameters(self) -> None:
        """Draw every parameter anew, in place."""
        for child in self.children():
            cast(nn.Linear, child).reset_parameters()

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
                    f"{type(self).__name__}.alloc_state: max_seqlen must be an int, because attention without a "
                    "window keeps every token; got None. Give ReplayStateCache(..., max_seqlen=prompt + new tokens of "
                    "the longest row)."
                )
            slots = max_seqlen
        else:
            slots = self.window - 1 + step_tokens
            slots = slots if max_seqlen is None else min(slots, max_seqlen)
        weight = self.o_proj.weight
        place: Any = {"device": weight.device if device is None else device, "dtype": weight.dtype}
        return KVState({name: torch.zeros(batch, slots, *shape, **place) for name, shape in self.kept().items()})

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
        where = f"{type(self).__name__}.forward"
        if state is None:
            packing = Packing.checked(where, attention_mask, x)
            return packing.unpack(self.attend(packing.pack(x), None, None))
        refuse_grad(where, self, x)
        step = state.open_step(x.shape[1], rows, attention_mask, parents)
        return state.finish_step(self.attend(step.pack(x), state, step))

    def _check_input(self, x: Tensor, state: KVState | None, rows: Tensor | None, parents: Tensor | None) -> None:
        """Refuse bad arguments before the step opens; opening it checks those that concern the cache."""
        where, dtype = f"{type(self).__name__}.forward", self.o_proj.weight.dtype
        batch: int | str = "batch"
        if state is None:
            expect(
                rows is None and parents is None,
                f"{where}: rows and parents must come with a state; got none. Pass cache.state_of(layer).",
            )
        else:
            expect(
                isinstance(state, KVState) and state.shapes() == self.kept(),
                f"{where}: state must be this layer's part of a cache; got {type(state).__name__} of another geometry "
                "or kind. Pass cache.state_of(layer).",
            )
            ring = next(iter(state.kv.values()))
            expect(
                ring.dtype == dtype,
                f"{where}: state must be in the layer's dtype {dtype}; got {ring.dtype}. Build the cache after "
                "converting the model.",
            )
            expect(
                x.device == ring.device,
                f"{where}: x must be on the state's device {ring.device}; got {x.device}. Move x there first.",
            )
            batch = state.clock.batch_of(where, rows)
        advice = f"The layer was built with d_model={self.d_model}, and a cache takes one row for each of its rows."
        expect_shape(where, "x", x, (batch, "t", self.d_model), advice)
        expect(x.shape[1] >= 1, f"{where}: x must have at least 1 token; got {tuple(x.shape)}. Skip the call instead.")
        expect(
            x.dtype == dtype or torch.is_autocast_enabled(x.device.type),
            f"{where}: x must have the layer's dtype {dtype}; got {x.dtype}. Convert x, or call under torch.autocast.",
        )


class Attention(CausalAttention):
    """Grouped heads, and where asked for rotary positions, a sliding window, norms and an output gate.

    Args:
        d_model: size of the residual stream.
        nheads: query heads.
        headdim: size of a head.
        kv_heads: key and value heads, a divisor of ``nheads``; None is ``nheads``. Query head h reads
            head h // (nheads / kv_heads).
        window: tokens that a token sees, itself included; None is all before it. Bounds the cache.
        rope_theta: base of the rotary frequencies (arXiv 2104.09864); None leaves positions out.
        rotary_dim: channels of a head that are rotated, the first ones, even; None is all.
        gated: what a head gives is multiplied by the sigmoid of a gate of its own before ``o_proj`` (Qwen3-Next; arXiv
            2505.06708); ``q_proj`` has a head's gate behind its query.
        qk_norm: an RMS norm over each head of the queries and of the keys, before they are rotated, with factors of
            1 + weight (Qwen3-Next).
        norm_eps: of these norms.
        scale: of the scores; None is headdim^-0.5.
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
        rotary_dim: int | None = None,
        gated: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        scale: float | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(d_model, window)
        kv_heads = nheads if kv_heads is None else kv_heads
        expect_positive("Attention", d_model=d_model, nheads=nheads, headdim=headdim, kv_heads=kv_heads)
        if window is not None:
            expect_positive("Attention", window=window)
        expect(
            nheads % kv_heads == 0,
            f"Attention: kv_heads must be a divisor of nheads={nheads}; got {kv_heads}. Every key head serves the "
            "same number of query heads.",
        )
        for name, flag in (("bias", bias), ("gated", gated), ("qk_norm", qk_norm)):
            expect_choice("Attention", name, flag, (False, True))
        _check_rotary(headdim, rope_theta, rotary_dim)
        expect(
            scale is None or (isinstance(scale, int | float) and not isinstance(scale, bool) and scale > 0),
            f"Attention: scale must be a positive number or None; got {scale!r}. None is headdim^-0.5.",
        )
        self.scale = headdim**-0.5 if scale is None else scale
        self.nheads, self.headdim, self.kv_heads = nheads, headdim, kv_heads
        self.rope_theta, self.rotary_dim, self.gated, self.qk_norm = rope_theta, rotary_dim, gated, qk_norm
        self.q_proj = nn.Linear(d_model, nheads * headdim * (2 if gated else 1), bias, device, dtype)
        self.k_proj = nn.Linear(d_model, kv_heads * headdim, bias, device, dtype)
        self.v_proj = nn.Linear(d_model, kv_heads * headdim, bias, device, dtype)
        if qk_norm:
            self.q_norm = RMSNorm(headdim, eps=norm_eps, plus_one=True, device=device, dtype=dtype)
            self.k_norm = RMSNorm(headdim, eps=norm_eps, plus_one=True, device=device, dtype=dtype)
        self.o_proj = nn.Linear(nheads * headdim, d_model, bias, device, dtype)

    def kept(self) -> dict[str, tuple[int, int]]:
        return {"k": (self.kv_heads, self.headdim), "v": (self.kv_heads, self.headdim)}

    def attend(self, x: Tensor, state: KVState | None, step: Step | None) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.nheads, -1))
        q, gate = q.chunk(2, -1) if self.gated else (q, None)
        k, v = (linear(x).unflatten(-1, (self.kv_heads, self.headdim)) for linear in (self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_theta is not None:
            at = torch.arange(x.shape[1], device=x.device).unsqueeze(0) if step is None else step.position()
            q, k = (rotate(part, at, self.rope_theta, self.rotary_dim) for part in (q, k))
        if state is None or step is None:
            y = attend_whole(q, k, v, self.window, self.scale)
        else:
            y = attend_cached(q, (k, v), (state.kv["k"], state.kv["v"]), step, self.window, self.scale)
        return self.o_proj((y if gate is None else y * gate.sigmoid()).flatten(2))


def _check_rotary(headdim: int, rope_theta: float | None, rotary_dim: int | None) -> None:
    if rope_theta is None:
        expect(
            rotary_dim is None,
            f"Attention: rotary_dim must be None without rope_theta; got {rotary_dim}. Give rope_theta to rotate.",
        )
        return
    expect(
        isinstance(rope_theta, int | float) and not isinstance(rope_theta, bool) and rope_theta > 0,
        f"Attention: rope_theta must be a positive number; got {rope_theta!r}. Use None for no positions.",
    )
    if rotary_dim is not None:
        expect_positive("Attention", rotary_dim=rotary_dim)
    dim = headdim if rotary_dim is None else rotary_dim
    expect(
        dim % 2 == 0 and dim <= headdim,
        f"Attention: headdim={headdim} and rotary_dim must be such that an even number of a head's channels is "
        f"rotated; got {dim}. Rotations act on pairs of channels.",
    )
