"""Many small MLPs of one size, of which each token uses a few: the arithmetic of a mixture of experts.

Four ways to the same sums. Which one runs follows from where the tensors are, never from their values on a device, so a
decode step can be recorded as a CUDA graph:

* by groups, on GPUs whose matrix library multiplies groups of rows by different matrices (bf16, sm_90 and sm_100);
* expert by expert, those that were hit, where their number can be looked at for free: on the CPU;
* a copy of the experts' weights for every token, elsewhere, while there are no more of these than experts;
* all tokens through all experts, elsewhere: many more products, but a fixed number, and no weight is read twice.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replayssm.checks import expect_choice, expect_positive, readable
from replayssm.layers.norm import widened
from replayssm.models.mlp import ACTIVATIONS

GATHERED = 2**25  # numbers of the weights that are copied at once: 128 MiB in fp32


class Experts(nn.Module):
    """``num_experts`` MLPs without biases, stored as one.

    Args:
        width: features that go in and come out.
        hidden: size inside an expert.
        activation: as in ``MLP``.

    Attributes:
        gate_up_proj: (num_experts, 2 * hidden, width), rows of the gate first; with "relu2" it is
        up_proj: (num_experts, hidden, width).
        down_proj: (num_experts, width, hidden).
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        num_experts: int,
        *,
        activation: str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        expect_positive("Experts", width=width, hidden=hidden, num_experts=num_experts)
        expect_choice("Experts", "activation", activation, ACTIVATIONS)
        self.activation, self.num_experts = activation, num_experts
        if activation == "swiglu":
            self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * hidden, width, device=device, dtype=dtype))
        else:
            self.up_proj = nn.Parameter(torch.empty(num_experts, hidden, width, device=device, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(num_experts, width, hidden, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every parameter anew, in place, as ``nn.Linear`` does for each expert."""
        for weight in self.parameters():
            if not weight.is_meta:
                nn.init.uniform_(weight, -(weight.shape[2] ** -0.5), weight.shape[2] ** -0.5)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of what a token's experts make of it.

        Args:
            x: (tokens, width).
            experts: (tokens, top_k) int64, distinct in a row.
            weights: (tokens, top_k), fp32 or fp64.

        Returns:
            (tokens, width), the dtype of x.
        """
        if readable(experts):
            y = self._sorted(x, experts, grouped=False)
        elif self._groups(x):
            y = self._sorted(x, experts, grouped=True)
        elif experts.numel() <= self.num_experts:
            y = self._gathered(x, experts)
        else:
            return self._through_all(x, experts, weights)
        return torch.einsum("nkd,nk->nd", widened(y), weights).to(x.dtype)

    def _groups(self, x: Tensor) -> bool:
        """Whether the device has grouped products that take these tensors, without waiting for the host."""
        if x.device.type != "cuda" or x.dtype != torch.bfloat16 or self._up.dtype != torch.bfloat16:
            return False
        aligned = all(size % 8 == 0 for size in self.down_proj.shape[1:])  # rows of 16 bytes
        return aligned and torch.cuda.get_device_capability(x.device)[0] in (9, 10)

    def _sorted(self, x: Tensor, experts: Tensor, *, grouped: bool) -> Tensor:
        """(tokens, top_k, width): tokens in the order of their experts, so that each expert is multiplied once."""
        tokens, top_k = experts.shape
        sorted_experts, order = experts.flatten().sort(stable=True)
        rows = x.index_select(0, order // top_k)
        ends = torch.searchsorted(sorted_experts, torch.arange(self.num_experts, device=x.device), right=True)
        if grouped:
            ends = ends.to(torch.int32)
            inner = self._bend(torch._grouped_mm(rows, self._up.transpose(1, 2), offs=ends))
            y = torch._grouped_mm(inner, self.down_proj.transpose(1, 2), offs=ends)
        else:
            parts, first = [], 0
            for expert, end in enumerate(ends.tolist()):
                if end > first:
                    inner = self._bend(F.linear(rows[first:end], self._up[expert]))
                    parts.append(F.linear(inner, self.down_proj[expert]))
                first = end
            y = torch.cat(parts)
        place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        return y.index_select(0, place).unflatten(0, (tokens, top_k))

    def _gathered(self, x: Tensor, experts: Tensor) -> Tensor:
        """(tokens, top_k, width), in pieces of tokens whose weights fit into GATHERED."""
        piece = max(1, GATHERED // (experts.shape[1] * self._up[0].numel()))
        outputs = []
        for rows, chosen in zip(x.split(piece), experts.split(piece), strict=True):
            inner = self._bend(torch.einsum("nd,nkhd->nkh", rows, self._up[chosen]))
            outputs.append(torch.einsum("nkh,nkdh->nkd", inner, self.down_proj[chosen]))
        return torch.cat(outputs)

    def _through_all(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """(tokens, width), weighted and summed."""
        total = torch.zeros_like(x, dtype=weights.dtype)
        for expert in range(self.num_experts):
            y = F.linear(self._bend(F.linear(x, self._up[expert])), self.down_proj[expert])
            chosen = experts == expert
            share = torch.where(chosen, weights, 0).sum(1, keepdim=True)
            # an expert that a token did not choose may overflow on it
            total = total + torch.where(chosen.any(1, keepdim=True), widened(y) * share, 0)
        return total.to(x.dtype)

    @property
    def _up(self) -> Tensor:
        return self.gate_up_proj if self.activation == "swiglu" else self.up_proj

    def _bend(self, x: Tensor) -> Tensor:
        if self.activation == "swiglu":
            gate, up = x.chunk(2, -1)
            return F.silu(gate) * up
        return F.relu(x).square()
