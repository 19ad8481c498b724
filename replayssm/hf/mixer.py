"""A mixer of transformers that replays: its class with another ``forward``, and the table of the known classes."""

import types
from functools import cache as memoized
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.cache_utils import Cache

from replayssm.hf.cores import (
    BailingHybridCore,
    FalconH1Core,
    GatedDeltaNetCore,
    KDACore,
    Mamba2Core,
    OlmoHybridCore,
    Qwen3NextCore,
)
from replayssm.hf.entries import layer_of, take_back
from replayssm.hf.options import Options


class Known(NamedTuple):
    """A mixer class of transformers: the folder of its family, and the replay layer inside it."""

    family: str
    core: Any  # a subclass of Core whose constructor takes the mixer and the call's input

    @property
    def module(self) -> str:
        """Where its class is defined."""
        return f"transformers.models.{self.family}.modeling_{self.family}"


MIXERS = {
    "NemotronHMamba2Mixer": Known("nemotron_h", Mamba2Core),
    "Mamba2Mixer": Known("mamba2", Mamba2Core),
    "BambaMixer": Known("bamba", Mamba2Core),
    "GraniteMoeHybridMambaLayer": Known("granitemoehybrid", Mamba2Core),
    "FalconH1Mixer": Known("falcon_h1", FalconH1Core),
    "Zamba2MambaMixer": Known("zamba2", Mamba2Core),
    "Qwen3_5GatedDeltaNet": Known("qwen3_5", GatedDeltaNetCore),
    "Qwen3_5MoeGatedDeltaNet": Known("qwen3_5_moe", GatedDeltaNetCore),
    "Qwen3NextGatedDeltaNet": Known("qwen3_next", Qwen3NextCore),
    "OlmoHybridGatedDeltaNet": Known("olmo_hybrid", OlmoHybridCore),
    "LaraMiniGatedDeltaNet": Known("lara_mini", GatedDeltaNetCore),
    "KimiLinearDeltaAttention": Known("kimi_linear", KDACore),
    "Glm5NextTextLinearAttention": Known("glm5_next", KDACore),
    "BailingHybridDeltaAttention": Known("bailing_hybrid", BailingHybridCore),
}
MARK = "_replay"  # the one attribute that a patched module gets: its Options
PACKED = ("cu_seq_lens_q", "cu_seqlens", "seq_idx")  # keyword arguments by which packed documents come


class ReplayMixer:
    """Goes before a mixer's own class: everything stays but ``forward``. See ``retyped``."""

    stock: Any  # the mixer's own class
    core: Any

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copied and pickled under the name of its own class: the one that replays is made again where it is loaded."""
        return _blank, (self.stock,), self.__dict__

    def forward(
        self,
        hidden_states: Tensor,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        *,
        cache_params: Cache | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The mixer's output (batch, t, d_model), exact zeros at masked positions; see ``ReplayLayer.forward``.

        Args:
            hidden_states: (batch, t, d_model).
            cache, cache_params, past_key_values: one cache, under the name of whichever release calls.
            attention_mask: (batch, t), 1 = a token.
            kwargs: what else the family's blocks pass; the mixers of transformers do not use it.
        """
        where = type(self).__name__
        cache = _the_cache(where, [cache, cache_params, past_key_values], kwargs)
        if any(kwargs.get(name) is not None for name in PACKED):
            raise NotImplementedError(
                f"{where}: a row must hold one sequence; got packed documents ({', '.join(PACKED)}). "
                "Pad the batch instead."
            )
        mask = attention_mask
        if mask is not None and mask.is_floating_point():
            mask = mask != 0
        if cache is None:
            return self.core(self, hidden_states)(hidden_states, attention_mask=mask)
        options: Options = self.__dict__[MARK]
        layer_idx: int = self.layer_idx  # type: ignore[attr-defined]
        layer = layer_of(where, cache, layer_idx, options)
        if layer.refuses(hidden_states.shape[1]):
            take_back(cache, layer_idx, hidden_states.shape[1])
            raise ValueError(
                f"{where}: drafts must be at most step_tokens - 1 = {layer.options.step_tokens - 1} tokens; got "
                f"{hidden_states.shape[1] - 1}. Patch with a larger step_tokens, or lower num_assistant_tokens or "
                "prompt_lookup_num_tokens."
            )
        return layer.forward(self, hidden_states, mask)


def known(module: nn.Module) -> Known | None:
    """The entry of a stock mixer's class, or None."""
    entry = MIXERS.get(type(module).__name__)
    return entry if entry is not None and type(module).__module__ == entry.module else None


def core_of(module: nn.Module) -> Any:
    """The class of the replay layer inside a known mixer, or one that replays."""
    return module.core if isinstance(module, ReplayMixer) else MIXERS[type(module).__name__].core


@memoized
def retyped(stock: Any) -> Any:
    """The class that replays in place of a known one; it is one of its subclasses."""
    body = {"__module__": __name__, "stock": stock, "core": MIXERS[stock.__name__].core}
    return type(f"Replay{stock.__name__}", (ReplayMixer, stock), body)


def _blank(stock: Any) -> Any:
    """An instance without attributes of the class that replays; they are its state."""
    cls = retyped(stock)
    return cls.__new__(cls)


def rebind(module: nn.Module, old: Any, new: Any) -> None:
    """Let a forward that was kept on the instance be that of class ``new``; accelerate's hooks keep and call one."""
    for name in ("forward", "_old_forward"):
        if _is_forward_of(module.__dict__.get(name), old):
            module.__dict__[name] = types.MethodType(new.forward, module)


def reaches(module: nn.Module, cls: Any) -> bool:
    """Whether a call of the module ends in the forward of ``cls``, as far as can be told."""
    if "forward" not in module.__dict__:
        return True
    kept = module.__dict__["_old_forward"] if "_old_forward" in module.__dict__ else module.__dict__["forward"]
    return _is_forward_of(kept, cls)


def _is_forward_of(method: Any, cls: Any) -> bool:
    return isinstance(method, types.MethodType) and method.__func__ is cls.forward


def _the_cache(where: str, named: list[Cache | None], others: dict[str, Any]) -> Cache | None:
    given = [cache for cache in named if cache is not None]
    unknown = [name for name, value in others.items() if isinstance(value, Cache)]
    if len(given) > 1 or unknown:
        raise TypeError(
            f"{where}: a cache must come once, as cache, cache_params or past_key_values; got {len(given)} of these"
            f"{' and ' + ', '.join(unknown) if unknown else ''}. Pass it under one of these names."
        )
    return given[0] if given else None
