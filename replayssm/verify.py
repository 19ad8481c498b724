"""Which drafts stand, and the token after them: the output is distributed as the model's alone, whoever drafted.

Greedy: a draft stands while it is what the model would have chosen. Sampling: speculative sampling (arXiv 2211.17192,
section 2.3; arXiv 2302.01318). A draft x from q stands with probability min(1, p(x) / q(x)); the first that does not is
replaced by a draw from max(p - q, 0), normalised.
"""

import torch
from torch import Tensor

from replayssm.drafters.base import leading
from replayssm.sampling import Sampler


def verify(
    sampler: Sampler, logits: Tensor, drafts: Tensor, brought: Tensor, probabilities: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Accept drafts and choose the next token; nothing waits for the device.

    Args:
        sampler: how the model's tokens are chosen; temperature, top-k and top-p make p.
        logits: (batch, 1 + num, vocab) behind the last token and behind each draft.
        drafts: (batch, num) int64, ids that may be emitted.
        brought: (batch,) int64, how many of its drafts each row has; the rest is not looked at.
        probabilities: (batch, num, vocab), q of each draft; None: each draft was certain (q is 1 there).

    Returns:
        accepted: (batch,) int64, 0 .. brought.
        token: (batch,) int64, what follows the accepted drafts.
    """
    num = drafts.shape[1]
    there = torch.arange(num, device=drafts.device) < brought.unsqueeze(1)
    if sampler.temperature == 0:
        best = sampler(logits)
        accepted = leading((drafts == best[:, :-1]) & there)
        return accepted, best.gather(1, accepted.unsqueeze(1)).squeeze(1)
    p = sampler.probabilities(logits)
    if num == 0:
        return brought, sampler.draw(p[:, 0])
    q = torch.zeros_like(p[:, :-1]).scatter(2, drafts.unsqueeze(2), 1.0) if probabilities is None else probabilities
    chance, claimed = (x.gather(2, drafts.unsqueeze(2)).squeeze(2) for x in (p[:, :-1], q))
    accepted = leading((sampler.uniform(chance) * claimed < chance) & there)
    following = _at(p, accepted)
    rest = (following - _at(q, accepted.clamp(max=num - 1))).clamp(min=0)
    # a refused draft leaves a positive rest, but for rounding
    refused = (accepted < brought).unsqueeze(1) & (rest.sum(1, keepdim=True) > 0)
    return accepted, sampler.draw(torch.where(refused, rest, following))


def _at(x: Tensor, place: Tensor) -> Tensor:
    """(batch, n, vocab), (batch,) -> (batch, vocab)."""
    return x.gather(1, place[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)
