"""Drafts from a smaller model, with a cache of its own that is rolled back as the large model's is."""

import torch
from torch import Tensor, nn

from replayssm.cache.state_cache import ReplayStateCache
from replayssm.checks import expect
from replayssm.drafters.base import Context, Drafter, Run, configured_vocab_size, device_of
from replayssm.prefill import prefill


class DraftModel(Drafter):
    """Any model that ``generate`` takes, over the same vocabulary; it draws as the large model does.

    Its cache holds what is settled and nothing else. For each draft after the first it reads the drafts so far
    together and rolls them back by ``commit(0)``: a step reads the state once, whatever the number of its tokens.
    """

    capturable = True

    def __init__(self, model: nn.Module):
        self.model = model

    def begin(self, run: Run) -> None:
        ours, theirs = device_of(self.model), device_of(run.model)
        expect(
            ours == theirs,
            f"DraftModel: model must be on the other model's device {theirs}; got {ours}. Move it there first.",
        )
        sizes = configured_vocab_size(self.model), configured_vocab_size(run.model)
        expect(
            None in sizes or sizes[0] == sizes[1],
            f"DraftModel: model must have the other model's vocabulary of {sizes[1]} ids; got {sizes[0]}. Take a draft "
            "model that was trained with the same tokenizer.",
        )
        self.sampler, self.num_drafts = run.sampler, run.num_drafts
        self.cache = ReplayStateCache(
            self.model,
            len(run.tokens),
            window=run.window,
            step_tokens=1 + run.num_drafts,
            max_seqlen=run.tokens.shape[1] + run.max_new_tokens + run.num_drafts,
        )
        prefill(self.model, self.cache, run.tokens, run.mask)

    def propose(self, context: Context, num: int) -> tuple[Tensor, Tensor | None]:
        tokens, lengths, _ = context
        place = torch.arange(1 + self.num_drafts, device=tokens.device)
        start = self.cache.seqlen.unsqueeze(1)  # the text from here on came out of the last step
        settled = start + place < lengths.unsqueeze(1)
        ids = tokens.gather(1, (start + place).clamp(max=tokens.shape[1] - 1))
        ids = torch.where(settled, ids, 0)
        logits = self.model(ids, self.cache, attention_mask=settled.long(), logits_to_keep=len(place))
        new = settled.sum(1)
        self.cache.commit(new)
        last = (new - 1).clamp(min=0)[:, None, None].expand(-1, 1, logits.shape[-1])
        logits = logits.gather(1, last).squeeze(1)
        drafts: list[Tensor] = []
        distributions: list[Tensor] = []
        while True:
            draft, distribution = self.sampler.choose(logits)
            drafts.append(draft)
            if distribution is not None:
                distributions.append(distribution)
            if len(drafts) == num:
                break
            logits = self.model(torch.stack(drafts, 1), self.cache, logits_to_keep=1)[:, -1]
            self.cache.commit(torch.zeros_like(new))
        return torch.stack(drafts, 1), torch.stack(distributions, 1) if distributions else None
