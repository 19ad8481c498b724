"""Multi-token prediction: drafts from the model's own hidden states, by a small head that is trained beside it."""

from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replayssm.checks import expect, expect_positive
from replayssm.drafters.base import Context, Drafter, Run
from replayssm.drafters.pairs import CachedHead, Pairs
from replayssm.layers.norm import RMSNorm
from replayssm.sampling import Sampler


class MTPHead(nn.Module):
    """From the hidden state of a token and the token after it to the hidden state of that one, and so on from there.

    As in DeepSeek-V3 (arXiv 2412.19437, section 2.2) with the embedding and the head of the model, and names as in
    Qwen3-Next; the block between them is an MLP, so the head keeps nothing in a cache. One head serves every depth.

    Args:
        d_model: size of the model's residual stream.
        hidden: size inside the MLP.
    """

    def __init__(
        self,
        d_model: int,
        hidden: int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        expect_positive("MTPHead", d_model=d_model, hidden=hidden)
        self.pre_fc_norm_embedding = RMSNorm(d_model, eps=eps, device=device, dtype=dtype)
        self.pre_fc_norm_hidden = RMSNorm(d_model, eps=eps, device=device, dtype=dtype)
        self.fc = nn.Linear(2 * d_model, d_model, False, device, dtype)
        self.mlp_norm = RMSNorm(d_model, eps=eps, device=device, dtype=dtype)
        self.up_proj = nn.Linear(d_model, hidden, False, device, dtype)
        self.down_proj = nn.Linear(hidden, d_model, False, device, dtype)
        self.norm = RMSNorm(d_model, eps=eps, device=device, dtype=dtype)

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """The hidden state one token further on.

        Args:
            hidden: (..., d_model), what the model's head, or this one, gave for a token.
            embedding: (..., d_model) of the token that follows it.

        Returns:
            (..., d_model), for the model's lm_head.
        """
        both = torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1)
        x = self.fc(both)
        x = x + self.down_proj(F.relu(self.up_proj(self.mlp_norm(x))).square())
        return self.norm(x)


class HasMTP(Protocol):
    """A model with a place for a head; a ``HybridLM`` is one."""

    mtp: MTPHead | CachedHead | None
    embed: nn.Module
    lm_head: nn.Module


class MTP(Drafter):
    """The model's own head (``model.mtp``), used again for each further draft."""

    reads_hidden = True
    capturable = True
    _model: HasMTP
    _sampler: Sampler
    _pairs: Pairs | None

    def begin(self, run: Run) -> None:
        model = run.model
        head = getattr(model, "mtp", None)
        expect(
            head is not None,
            f"generate: drafter must be another than 'mtp' for a model without an MTP head; got {type(model).__name__} "
            'without one. Train one, as examples/train_mtp.py does, or take "prompt_lookup".',
        )
        self._model, self._sampler = cast(HasMTP, model), run.sampler
        self._pairs = Pairs(head, self._model.embed, run) if isinstance(head, CachedHead) else None

    def read_prompt(self, tokens: Tensor, mask: Tensor | None, hidden: Tensor) -> None:
        if self._pairs is not None:
            self._pairs.read_prompt(tokens, mask, hidden)

    def read_step(self, hidden: Tensor) -> None:
        if self._pairs is not None:
            self._pairs.read_step(hidden)

    def propose(self, context: Context, num: int) -> tuple[Tensor, Tensor | None]:
        drafts: list[Tensor] = []
        distributions: list[Tensor] = []
        hidden = self._first(context)
        while True:
            token, distribution = self._sampler.choose(self._model.lm_head(hidden))
            drafts.append(token)
            if distribution is not None:
                distributions.append(distribution)
            if len(drafts) == num:
                break
            hidden = self._next(hidden, token)
        return torch.stack(drafts, 1), torch.stack(distributions, 1) if distributions else None

    def _first(self, context: Context) -> Tensor:
        """(batch, d_model), the hidden state of each row's newest token, which the model has not read."""
        if self._pairs is not None:
            return self._pairs.settle(context)
        tokens, lengths, hidden = context
        assert hidden is not None
        return self._next(hidden, tokens.gather(1, lengths.unsqueeze(1) - 1).squeeze(1))

    def _next(self, hidden: Tensor, token: Tensor) -> Tensor:
        """The hidden state one token further on."""
        if self._pairs is not None:
            return self._pairs.guess(hidden, token)
        head = self._model.mtp
        assert isinstance(head, MTPHead)
        return head(hidden, self._model.embed(token))
