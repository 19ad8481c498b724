"""Drafters and models for the tests of speculation."""

import torch
from draws import DEVICE
from torch import Tensor, nn

from replayssm import ReplayStateCache
from replayssm.drafters import Context


class Bigram(nn.Module):
    """A model without state: the logits depend on the last token alone.

    Args:
        logits: (vocab, vocab), row i what follows token i.
    """

    def __init__(self, logits: Tensor):
        super().__init__()
        self.logits = nn.Parameter(logits.to(DEVICE), requires_grad=False)  # tells generate the device

    def forward(
        self,
        ids: Tensor,
        cache: ReplayStateCache,
        *,
        attention_mask: Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        cache.open_step(ids.shape[1], None, attention_mask)
        return self.logits[ids[:, -logits_to_keep:]]


class Scripted:
    """Drafts what is known to follow, changed here and there.

    Args:
        texts: for each row the new tokens that the model will give.
        begins: for each row the tokens before them.
        seed: of the changes and of the numbers of drafts.
        right: share of the drafts that are left as they are.
    """

    def __init__(self, texts: Tensor, begins: Tensor, seed: int, right: float, vocab_size: int):
        self.texts, self.begins, self.right, self.vocab_size = texts, begins, right, vocab_size
        self.generator = torch.Generator().manual_seed(seed)

    def propose(self, context: Context, num: int) -> tuple[Tensor, None]:
        batch, longest = self.texts.shape
        place = (context.lengths - self.begins).unsqueeze(1) + torch.arange(num, device=DEVICE)
        tokens = self.texts.gather(1, place.clamp(max=longest - 1))
        random = torch.rand(batch, num, generator=self.generator).to(DEVICE)
        other = torch.randint(1, self.vocab_size, (batch, num), generator=self.generator).to(DEVICE)
        tokens = torch.where(random < self.right, tokens, (tokens + other) % self.vocab_size)
        count = torch.randint(num + 1, (batch, 1), generator=self.generator).to(DEVICE)
        return torch.where(torch.arange(num, device=DEVICE) < count, tokens, -1), None
