"""Which entry of a transformers cache a patched mixer works on."""

from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    StaticCache,
)

from replayssm.checks import expect
from replayssm.hf.cache_layer import ReplayHybridLayer, ReplayLinearLayer
from replayssm.hf.lockstep import Lockstep
from replayssm.hf.options import Options

KINDS = {LinearAttentionLayer: ReplayLinearLayer, LinearAttentionAndFullAttentionLayer: ReplayHybridLayer}


def layer_of(where: str, cache: Cache, layer_idx: int, options: Options) -> ReplayLinearLayer:
    """The entry of a cache for a patched mixer; a fresh stock one is replaced at its first touch.

    Raises:
        ValueError: the cache was built without the model's config.
        NotImplementedError: a kind of cache that does not fit.
        RuntimeError: the entry holds a state of the stock mixer.
    """
    if isinstance(cache, StaticCache):
        raise NotImplementedError(
            f"{where}: cache must be a DynamicCache; got a StaticCache, whose masks are for entries that can be "
            "compiled. Leave out cache_implementation, or unpatch the model."
        )
    expect(
        layer_idx < len(cache.layers),
        f"{where}: cache must have an entry for each of the model's layers; got {len(cache.layers)} for layer "
        f"{layer_idx}. Build it with DynamicCache(config=model.config).",
    )
    stock = cache.layers[layer_idx]
    if isinstance(stock, ReplayLinearLayer):
        return stock
    kind = KINDS.get(type(stock))
    if kind is None or stock.number_of_states != 1:
        raise NotImplementedError(
            f"{where}: cache must hold a {' or '.join(kind.__name__ for kind in KINDS)} of one state for layer "
            f"{layer_idx}; got a {type(stock).__name__}. Build it with DynamicCache(config=model.config), or unpatch."
        )
    if any(stock.has_previous_state.values()):
        raise RuntimeError(
            f"{where}: cache must be fresh, or made by the patched model; got a state of the unpatched one for layer "
            f"{layer_idx}. Start with a fresh cache."
        )
    others = [layer.lockstep for layer in cache.layers if isinstance(layer, ReplayLinearLayer)]
    ours = kind(options, layer_idx, others[0] if others else Lockstep())
    ours.record_past = stock.record_past
    if isinstance(ours, ReplayHybridLayer):  # attention may have come first
        for name in ("keys", "values", "is_initialized", "device", "dtype"):
            ours.__dict__[name] = stock.__dict__[name]
    cache.layers[layer_idx] = ours
    return ours


def take_back(cache: Cache, layer_idx: int, t: int) -> None:
    """Undo what a forward of t tokens has done to a cache before it reached its first mixer, that of ``layer_idx``."""
    for layer in cache.layers[:layer_idx]:
        if isinstance(layer, CacheLayerMixin):
            layer.crop(-t)
    own = cache.layers[layer_idx]
    if isinstance(own, ReplayHybridLayer):  # its attention may or may not have come before its mixer
        own.align()
