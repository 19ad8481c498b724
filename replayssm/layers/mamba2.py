"""Mamba-2 (arXiv 2405.21060): a decay per head, no correction, and a gated norm."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replayssm.cache.layer_state import LayerState
from replayssm.checks import expect, expect_choice, expect_positive
from replayssm.layers.base import Placement, ReplayLayer
from replayssm.layers.conv import ShortConv, with_history
from replayssm.layers.gates import no_weight_decay, reset_decay
from replayssm.layers.norm import GatedRMSNorm, widened
from replayssm.ops.records import Records, Recurrence
from replayssm.ops.scan import Backend


class ReplayMamba2(ReplayLayer):
    """The Mamba-2 mixer of Nemotron-H, Mamba-2, Bamba, Granite-4, Falcon-H1 and Zamba2.

    With x, B, C after the convolution: S <- e^(dt A) S + dt x B^T, y = S C + D x. Parameter names are those of the
    Hugging Face checkpoints: in_proj (rows z, x, B, C, dt), conv1d, dt_bias, A_log, D, norm, out_proj.

    Args:
        d_model: input and output features.
        nheads, headdim, d_state, ngroups: see ``ReplayLayer``; B and C are shared by the heads of a group.
        d_conv: width of the convolution, tokens.
        bias, out_bias: biases of in_proj and out_proj; ``out_bias=None`` follows ``bias``.
        conv_bias: bias of the convolution.
        norm: "gate_first" (gate, then norm), "norm_first" (norm, then gate), or None (the gate alone).
        norm_groups: the RMS is taken over each of so many parts; None is ngroups.
        norm_eps: of the norm.
        dt_limits: (low, high) of dt in a scan; a step does not clamp, so that T tokens at once equal T single steps.
        in_multiplier: scales the input (Falcon-H1's ssm_in_multiplier).
        segment_multipliers: scales of in_proj's segments z, x, B, C, dt (Falcon-H1's ssm_multipliers); None is ones.
    """

    recurrence = Recurrence(decay="head", delta=False)

    def __init__(
        self,
        d_model: int,
        nheads: int,
        headdim: int,
        d_state: int,
        *,
        ngroups: int = 1,
        d_conv: int = 4,
        bias: bool = False,
        out_bias: bool | None = None,
        conv_bias: bool = True,
        norm: Literal["gate_first", "norm_first"] | None = "gate_first",
        norm_groups: int | None = None,
        norm_eps: float = 1e-5,
        dt_limits: tuple[float, float] = (0.0, math.inf),
        in_multiplier: float = 1.0,
        segment_multipliers: Sequence[float] | None = None,
        scan_backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        expect_positive("ReplayMamba2", d_model=d_model)
        expect_choice("ReplayMamba2", "norm", norm, ("gate_first", "norm_first", None))
        expect(
            len(dt_limits) == 2 and 0 <= dt_limits[0] <= dt_limits[1],
            f"ReplayMamba2: dt_limits must be (low, high) with 0 <= low <= high; got {dt_limits}. (0, inf) is none.",
        )
        expect(
            segment_multipliers is None or len(segment_multipliers) == 5,
            f"ReplayMamba2: segment_multipliers must be 5 numbers, for z, x, B, C, dt; got {segment_multipliers}. "
            "Use None for ones.",
        )
        super().__init__(
            nheads=nheads,
            headdim=headdim,
            d_state=d_state,
            ngroups=ngroups,
            d_model=d_model,
            conv_channels=nheads * headdim + 2 * ngroups * d_state,
            d_conv=d_conv,
            scan_backend=scan_backend,
        )
        self.d_inner = nheads * headdim
        self.dt_limits, self.in_multiplier = tuple(dt_limits), in_multiplier
        self.segment_multipliers = None if segment_multipliers is None else tuple(segment_multipliers)
        place: Placement = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(d_model, self.d_inner + self.conv_channels + nheads, bias=bias, **place)
        self.conv1d = ShortConv(self.conv_channels, d_conv, bias=conv_bias, **place)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.empty(nheads, **place)) for _ in range(3))
        self.norm = None
        if norm is not None:
            self.norm = GatedRMSNorm(
                self.d_inner,
                groups=ngroups if norm_groups is None else norm_groups,
                gate_first=norm == "gate_first",
                activation="silu",
                eps=norm_eps,
                **place,
            )
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias if out_bias is None else out_bias, **place)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters afresh, as the reference code of the paper does."""
        super().reset_parameters()
        reset_decay(self.A_log, self.dt_bias)
        nn.init.ones_(self.D)
        no_weight_decay(self.D)

    def project(
        self, x: Tensor, conv_state: LayerState | None, mask: Tensor | None
    ) -> tuple[Tensor, Records, tuple[Tensor, Tensor]]:
        keys = self.ngroups * self.d_state
        z, values, B, C, dt = self.in_proj(x * self.in_multiplier if self.in_multiplier != 1 else x).split(
            [self.d_inner, self.d_inner, keys, keys, self.nheads], dim=-1
        )
        if self.segment_multipliers is not None:
            z, values, B, C, dt = (
                part * scale for part, scale in zip((z, values, B, C, dt), self.segment_multipliers, strict=True)
            )
        window = with_history(torch.cat([values, B, C], dim=-1), conv_state, self.d_conv)
        values, B, C = self.conv1d(window).split([self.d_inner, keys, keys], dim=-1)
        v = values.unflatten(-1, (self.nheads, self.headdim))
        k, q = (part.unflatten(-1, (self.ngroups, self.d_state)) for part in (B, C))
        dt = F.softplus(widened(dt) + widened(self.dt_bias))
        return q, Records(k, v, self._log_decay(dt), dt), (z, v)

    def limit(self, records: Records) -> Records:
        """Clamp dt to its limits."""
        if self.dt_limits == (0.0, math.inf):
            return records
        dt = records.beta.clamp(*self.dt_limits)
        return records._replace(g=self._log_decay(dt), beta=dt)

    def emit(self, y: Tensor, extra: tuple[Tensor, Tensor]) -> Tensor:
        z, v = extra
        y = (y + widened(self.D).unsqueeze(-1) * v).flatten(-2)
        y = y * F.silu(widened(z)) if self.norm is None else self.norm(y, z)
        return self.out_proj(y.to(z.dtype))

    def _log_decay(self, dt: Tensor) -> Tensor:
        return (dt * -widened(self.A_log).exp()).unsqueeze(-1)
