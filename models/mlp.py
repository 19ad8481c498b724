"""The feed-forward part of a hybrid model: a function of one token at a time, so it keeps nothing in a cache."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replayssm.checks import expect_choice, expect_positive

ACTIVATIONS = ("swiglu", "relu2")


class MLP(nn.Module):
    """Widen, bend, narrow.

    Args:
        d_model: size of the residual stream.
        hidden: size between the two projections.
        activation: "swiglu" multiplies by a SiLU gate (arXiv 2002.05202); "relu2" squares a ReLU and has no gate.
        bias: biases in the projections.
    """

    def __init__(
        self,
        d_model: int,
        hidden: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        expect_positive("MLP", d_model=d_model, hidden=hidden)
        expect_choice("MLP", "activation", activation, ACTIVATIONS)
        expect_choice("MLP", "bias", bias, (False, True))
        self.activation = activation
        if activation == "swiglu":
            self.gate_proj = nn.Linear(d_model, hidden, bias, device, dtype)
        self.up_proj = nn.Linear(d_model, hidden, bias, device, dtype)
        self.down_proj = nn.Linear(hidden, d_model, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Draw every parameter anew, in place."""
        if self.activation == "swiglu":
            self.gate_proj.reset_parameters()
        self.up_proj.reset_parameters()
        self.down_proj.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, t, d_model) -> same."""
        if self.activation == "swiglu":
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(F.relu(self.up_proj(x)).square())
