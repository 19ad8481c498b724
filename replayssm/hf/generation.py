"""Assisted generation for models whose recurrent layers all replay: what transformers asks of a model instance."""

from functools import partial
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from replayssm.hf.cache_layer import ReplayLinearLayer

CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def allow_assistance(model: PreTrainedModel) -> None:
    """Let ``generate`` of this instance take drafts; both attributes shadow those of its class."""
    model.__dict__["_is_stateful"] = False  # generate refuses to roll back what says True
    model.__dict__["generate"] = partial(_generate, model)  # a method would not be found again after unpickling


def forbid_assistance(model: PreTrainedModel) -> None:
    """Undo ``allow_assistance``."""
    del model.__dict__["_is_stateful"], model.__dict__["generate"]


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``generate`` of the class; a cache that outlives it takes prompts of any length again.

    Assisted generation lets a cache hold back tokens and does not say when it ends. The next turn's prompt would be
    taken for drafts, and refused if it is long. A model that drafts is called for every round, so its cache goes on.
    """
    settings = self.base_model.config.__dict__
    layers = settings.get("num_hidden_layers")
    try:
        output = type(self).generate(self, *args, **kwargs)
    finally:  # assistant_early_exit lowers it while it drafts, and leaves it so where that fails
        if layers is not None:
            settings["num_hidden_layers"] = layers
    config = kwargs.get("generation_config")
    if config is not None and config.is_assistant:
        return output
    holders = [kwargs, output] if isinstance(output, dict) else [kwargs]
    for cache in [holder.get(name) for holder in holders for name in CACHE_NAMES]:
        for layer in cache.layers if isinstance(cache, Cache) else ():
            if isinstance(layer, ReplayLinearLayer):
                layer.stop_past_recording()
    return output
