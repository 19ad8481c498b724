"""Drafts from the text itself: what followed the last time that its last tokens stood there."""

import torch
from torch import Tensor

from replayssm.checks import expect_positive
from replayssm.drafters.base import Context, Drafter


class PromptLookup(Drafter):
    """Find the longest n-gram that ends a text earlier in that text, the most recent one of that length, and copy on.

    A copy that reaches the end of the text goes on with what it has written, as LZ77 does, so a text that repeats
    itself gets all its drafts. A row without a match brings none. Needs no model and costs next to nothing; it helps
    where the output repeats the prompt (edits, summaries, code) or itself.

    Args:
        longest: most tokens of the n-gram.
    """

    capturable = True

    def __init__(self, longest: int = 3):
        expect_positive("PromptLookup", longest=longest)
        self.longest = longest

    def propose(self, context: Context, num: int) -> tuple[Tensor, None]:
        tokens, lengths, _ = context
        n = tokens.shape[1]
        place = torch.arange(n, device=tokens.device)
        last = lengths.unsqueeze(1) - 1
        # matched[b, j]: how many of the tokens up to j, counted backwards, equal those that end the text
        matches, matched = (place < last), torch.zeros_like(tokens)
        for back in range(min(self.longest, n)):
            ending = tokens.gather(1, (last - back).clamp(min=0))
            earlier = torch.nn.functional.pad(tokens[:, : n - back], (back, 0), value=-1)
            matches = matches & (earlier == ending)
            matched = matched + matches
        best = (matched * n + place).argmax(1, keepdim=True)  # a longer match, then a later place
        found = matched.gather(1, best) > 0
        period = (last - best).clamp(min=1)
        copied = best + 1 + torch.arange(num, device=tokens.device).remainder(period)
        drafts = tokens.gather(1, torch.where(found, copied, 0))
        return torch.where(found, drafts, -1), None
