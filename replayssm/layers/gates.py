"""Decay gates and their initial values, shared by the layers."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replayssm.layers.norm import widened

A_RANGE = (1.0, 16.0)  # decay rates and, below, step sizes at initialisation: the Mamba-2 reference code's
DT_RANGE = (1e-3, 1e-1)


def softplus_gate(x: Tensor, A_log: Tensor) -> Tensor:
    """-exp(A_log) softplus(x), in nats, <= 0."""
    return -widened(A_log).exp() * F.softplus(x)


def bounded_gate(x: Tensor, A_log: Tensor, lower_bound: float) -> Tensor:
    """lower_bound * sigmoid(exp(A_log) x), in nats: between ``lower_bound`` and 0, a multiplier and not a clamp."""
    return lower_bound * (widened(A_log).exp() * x).sigmoid()


@torch.no_grad()
def reset_decay(A_log: nn.Parameter, dt_bias: nn.Parameter) -> None:
    """Draw A uniformly from A_RANGE and dt log-uniformly from DT_RANGE; dt_bias is the inverse softplus of dt.

    Marks both as not to be decayed by an optimiser.
    """
    no_weight_decay(A_log, dt_bias)
    if A_log.is_meta:
        return  # nothing to draw; torch would import its compiler, and with it triton, to work out the shapes
    A_log.copy_(torch.empty_like(A_log, dtype=torch.float32).uniform_(*A_RANGE).log_())
    low, high = (math.log(dt) for dt in DT_RANGE)
    dt = torch.empty_like(dt_bias, dtype=torch.float32).uniform_(low, high).exp_()
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))


def no_weight_decay(*parameters: nn.Parameter) -> None:
    """Mark parameters with ``_no_weight_decay``, as the Mamba-2 reference code does; optimisers group by it."""
    for parameter in parameters:
        parameter._no_weight_decay = True  # type: ignore[attr-defined]
