"""``register``: models that transformers builds from now on replay from the start."""

import importlib
import importlib.util
import sys
from typing import Any

from transformers.monkey_patching import register_patch_mapping, unregister_patch_mapping

from replayssm.cache.arguments import Window
from replayssm.hf.mixer import MARK, MIXERS, retyped
from replayssm.hf.options import Options
from replayssm.hf.versions import expect_transformers

_registered: dict[str, Any] = {}


def register(
    *, window: Window = 16, step_tokens: int = 16, checkpoint: str = "fp32", read_format: str | None = None
) -> None:
    """Let ``from_pretrained`` and ``from_config`` build mixers that replay, by transformers' own registry of classes.

    Models that exist stay as they are. Assisted generation also needs ``patch`` on the loaded model, which takes over
    mixers that replay already.

    Args:
        window, step_tokens, checkpoint, read_format: see ``patch``.

    Raises:
        ImportError, ValueError, NotImplementedError: as ``patch``; ValueError also for a second call before
            ``unregister``.
    """
    expect_transformers("hf.register")
    options = Options(window, step_tokens, checkpoint, read_format)
    options.check()
    mapping = {}
    for name, entry in MIXERS.items():
        if importlib.util.find_spec(entry.module.rpartition(".")[0]) is not None:  # older releases lack some
            stock = getattr(importlib.import_module(entry.module), name)
            mapping[name] = _built(retyped(stock), options)
    register_patch_mapping(mapping)
    _registered.update(mapping)
    for built in mapping.values():
        _exchange(built.stock.__module__, built.stock, built)


def unregister() -> None:
    """Undo ``register``; models that were built meanwhile keep replaying."""
    unregister_patch_mapping(list(_registered))
    for built in _registered.values():
        _exchange(built.stock.__module__, built, built.stock)
    _registered.clear()


def _exchange(module: str, old: Any, new: Any) -> None:
    """In tables of a family's module (Nemotron-H), which hold classes themselves: the registry knows names alone."""
    for table in vars(sys.modules[module]).values():
        if isinstance(table, dict):
            table.update({key: new for key, value in table.items() if value is old})


def _built(replaying: Any, options: Options) -> Any:
    """A subclass whose instances carry their options from the start."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        replaying.__init__(self, *args, **kwargs)
        self.__dict__[MARK] = options

    return type(replaying.__name__, (replaying,), {"__module__": __name__, "__init__": __init__})
