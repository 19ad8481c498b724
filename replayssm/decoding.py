"""One run of ``generate`` on the device: the texts, who has ended, and the step that makes them longer.

Every step works on the same buffers with the same shapes and never waits for the device, so that it can be recorded as
a CUDA graph. Without a drafter it is a step with no drafts.
"""

import torch
from torch import Tensor, nn

from replayssm.cache.state_cache import ReplayStateCache
from replayssm.drafters.base import Context, Drafter, check_proposal, leading, name_of
from replayssm.sampling import Sampler
from replayssm.verify import verify


class Decoding:
    """The rows of one ``generate`` call behind their prompts.

    Args:
        prompts: (batch, t) int64, left-padded.
        lengths: (batch,) int64, real tokens of each prompt.
        ends: (n,) int64, ids that end a row.
        spare: the cache has room for all tokens and one more step, so drafts at the end need no mask.

    Attributes:
        tokens: (batch, max_new_tokens) int64, what the rows have returned so far, ``pad`` behind.
        verdict: (2,) int64: how many columns of ``tokens`` are final, and whether a row has not ended.
        counts: (2, 1 + num_drafts) int64, see ``Acceptance.add``.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: ReplayStateCache,
        prompts: Tensor,
        lengths: Tensor,
        *,
        max_new_tokens: int,
        sampler: Sampler,
        ends: Tensor,
        pad: int,
        drafter: Drafter | None,
        num_drafts: int,
        spare: bool,
    ):
        self.model, self.cache, self.sampler, self.drafter = model, cache, sampler, drafter
        self.max_new_tokens, self.num_drafts, self.ends, self.spare = max_new_tokens, num_drafts, ends, spare
        batch, width = prompts.shape
        device = prompts.device
        # in both, a column more than is ever read takes what must not be kept
        self._tokens = torch.full((batch, max_new_tokens + 1), pad, device=device)
        self._text = torch.full((batch, width + max_new_tokens + 1), -1, device=device)
        place = torch.arange(width, device=device)
        source = (place + width - lengths.unsqueeze(1)).clamp(max=width - 1)
        self._text[:, :width] = torch.where(place < lengths.unsqueeze(1), prompts.gather(1, source), -1)
        self.lengths = lengths.clone()
        self.new = torch.zeros_like(lengths)  # tokens returned
        self.last = torch.zeros_like(lengths)  # the newest token, which the model has not read
        self.alive = torch.ones_like(lengths, dtype=torch.bool)
        self.drafts = torch.full((batch, num_drafts), -1, device=device)
        self.verdict = torch.zeros(2, dtype=torch.int64, device=device)
        self.counts = torch.zeros(2, 1 + num_drafts, dtype=torch.int64, device=device)
        self._probabilities: Tensor | None = None
        self._hidden: Tensor | None = None
        self._drafted = False
        self._vocab_size = 0

    @property
    def tokens(self) -> Tensor:
        return self._tokens[:, : self.max_new_tokens]

    def start(self, logits: Tensor, hidden: Tensor | None) -> None:
        """Choose each row's first token from what the prompt gave: logits (batch, vocab), hidden (batch, d_model)."""
        self._vocab_size = self.sampler.emitted(logits).shape[-1]
        self._hidden = None if hidden is None else hidden.clone()
        self._emit(self.sampler(logits).unsqueeze(1), torch.ones_like(self.new))

    def prepare(self) -> None:
        """The part of a step that cannot be recorded: drafts by code of which nothing is known."""
        if self.drafter is not None and not self.drafter.capturable:
            self._draft()

    def advance(self) -> None:
        """The rest of a step: draft, read the drafts, keep what stands, at least one token where a row has not ended.

        Works in place and never waits for the device, so that it can be recorded.
        """
        if self.drafter is not None and self.drafter.capturable:
            self._draft()
        self._verify()

    def _draft(self) -> None:
        """Ask the drafter, and keep its answer where the verification finds it."""
        assert self.drafter is not None
        context = Context(self._text[:, :-1], self.lengths, self._hidden)
        tokens, probabilities = self.drafter.propose(context, self.num_drafts)
        check_proposal(self.drafter, tokens, probabilities, self.drafts, self._vocab_size)
        self.drafts.copy_(tokens)
        if self.sampler.temperature == 0:
            return
        if not self._drafted:
            self._drafted = True
            self._probabilities = None if probabilities is None else probabilities.float().clone()
        elif (probabilities is None) != (self._probabilities is None):
            raise ValueError(
                f"{name_of(self.drafter)}.propose: probabilities must be given always or never; got both. "
                "Return None always if they are not always known."
            )
        elif probabilities is not None and self._probabilities is not None:
            self._probabilities.copy_(probabilities)

    def _verify(self) -> None:
        """Read the newest token and the drafts, keep those that stand, and one token more."""
        column = torch.arange(1 + self.num_drafts, device=self.new.device)
        legal = (self.drafts >= 0) & (self.drafts < self._vocab_size)
        # a draft that would be the row's last token is of no use: the model gives that one anyway
        room = torch.where(self.alive, self.max_new_tokens - self.new - 1, 0)
        brought = leading(legal).minimum(room)
        drafts = torch.where(column[:-1] < brought.unsqueeze(1), self.drafts, 0)
        ids = torch.cat([self.last.unsqueeze(1), drafts], 1)
        real = (column <= brought.unsqueeze(1)) & self.alive.unsqueeze(1)
        mask = None if self.spare else real.long()
        if self.drafter is not None and self.drafter.reads_hidden:
            logits, hidden = self.model(
                ids, self.cache, attention_mask=mask, logits_to_keep=len(column), return_hidden=True
            )
            self.drafter.read_step(hidden)
        else:
            logits, hidden = self.model(ids, self.cache, attention_mask=mask, logits_to_keep=len(column)), None
        accepted, token = verify(self.sampler, logits, drafts, brought, self._probabilities)
        new = torch.cat([drafts, token.unsqueeze(1)], 1)
        new = torch.where(column == accepted.unsqueeze(1), token.unsqueeze(1), new)
        self.counts[0].add_(real.sum(0))
        kept = self._emit(new, accepted + 1)
        self.counts[1, 0].add_(kept.sum())
        self.counts[1, 1:].add_((column[:-1] < accepted.minimum(kept).unsqueeze(1)).sum(0))
        self.cache.commit(kept)
        if hidden is not None and self._hidden is not None:
            at = (kept - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[-1])
            self._hidden.copy_(hidden.gather(1, at).squeeze(1))

    def _emit(self, new: Tensor, count: Tensor) -> Tensor:
        """Return the first ``count`` (batch,) of ``new`` (batch, n) in rows that have not ended, up to an end.

        Returns:
            (batch,) int64, how many tokens each row got.
        """
        column = torch.arange(new.shape[1], device=new.device)
        count = torch.where(self.alive, count, 0)
        if len(self.ends):
            ending = (new.unsqueeze(2) == self.ends).any(2) & (column < count.unsqueeze(1))
            ended = ending.any(1)
            count = torch.where(ended, ending.long().argmax(1) + 1, count)
            self.alive.logical_and_(ended.logical_not())
        given = column < count.unsqueeze(1)
        for buffer, filled in ((self._tokens, self.new), (self._text, self.lengths)):
            buffer.scatter_(1, torch.where(given, filled.unsqueeze(1) + column, buffer.shape[1] - 1), new)
        newest = new.gather(1, (count - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        self.last.copy_(torch.where(count > 0, newest, self.last))
        self.new.add_(count)
        self.lengths.add_(count)
        self.alive.logical_and_(self.new < self.max_new_tokens)
        any_alive = self.alive.any()
        shortest = torch.where(self.alive, self.new, self.max_new_tokens).amin()
        self.verdict.copy_(torch.stack([torch.where(any_alive, shortest, self.new.amax()), any_alive.long()]))
        return count
