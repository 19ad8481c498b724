"""Is what will be timed right? A patched model against the unpatched one, told the same text, before any figure.

The text is random: a model with random weights repeats itself, and equal records would hide that they are mixed up. The
yardstick is transformers itself, which runs the text step by step and as one forward without a cache. Between the two
lies what rounding does to such a model; replay may be as far from the steps, times ``SLACK``.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor

from replayssm.bench.gate import SLACK
from replayssm.bench.hf_models import core, greedy, mixers, patched, prompts, torch_path
from replayssm.cache.checkpoint import EXACT
from replayssm.cache.selection import Selection
from replayssm.cache.stored_state import StoredState

BATCH, PROMPT, NEW_TOKENS = 4, 32, 40  # more tokens than the two windows that a prompt and a flush begin
COARSE = 2.0  # times what a format misses, for each layer that reads it: copies of later states differ


class Verdict(NamedTuple):
    """How far a patched model is from the unpatched one.

    Attributes:
        error: RMS of the difference between their logits, over that of the logits.
        allowed: the most that it may be.
        agreement: share of tokens that both find likeliest.
        margin: the smallest difference between the two largest logits of a token.
    """

    error: float
    allowed: float
    agreement: float
    margin: float

    @property
    def passed(self) -> bool:
        """NaN does not pass."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        said = f"error {self.error:.1e} of {self.allowed:.1e} allowed, {self.agreement:.1%} of the tokens agree"
        return f"{said}, smallest margin {self.margin:.1e}"


class Told(LogitsProcessor):
    """Makes ``generate`` write a text that is given.

    Args:
        text: (batch, tokens), the prompt in front.
    """

    def __init__(self, text: Tensor):
        self._text = text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        wanted = self._text[:, input_ids.shape[1]].unsqueeze(1)
        return torch.full_like(scores, -torch.inf).scatter(1, wanted, 0.0)


def check(model: Any, arms: Mapping[str, Mapping[str, Any]]) -> dict[str, Verdict]:
    """Compare a model, patched in every way of ``arms``, with transformers' plain PyTorch in it.

    Args:
        model: unpatched, of few layers; it is left unpatched.
        arms: name -> options of ``hf.patch``.
    """
    text = prompts(model, BATCH, PROMPT + NEW_TOKENS)

    def logits() -> Tensor:
        kept = {"return_dict_in_generate": True, "output_logits": True}
        return torch.stack(greedy(model, text[:, :PROMPT], NEW_TOKENS, Told(text), **kept).logits, dim=1)

    # cuDNN would multiply fp32 in TF32, in some of the convolutions that are compared
    with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
        with torch_path(model), torch.no_grad():
            expected = logits().double()
            whole = model(text[:, :-1], use_cache=False, logits_to_keep=NEW_TOKENS).logits
        size, best = rms(expected), expected.topk(2).values
        eps = torch.finfo(model.dtype).eps
        rounding = SLACK * (rms(whole - expected) / size + eps)
        verdicts = {}
        for name, options in arms.items():
            coarse = COARSE * len(mixers(model)) * format_error(model, options)
            with patched(model, options):
                got = logits()
            verdicts[name] = Verdict(
                error=rms(got - expected) / size,
                allowed=rounding + coarse,
                agreement=float((got.argmax(-1) == expected.argmax(-1)).double().mean()),
                margin=float((best[..., 0] - best[..., 1]).min()),
            )
    return verdicts


def format_error(model: Any, options: Mapping[str, Any]) -> float:
    """What steps read of normal states in the formats of ``options``: RMS of the difference over that of the states."""
    layer = core(model)
    states = torch.randn(BATCH, layer.nheads, layer.headdim, layer.d_state, device=model.device)
    names = options.get("checkpoint", EXACT), options.get("read_format")
    stored = StoredState(*names, tuple(states.shape), states.dtype, states.device)
    zeros = torch.zeros(BATCH, dtype=torch.int64, device=model.device)
    stored.save(states, Selection(), seed=zeros, position=zeros, layer=0)
    read = stored.checkpoint.load(Selection()) if stored.copy is None else stored.copy.load()
    return rms(read - states) / rms(states)


def rms(x: Tensor) -> float:
    """The root of the mean square, in fp64."""
    return float(x.double().square().mean().sqrt())
