"""How many drafts were worth it."""

import torch
from torch import Tensor


class Acceptance:
    """Counts drafts and tokens over all calls of ``generate`` that it is passed to.

    Reading a number waits for the device. A row counts in a step if it had not ended before it.
    """

    def __init__(self) -> None:
        self._counts: list[Tensor] = []

    def add(self, counts: Tensor) -> None:
        """Add (2, 1 + drafts) int64: row-steps and drafts brought by place, then tokens and drafts kept by place."""
        self._counts.append(counts)

    @property
    def steps(self) -> int:
        """Steps of single rows: what a token at a time would have taken as many as tokens."""
        return int(self._sum()[0, 0])

    @property
    def tokens(self) -> int:
        """Tokens that these steps returned; the one that comes out of the prompt is none of them."""
        return int(self._sum()[1, 0])

    @property
    def proposed(self) -> list[int]:
        """Drafts verified, by their place in a step."""
        return [int(x) for x in self._sum()[0, 1:]]

    @property
    def accepted(self) -> list[int]:
        """Drafts returned as tokens, by their place in a step."""
        return [int(x) for x in self._sum()[1, 1:]]

    @property
    def mean_length(self) -> float:
        """Tokens a step, from 1 (no draft accepted) to 1 + drafts; 0 before any step."""
        return self.tokens / max(self.steps, 1)

    def __str__(self) -> str:
        proposed, accepted = sum(self.proposed), sum(self.accepted)
        share = f"{accepted / proposed:.0%} of {proposed:,} drafts" if proposed else "no drafts"
        return f"mean accepted length {self.mean_length:.2f} tokens a step, {share} accepted"

    def _sum(self) -> Tensor:
        width = max((counts.shape[1] for counts in self._counts), default=1)
        total = torch.zeros(2, width, dtype=torch.int64)
        for counts in self._counts:
            total[:, : counts.shape[1]] += counts.cpu()
        return total
