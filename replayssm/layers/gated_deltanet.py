"""Gated DeltaNet (arXiv 2412.06464): a decay per head and the delta rule."""

from typing import Literal

import torch
from torch import Tensor, nn

from replayssm.cache.layer_state import LayerState
from replayssm.checks import expect_choice, expect_positive
from replayssm.layers.base import Placement, ReplayLayer
from replayssm.layers.conv import ShortConv, with_history
from replayssm.layers.gates import reset_decay, softplus_gate
from replayssm.layers.norm import GatedRMSNorm, l2_normalized, widened
from replayssm.ops.records import Records, Recurrence
from replayssm.ops.scan import Backend


class ReplayGatedDeltaNet(ReplayLayer):
    """The Gated DeltaNet mixer of Qwen3-Next, Qwen3.5 and OLMo-Hybrid.

    With q, k l2-normalised after the convolution: S <- e^g S, u = beta (v - S k), S <- S + u k^T, y = S q. Parameter
    names are those of the Qwen3.5 checkpoints: in_proj_qkv (rows q, k, v), in_proj_z, in_proj_b, in_proj_a, conv1d,
    dt_bias, A_log, norm, out_proj.

    Args:
        d_model: input and output features.
        nheads, headdim, d_state: value heads, value and key features of a head.
        ngroups: key heads; None is nheads.
        d_conv: width of the convolution, tokens.
        conv_bias: bias of the convolution.
        neg_eigval: beta in (0, 2) instead of (0, 1), so that a write may reflect the state along k.
        gate_activation: of the output gate, "silu" or "sigmoid".
        norm_eps: of the norm, which is taken per head.
    """

    recurrence = Recurrence(decay="head", delta=True)

    def __init__(
        self,
        d_model: int,
        nheads: int,
        headdim: int,
        d_state: int,
        *,
        ngroups: int | None = None,
        d_conv: int = 4,
        conv_bias: bool = False,
        neg_eigval: bool = False,
        gate_activation: Literal["silu", "sigmoid"] = "silu",
        norm_eps: float = 1e-6,
        scan_backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        expect_positive("ReplayGatedDeltaNet", d_model=d_model)
        expect_choice("ReplayGatedDeltaNet", "gate_activation", gate_activation, ("silu", "sigmoid"))
        ngroups = nheads if ngroups is None else ngroups
        super().__init__(
            nheads=nheads,
            headdim=headdim,
            d_state=d_state,
            ngroups=ngroups,
            d_model=d_model,
            conv_channels=2 * ngroups * d_state + nheads * headdim,
            d_conv=d_conv,
            scan_backend=scan_backend,
        )
        self.neg_eigval = neg_eigval
        place: Placement = {"device": device, "dtype": dtype}
        values = nheads * headdim
        self.in_proj_qkv = nn.Linear(d_model, self.conv_channels, bias=False, **place)
        self.in_proj_z = nn.Linear(d_model, values, bias=False, **place)
        self.in_proj_b = nn.Linear(d_model, nheads, bias=False, **place)
        self.in_proj_a = nn.Linear(d_model, nheads, bias=False, **place)
        self.conv1d = ShortConv(self.conv_channels, d_conv, bias=conv_bias, **place)
        self.dt_bias, self.A_log = (nn.Parameter(torch.empty(nheads, **place)) for _ in range(2))
        self.norm = GatedRMSNorm(headdim, gate_first=False, activation=gate_activation, eps=norm_eps, **place)
        self.out_proj = nn.Linear(values, d_model, bias=False, **place)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters afresh, as the reference code of the paper does."""
        super().reset_parameters()
        reset_decay(self.A_log, self.dt_bias)

    def project(self, x: Tensor, conv_state: LayerState | None, mask: Tensor | None) -> tuple[Tensor, Records, Tensor]:
        keys = self.ngroups * self.d_state
        window = with_history(self.in_proj_qkv(x), conv_state, self.d_conv)
        q, k, v = self.conv1d(window).split([keys, keys, self.nheads * self.headdim], dim=-1)
        q, k = (l2_normalized(part.unflatten(-1, (self.ngroups, self.d_state))) for part in (q, k))
        beta = widened(self.in_proj_b(x)).sigmoid()
        g = softplus_gate(widened(self.in_proj_a(x)) + widened(self.dt_bias), self.A_log)
        records = Records(
            k=k,
            v=v.unflatten(-1, (self.nheads, self.headdim)),
            g=g.unsqueeze(-1),
            beta=2 * beta if self.neg_eigval else beta,
        )
        return q * self.d_state**-0.5, records, self.in_proj_z(x).unflatten(-1, (self.nheads, self.headdim))

    def emit(self, y: Tensor, extra: Tensor) -> Tensor:
        return self.out_proj(self.norm(y, extra).flatten(-2).to(extra.dtype))
