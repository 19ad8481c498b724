"""A new layer in one file: what it takes to give another recurrence a replay cache."""

import torch
from torch import Tensor, nn

from replayssm import Records, Recurrence, ReplayLayer


class ReplayRetention(ReplayLayer):
    """Retention (arXiv 2307.08621): a fixed decay per head, no gate, no convolution."""

    recurrence = Recurrence(decay="head", delta=False)

    def __init__(
        self,
        d_model: int,
        nheads: int,
        headdim: int,
        d_state: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(nheads=nheads, headdim=headdim, d_state=d_state, ngroups=nheads, d_model=d_model)
        self.qkv_proj = nn.Linear(d_model, nheads * (2 * d_state + headdim), bias=False, device=device, dtype=dtype)
        self.out_proj = nn.Linear(nheads * headdim, d_model, bias=False, device=device, dtype=dtype)
        wide = torch.promote_types(self.out_proj.weight.dtype, torch.float32)  # log decays are never rounded to bf16
        heads = torch.arange(nheads, device=device, dtype=wide)
        self.register_buffer("log_decay", torch.log1p(-(2.0 ** (-5 - heads))))

    def project(self, x: Tensor, conv_state: None, mask: Tensor | None) -> tuple[Tensor, Records, None]:
        sizes = [self.d_state, self.d_state, self.headdim]
        q, k, v = self.qkv_proj(x).unflatten(-1, (self.nheads, -1)).split(sizes, dim=-1)
        g = self.log_decay.unsqueeze(-1).expand(*v.shape[:-1], 1)
        return q * self.d_state**-0.5, Records(k, v, g, beta=g.new_ones(v.shape[:-1])), None

    def emit(self, y: Tensor, extra: None) -> Tensor:
        return self.out_proj(y.flatten(-2).to(self.out_proj.weight.dtype))
