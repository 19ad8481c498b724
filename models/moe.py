"""Mixture of experts: a feed-forward part of which every token uses a few pieces. It keeps nothing in a cache."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replayssm.checks import expect, expect_choice, expect_positive
from replayssm.layers.norm import widened
from replayssm.models.experts import Experts
from replayssm.models.mlp import MLP


class Router(nn.Module):
    """Which experts a token goes to, and how much each counts. In fp32 at least: a choice is not rounded.

    "softmax" scores are probabilities over all experts. "sigmoid" scores are each expert's own; to choose, and for
    nothing else, ``e_score_correction_bias`` is added, which balances the load (arXiv 2412.19437, section 2.1.2). With
    ``expert_groups`` > 1 the experts come from the ``top_groups`` groups whose two best scores have the largest sum.

    Args:
        d_model, num_experts, top_k: features of a token, experts to choose from, experts chosen.
        scores: "softmax" (Qwen) or "sigmoid" (DeepSeek-V3, Kimi, Nemotron).
        normalize: the weights of a token's experts sum to ``scale``.
        scale: of the weights.
        expert_groups, top_groups: equal groups of neighbouring experts, and how many of them a token may use.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int,
        *,
        scores: Literal["softmax", "sigmoid"],
        normalize: bool,
        scale: float,
        expert_groups: int,
        top_groups: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.top_k, self.scores, self.normalize, self.scale = top_k, scores, normalize, scale
        self.expert_groups, self.top_groups = expert_groups, top_groups
        self.weight = nn.Parameter(torch.empty(num_experts, d_model, device=device, dtype=dtype))
        if scores == "sigmoid":  # no gradient reaches it: trainers move it by the load of each expert
            self.register_buffer("e_score_correction_bias", torch.zeros(num_experts, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew, in place; no correction."""
        if not self.weight.is_meta:
            nn.init.uniform_(self.weight, -(self.weight.shape[1] ** -0.5), self.weight.shape[1] ** -0.5)
        if self.scores == "sigmoid":
            self.get_buffer("e_score_correction_bias").zero_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, d_model) -> experts (tokens, top_k) int64 and weights (tokens, top_k), fp32 or fp64."""
        logits = F.linear(widened(x), widened(self.weight))
        if self.scores == "softmax":
            scores = choice = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            choice = scores + widened(self.get_buffer("e_score_correction_bias"))
        if self.expert_groups > 1:
            grouped = choice.unflatten(-1, (self.expert_groups, -1))
            best = grouped.topk(2, -1).values.sum(-1).topk(self.top_groups, -1).indices
            barred = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
            choice = grouped.masked_fill(barred.unsqueeze(-1), -math.inf).flatten(-2)
        experts = choice.topk(self.top_k, -1).indices
        weights = scores.gather(-1, experts)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all underflow
        return experts, weights * self.scale


class MoE(nn.Module):
    """Mixture of experts with a router, and where asked for a shared expert and a latent space.

    Parameter names are those of the published checkpoints where they agree: gate (the router), experts, shared_expert,
    shared_expert_gate, fc1_latent_proj, fc2_latent_proj.

    Args:
        d_model: size of the residual stream.
        hidden: size inside an expert.
        num_experts: experts to choose from.
        top_k: experts that a token uses.
        activation: of all experts, as in ``MLP``.
        scores, normalize, scale, expert_groups, top_groups: of the router; see ``Router``.
        shared_hidden: size inside an expert that every token uses; None is no such expert.
        shared_gate: the shared expert counts sigmoid(shared_expert_gate(x)) instead of 1.
        latent: the chosen experts work in a projection of the stream to this size; None is in the stream itself.
        bias: biases in the shared expert and in the projections to the latent space and back.

    Raises:
        ValueError: top_k experts cannot be chosen, or the groups are not equal, too small or fewer than asked for.
    """

    def __init__(
        self,
        d_model: int,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        activation: str = "swiglu",
        scores: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        expert_groups: int = 1,
        top_groups: int = 1,
        shared_hidden: int | None = None,
        shared_gate: bool = False,
        latent: int | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        expect_positive("MoE", d_model=d_model, hidden=hidden, num_experts=num_experts, top_k=top_k)
        expect_positive("MoE", expert_groups=expert_groups, top_groups=top_groups)
        expect_choice("MoE", "scores", scores, ("softmax", "sigmoid"))
        for name, flag in (("normalize", normalize), ("shared_gate", shared_gate), ("bias", bias)):
            expect_choice("MoE", name, flag, (False, True))
        for name, size in (("shared_hidden", shared_hidden), ("latent", latent)):
            if size is not None:
                expect_positive("MoE", **{name: size})
        expect(
            shared_hidden is not None or not shared_gate,
            "MoE: shared_gate must be False without a shared expert; got True. Give shared_hidden.",
        )
        expect(
            num_experts % expert_groups == 0 and (expert_groups == 1 or num_experts >= 2 * expert_groups),
            f"MoE: expert_groups must divide num_experts={num_experts} into groups of at least 2; got {expert_groups}. "
            "Use 1 for no groups.",
        )
        expect(
            top_groups <= expert_groups,
            f"MoE: top_groups must be at most expert_groups={expert_groups}; got {top_groups}. Use fewer.",
        )
        most = num_experts // expert_groups * top_groups
        expect(top_k <= most, f"MoE: top_k must be at most the {most} experts a token may use; got {top_k}. Use fewer.")
        self.gate = Router(
            d_model,
            num_experts,
            top_k,
            scores=scores,
            normalize=normalize,
            scale=scale,
            expert_groups=expert_groups,
            top_groups=top_groups,
            device=device,
            dtype=dtype,
        )
        width = d_model if latent is None else latent
        self.experts = Experts(width, hidden, num_experts, activation=activation, device=device, dtype=dtype)
        self.fc1_latent_proj = self.fc2_latent_proj = self.shared_expert = self.shared_expert_gate = None
        if latent is not None:
            self.fc1_latent_proj = nn.Linear(d_model, latent, bias, device, dtype)
            self.fc2_latent_proj = nn.Linear(latent, d_model, bias, device, dtype)
        if shared_hidden is not None:
            self.shared_expert = MLP(
                d_model, shared_hidden, activation=activation, bias=bias, device=device, dtype=dtype
            )
            if shared_gate:
                self.shared_expert_gate = nn.Linear(d_model, 1, False, device, dtype)

    def reset_parameters(self) -> None:
        """Draw every parameter anew, in place."""
        for part in (self.gate, self.experts, self.fc1_latent_proj, self.fc2_latent_proj, self.shared_expert):
            if part is not None:
                part.reset_parameters()
        if self.shared_expert_gate is not None:
            self.shared_expert_gate.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, t, d_model) -> same."""
        tokens = x.flatten(0, -2)
        experts, weights = self.gate(tokens)
        y = self.experts(tokens if self.fc1_latent_proj is None else self.fc1_latent_proj(tokens), experts, weights)
        if self.fc2_latent_proj is not None:
            y = self.fc2_latent_proj(y)
        if self.shared_expert is not None:
            shared = self.shared_expert(tokens)
            y = y + (shared if self.shared_expert_gate is None else self.shared_expert_gate(tokens).sigmoid() * shared)
        return y.view_as(x)
