"""From logits to a token: greedy, or drawn after temperature, top-k and top-p."""

import math

import torch
from torch import Tensor

from replayssm.checks import expect, expect_int64, expect_positive


class Sampler:
    """Chooses one token a row from logits.

    Args:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most probable tokens; None keeps all.
        top_p: of those, keep the smallest set of most probable tokens whose probability reaches top_p; None keeps all.
        seed: of the draws; None uses torch's global generator.
        vocab_size: ids from here on are never chosen; None allows all.
        device: of the logits.

    Raises:
        ValueError: a temperature that is neither 0 nor at least 1e-5, top_k below 1, top_p outside (0, 1], a seed
            that is no int.
    """

    def __init__(
        self,
        temperature: float,
        *,
        top_k: int | None,
        top_p: float | None,
        seed: int | None,
        vocab_size: int | None,
        device: torch.device,
    ):
        expect(
            isinstance(temperature, int | float) and (temperature == 0 or 1e-5 <= temperature < math.inf),
            f"generate: temperature must be 0 or at least 1e-05; got {temperature!r}. Use 0 for the most "
            "probable token.",
        )
        for name, value in (("top_k", top_k), ("vocab_size", vocab_size)):
            if value is not None:
                expect_positive("generate", **{name: value})
        expect(
            top_p is None or (isinstance(top_p, int | float) and 0 < top_p <= 1),
            f"generate: top_p must be in (0, 1]; got {top_p!r}. Use None to keep all tokens.",
        )
        self.temperature, self.top_k, self.top_p, self.vocab_size = temperature, top_k, top_p, vocab_size
        self.generator = None
        if seed is not None:
            expect_int64("generate", "seed", seed, "Use None to draw from torch's global generator.")
            self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """(..., vocab) -> (...) int64."""
        return self.choose(logits)[0]

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """(..., vocab) -> a token each (...) int64, and what it was drawn from (``probabilities``), None if greedy."""
        if self.temperature == 0:
            return self.emitted(logits).argmax(-1), None
        probabilities = self.probabilities(logits)
        return self.draw(probabilities), probabilities

    def draw(self, weights: Tensor) -> Tensor:
        """Draw in proportion to weights (..., vocab), each row with a positive one -> (...) int64.

        The first of exponential clocks that run at these rates: torch.multinomial would wait for the device to check
        its input.
        """
        clock = torch.empty_like(weights).exponential_(generator=self.generator)
        tiny = torch.finfo(clock.dtype).tiny  # a clock at 0 would divide 0 by 0
        return (weights / clock.clamp(min=tiny)).argmax(-1)

    def uniform(self, like: Tensor) -> Tensor:
        """fp32 numbers in [0, 1), in the shape of ``like``."""
        return torch.rand(like.shape, device=like.device, generator=self.generator)

    def emitted(self, logits: Tensor) -> Tensor:
        """The logits of ids that may be chosen, a view."""
        return logits if self.vocab_size is None else logits[..., : self.vocab_size]

    def probabilities(self, logits: Tensor) -> Tensor:
        """(..., vocab) -> the distribution that tokens are drawn from, (..., at most vocab_size) fp32."""
        logits = self.emitted(logits).float()
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature  # the largest is 0: nothing overflows
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            smallest_kept = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
        if self.top_p is not None:
            values, order = logits.sort(dim=-1, descending=True)
            probability = values.softmax(-1)
            before = probability.cumsum(-1) - probability  # of the more probable tokens; 0 for the first, which stays
            logits = logits.masked_fill((before >= self.top_p).gather(-1, order.argsort(-1)), -torch.inf)
        return logits.softmax(-1)
