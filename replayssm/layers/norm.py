"""RMS norms, plain and gated, in fp32 inside (fp64 for fp64 inputs)."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replayssm.checks import expect, expect_choice, expect_positive
from replayssm.ops.chunked import compute_dtype


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis (arXiv 1910.07467).

    Args:
        plus_one: multiply by 1 + weight instead (Qwen, Gemma), which in 16 bits is no plain weight.
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-5,
        plus_one: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.eps, self.plus_one = eps, plus_one
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as a factor of one."""
        nn.init.constant_(self.weight, 0.0 if self.plus_one else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> the same shape and dtype."""
        weight = widened(self.weight)
        return (normalized(widened(x), self.eps) * (1 + weight if self.plus_one else weight)).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """An RMS norm and a gate, in either order.

    Args:
        dim: size of the last axis.
        groups: the RMS is taken over each of ``groups`` equal parts of the last axis.
        gate_first: multiply by the gate before the norm (Mamba-2) or after its weight (GDN, KDA).
        activation: of the gate, "silu" (Mamba-2, GDN) or "sigmoid" (KDA).
    """

    def __init__(
        self,
        dim: int,
        *,
        groups: int = 1,
        gate_first: bool,
        activation: Literal["silu", "sigmoid"],
        eps: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        expect_choice("GatedRMSNorm", "activation", activation, ("silu", "sigmoid"))
        expect_positive("GatedRMSNorm", dim=dim, groups=groups)
        expect(
            dim % groups == 0,
            f"GatedRMSNorm: dim must be a multiple of groups={groups}; got {dim}. Choose a number of groups that fits.",
        )
        super().__init__()
        self.groups, self.gate_first, self.activation, self.eps = groups, gate_first, activation, eps
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at ones."""
        nn.init.ones_(self.weight)

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """(..., dim) and a gate of the same shape -> the same shape, in the wider of fp32 and the inputs' dtype."""
        y, gate = widened(y), widened(gate)
        gate = F.silu(gate) if self.activation == "silu" else gate.sigmoid()
        if self.gate_first:
            y = y * gate
        y = normalized(y.unflatten(-1, (self.groups, -1)), self.eps).flatten(-2) * widened(self.weight)
        return y if self.gate_first else y * gate


def normalized(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def l2_normalized(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis, in fp32 inside, in the dtype of ``x`` outside."""
    wide = widened(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def widened(x: Tensor) -> Tensor:
    """fp64 stays, everything else becomes fp32."""
    return x.to(compute_dtype(x))
