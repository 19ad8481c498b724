"""Kimi Delta Attention (arXiv 2510.26692): a decay per key channel and the delta rule."""

import torch
from torch import Tensor, nn

from replayssm.cache.layer_state import LayerState
from replayssm.checks import expect, expect_positive
from replayssm.layers.base import Placement, ReplayLayer
from replayssm.layers.conv import ShortConv, with_history
from replayssm.layers.gates import bounded_gate, reset_decay, softplus_gate
from replayssm.layers.norm import GatedRMSNorm, l2_normalized, widened
from replayssm.ops.records import Records, Recurrence
from replayssm.ops.scan import Backend


class ReplayKDA(ReplayLayer):
    """The KDA mixer of Kimi-Linear, Kimi-K3, GLM-5.3-Flash and Ling-3.0.

    As Gated DeltaNet, with g of shape (nheads, d_state): S <- S diag(e^g). Parameter names are those of the Kimi-Linear
    checkpoints: q_proj, k_proj, v_proj, q_conv1d, k_conv1d, v_conv1d, A_log, dt_bias, b_proj, o_norm, o_proj, and for
    either gate a low-rank pair (f_a_proj, f_b_proj; g_a_proj, g_b_proj) or one full-rank projection (f_proj; g_proj).

    Args:
        d_model: input and output features.
        nheads, headdim: heads, value features of a head.
        d_state: key features of a head; None is headdim.
        d_conv: width of the convolutions, tokens.
        conv_bias: bias of the convolutions.
        lower_bound: None takes g = -exp(A_log) softplus(x); a number < 0 takes g = lower_bound sigmoid(exp(A_log) x).
        neg_eigval: beta in (0, 2) instead of (0, 1).
        gate_rank: rank of the decay gate's projection; None is full rank (Kimi-Linear and GLM: headdim; Ling: None).
        output_gate_rank: the same of the output gate (Kimi-Linear and GLM: headdim; Kimi-K3 and Ling: None).
        output_gate_bias: bias of the output gate's last projection.
        norm_eps: of the norm, which is taken per head.
    """

    recurrence = Recurrence(decay="channel", delta=True)

    def __init__(
        self,
        d_model: int,
        nheads: int,
        headdim: int,
        *,
        d_state: int | None = None,
        d_conv: int = 4,
        conv_bias: bool = False,
        lower_bound: float | None = None,
        neg_eigval: bool = False,
        gate_rank: int | None = None,
        output_gate_rank: int | None = None,
        output_gate_bias: bool = False,
        norm_eps: float = 1e-5,
        scan_backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        expect_positive("ReplayKDA", d_model=d_model)
        for name, rank in (("gate_rank", gate_rank), ("output_gate_rank", output_gate_rank)):
            if rank is not None:
                expect_positive("ReplayKDA", **{name: rank})
        expect(
            lower_bound is None or lower_bound < 0,
            f"ReplayKDA: lower_bound must be None or below 0 nats; got {lower_bound}. Published models use -5.",
        )
        d_state = headdim if d_state is None else d_state
        super().__init__(
            nheads=nheads,
            headdim=headdim,
            d_state=d_state,
            ngroups=nheads,
            d_model=d_model,
            conv_channels=nheads * (2 * d_state + headdim),
            d_conv=d_conv,
            scan_backend=scan_backend,
        )
        self.lower_bound, self.neg_eigval = lower_bound, neg_eigval
        self.gate_rank, self.output_gate_rank = gate_rank, output_gate_rank
        place: Placement = {"device": device, "dtype": dtype}
        keys, values = nheads * d_state, nheads * headdim
        self.q_proj = nn.Linear(d_model, keys, bias=False, **place)
        self.k_proj = nn.Linear(d_model, keys, bias=False, **place)
        self.v_proj = nn.Linear(d_model, values, bias=False, **place)
        self.q_conv1d = ShortConv(keys, d_conv, bias=conv_bias, **place)
        self.k_conv1d = ShortConv(keys, d_conv, bias=conv_bias, **place)
        self.v_conv1d = ShortConv(values, d_conv, bias=conv_bias, **place)
        if gate_rank is None:
            self.f_proj = nn.Linear(d_model, keys, bias=False, **place)
        else:
            self.f_a_proj = nn.Linear(d_model, gate_rank, bias=False, **place)
            self.f_b_proj = nn.Linear(gate_rank, keys, bias=False, **place)
        self.A_log = nn.Parameter(torch.empty(nheads, **place))
        self.dt_bias = nn.Parameter(torch.empty(keys, **place))
        self.b_proj = nn.Linear(d_model, nheads, bias=False, **place)
        if output_gate_rank is None:
            self.g_proj = nn.Linear(d_model, values, bias=output_gate_bias, **place)
        else:
            self.g_a_proj = nn.Linear(d_model, output_gate_rank, bias=False, **place)
            self.g_b_proj = nn.Linear(output_gate_rank, values, bias=output_gate_bias, **place)
        self.o_norm = GatedRMSNorm(headdim, gate_first=False, activation="sigmoid", eps=norm_eps, **place)
        self.o_proj = nn.Linear(values, d_model, bias=False, **place)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters afresh, as the reference code of the paper does."""
        super().reset_parameters()
        reset_decay(self.A_log, self.dt_bias)

    def project(self, x: Tensor, conv_state: LayerState | None, mask: Tensor | None) -> tuple[Tensor, Records, Tensor]:
        sizes = [projection.out_features for projection in (self.q_proj, self.k_proj, self.v_proj)]
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        windows = with_history(qkv, conv_state, self.d_conv).split(sizes, dim=-1)
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        q, k, v = (
            conv(window).unflatten(-1, (self.nheads, -1)) for conv, window in zip(convolutions, windows, strict=True)
        )
        beta = widened(self.b_proj(x)).sigmoid()
        records = Records(k=l2_normalized(k), v=v, g=self._log_decay(x), beta=2 * beta if self.neg_eigval else beta)
        gate = self.g_proj(x) if self.output_gate_rank is None else self.g_b_proj(self.g_a_proj(x))
        return l2_normalized(q) * self.d_state**-0.5, records, gate.unflatten(-1, (self.nheads, self.headdim))

    def emit(self, y: Tensor, extra: Tensor) -> Tensor:
        return self.o_proj(self.o_norm(y, extra).flatten(-2).to(extra.dtype))

    def _log_decay(self, x: Tensor) -> Tensor:
        """(batch, t, nheads, d_state), nats."""
        raw = self.f_proj(x) if self.gate_rank is None else self.f_b_proj(self.f_a_proj(x))
        raw = (widened(raw) + widened(self.dt_bias)).unflatten(-1, (self.nheads, self.d_state))
        A_log = self.A_log.unsqueeze(-1)
        return softplus_gate(raw, A_log) if self.lower_bound is None else bounded_gate(raw, A_log, self.lower_bound)
