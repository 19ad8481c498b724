"""Speculative decoding, three ways to draft: python examples/speculative.py

The text is the same for all of them. What differs is how many tokens a step returns.
"""

import time

import torch

from replayssm import Acceptance, generate
from replayssm.models import from_pretrained

model, tokenizer = from_pretrained("tiny", device="cuda" if torch.cuda.is_available() else "cpu")
prompt = "def get_width(self):\n    return self._width\n\n\ndef get_height(self):\n    return self."
ids = [tokenizer.encode(prompt)]


class AlwaysIndents:
    """A drafter of one's own: after a line break come spaces. Each row of ``tokens`` is real up to its length."""

    def propose(self, context, num):
        tokens, lengths, _ = context
        last = tokens.gather(1, lengths.unsqueeze(1) - 1)
        return torch.where((last == ord("\n")) | (last == ord(" ")), ord(" "), -1).expand(-1, num), None


drafters = {"none": None, "prompt lookup": "prompt_lookup", "one's own": AlwaysIndents()}
if model.mtp is not None:
    drafters["the model's own head"] = "mtp"
for name, drafter in drafters.items():
    acceptance = Acceptance()
    begin = time.perf_counter()
    tokens = generate(model, ids, max_new_tokens=200, drafter=drafter, num_drafts=4, acceptance=acceptance)
    text = tokenizer.decode(tokens[0].tolist())
    print(f"{name}: {200 / (time.perf_counter() - begin):.0f} tokens/s, {acceptance}")
print(prompt + text)
