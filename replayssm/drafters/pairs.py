"""What a head for further tokens that has attention of its own needs: a cache of its own, and what goes into it.

Position i of the head is the pair of the hidden state of token i and the embedding of token i + 1. So the head can read
position i as soon as token i + 1 is chosen, and is always one token behind the text.
"""

import torch
from torch import Tensor, nn

from replayssm.cache.state_cache import ReplayStateCache
from replayssm.cache.step import OwnCache
from replayssm.drafters.base import Context, Run


class CachedHead(OwnCache):
    """A head for further tokens over a cache: the interface that ``drafter="mtp"`` needs."""

    def forward(
        self,
        hidden: Tensor,
        embedding: Tensor,
        cache: ReplayStateCache | None = None,
        *,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The hidden states one token further on.

        Args:
            hidden: (batch, t, d_model), what the model's head was given for t tokens, or this one gave.
            embedding: (batch, t, d_model), of the token behind each of them.
            cache: built from this head; a step, which ``cache.commit`` closes. None: the pairs are all there is.
            attention_mask: (batch, t), 1 = a pair.

        Returns:
            (batch, t, d_model), for the model's lm_head.
        """
        raise NotImplementedError


class Pairs:
    """The pairs of the rows of one ``generate`` call, in the head's cache as soon as they are settled.

    Args:
        embed: the model's embedding.
        run: what is drafted for.
    """

    def __init__(self, head: CachedHead, embed: nn.Module, run: Run):
        self._head, self._embed = head, embed
        batch, width = run.tokens.shape
        self._cache = ReplayStateCache(
            head,
            batch,
            window=run.window,
            step_tokens=1 + run.num_drafts,
            max_seqlen=width + run.max_new_tokens + run.num_drafts,
        )
        self._mask: Tensor | None = None
        self._hidden: Tensor | None = None  # (batch, 1 + num_drafts, d_model), of what the model read last
        self._columns = torch.arange(1 + run.num_drafts, device=run.tokens.device)
        self._guesses: list[tuple[Tensor, Tensor]] = []  # pairs that are not settled

    def read_prompt(self, tokens: Tensor, mask: Tensor | None, hidden: Tensor) -> None:
        """As ``Drafter.read_prompt``: the last hidden state of a piece waits for the token behind it."""
        if self._hidden is None:
            before, before_mask, after = hidden[:, :-1], mask if mask is None else mask[:, :-1], tokens[:, 1:]
            self._hidden = hidden.new_zeros(len(hidden), len(self._columns), hidden.shape[2])
        else:
            before = torch.cat([self._hidden[:, :1], hidden[:, :-1]], 1)
            before_mask = None if mask is None or self._mask is None else torch.cat([self._mask, mask[:, :-1]], 1)
            after = tokens
        self._mask = None if mask is None else mask[:, -1:]
        self._hidden[:, 0] = hidden[:, -1]
        if before.shape[1]:
            self._head(before, self._embed(after), self._cache, attention_mask=before_mask)
            self._cache.commit()

    def read_step(self, hidden: Tensor) -> None:
        """As ``Drafter.read_step``; in place, so that it can be recorded."""
        assert self._hidden is not None
        self._hidden.copy_(hidden)

    def settle(self, context: Context) -> Tensor:
        """Read the pairs that the last step settled.

        Returns:
            (batch, d_model): the hidden state of each row's newest token; arbitrary for rows that have ended.
        """
        assert self._hidden is not None
        tokens, lengths, _ = context
        place = self._cache.seqlen.unsqueeze(1) + self._columns
        settled = place < lengths.unsqueeze(1) - 1
        after = tokens.gather(1, (place + 1).clamp(max=tokens.shape[1] - 1)).clamp(min=0)
        y = self._head(self._hidden, self._embed(after), self._cache, attention_mask=settled.long())
        new = settled.sum(1)
        self._cache.commit(new)
        self._guesses = []
        return y.gather(1, (new - 1).clamp(min=0)[:, None, None].expand(-1, 1, y.shape[2])).squeeze(1)

    def guess(self, hidden: Tensor, token: Tensor) -> Tensor:
        """The hidden state (batch, d_model) one token further on, which is then forgotten again.

        All guesses since ``settle`` are read together and rolled back, so that the cache holds what is settled alone.
        """
        self._guesses.append((hidden, token))
        hiddens, drafts = (torch.stack(parts, 1) for parts in zip(*self._guesses, strict=True))
        y = self._head(hiddens, self._embed(drafts), self._cache)[:, -1]
        self._cache.commit(torch.zeros_like(self._cache.seqlen))
        return y
