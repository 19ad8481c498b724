"""Multi-head latent attention: the keys and values of all heads come out of one small vector, which is what is kept."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replayssm.cache.step import Step
from replayssm.checks import expect_choice, expect_positive
from replayssm.layers.norm import RMSNorm
from replayssm.models.attend import attend_cached, attend_whole
from replayssm.models.attention import CausalAttention, KVState


class HeadMaps(nn.Module):
    """W_k and W_v of every head in one matrix, which acts from either side.

    No ``nn.Linear``, so that nobody wraps it as one: an adapter for y = W x would be wrong for W^T q.

    Attributes:
        weight: (nheads * (d_key + headdim), kv_rank); a head's rows of W_k stand over those of its W_v.
    """

    def __init__(
        self,
        nheads: int,
        d_key: int,
        headdim: int,
        kv_rank: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.nheads, self.sizes = nheads, [d_key, headdim]
        self.weight = nn.Parameter(torch.empty(nheads * (d_key + headdim), kv_rank, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew, in place, as ``nn.Linear`` does."""
        if not self.weight.is_meta:
            nn.init.uniform_(self.weight, -(self.weight.shape[1] ** -0.5), self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor, use: Literal["expand", "queries", "values"] = "expand") -> Tensor:
        """Apply the maps.

        Args:
            x: for "expand" latent vectors (batch, t, kv_rank), which become each head's own key with its value behind
                it, (batch, t, nheads, d_key + headdim); for "queries" (batch, t, nheads, d_key), which become
                W_k^T q; for "values" sums of latent vectors (batch, t, nheads, kv_rank), which become W_v of them.
        """
        if use == "expand":
            return F.linear(x, self.weight).unflatten(-1, (self.nheads, -1))
        of_keys, of_values = self.weight.unflatten(0, (self.nheads, -1)).split(self.sizes, 1)
        if use == "queries":
            return torch.einsum("bthk,hkr->bthr", x, of_keys)
        return torch.einsum("bthr,hpr->bthp", x, of_values)


class LatentAttention(CausalAttention):
    """Multi-head latent attention without positions (MLA, arXiv 2405.04434, section 2.1; as in Kimi-Linear).

    A token leaves a latent vector c, out of which a head makes its own part of the key W_k c and its value W_v c, and
    the part of the key that all heads share. Whole sequences are computed so. Over a cache, (W_k c) q is taken as
    c (W_k^T q) and the sum of values as W_v of the sum of latents, so that no head's keys or values are ever made of
    what is cached: it is attention with one key head for all queries, whose values are its keys.

    Args:
        d_model: size of the residual stream.
        nheads: heads.
        headdim: size of a head's values.
        d_key, d_shared: sizes of a head's own part of the key and of the shared part.
        kv_rank: size of the latent vector.
        norm_eps: of the norm over the latent vector.
        bias: biases in the projections from and to the residual stream, but for those of the queries.
    """

    def __init__(
        self,
        d_model: int,
        nheads: int,
        headdim: int,
        *,
        d_key: int,
        d_shared: int,
        kv_rank: int,
        norm_eps: float = 1e-6,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(d_model)
        expect_positive("LatentAttention", d_model=d_model, nheads=nheads, headdim=headdim)
        expect_positive("LatentAttention", d_key=d_key, d_shared=d_shared, kv_rank=kv_rank)
        expect_choice("LatentAttention", "bias", bias, (False, True))
        self.nheads, self.headdim, self.d_key, self.d_shared = nheads, headdim, d_key, d_shared
        self.kv_rank = kv_rank
        self.q_proj = nn.Linear(d_model, nheads * (d_key + d_shared), False, device, dtype)
        self.kv_a_proj_with_mqa = nn.Linear(d_model, kv_rank + d_shared, bias, device, dtype)
        self.kv_a_layernorm = RMSNorm(kv_rank, eps=norm_eps, device=device, dtype=dtype)
        self.kv_b_proj = HeadMaps(nheads, d_key, headdim, kv_rank, device=device, dtype=dtype)
        self.o_proj = nn.Linear(nheads * headdim, d_model, bias, device, dtype)

    def kept(self) -> dict[str, tuple[int, int]]:
        return {"latent": (1, self.kv_rank + self.d_shared)}

    def attend(self, x: Tensor, state: KVState | None, step: Step | None) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.nheads, -1))
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.kv_rank, self.d_shared], -1)
        latent = self.kv_a_layernorm(latent)
        scale = (self.d_key + self.d_shared) ** -0.5
        if state is None or step is None:
            own, v = self.kv_b_proj(latent).split([self.d_key, self.headdim], -1)
            k = torch.cat([own, shared.unsqueeze(2).expand(-1, -1, self.nheads, -1)], -1)
            return self.o_proj(attend_whole(q, k, v, None, scale).flatten(2))
        own, rest = q.split([self.d_key, self.d_shared], -1)
        q = torch.cat([self.kv_b_proj(own, "queries"), rest], -1)
        new = torch.cat([latent, shared], -1).unsqueeze(2)
        y = attend_cached(q, [new], [state.kv["latent"]], step, None, scale)[..., : self.kv_rank]
        return self.o_proj(self.kv_b_proj(y, "values").flatten(2))
