"""``patch`` and ``unpatch``: the mixers of a live transformers model, re-typed in place."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, LinearAttentionCacheLayerMixin

from replayssm.cache.arguments import Window
from replayssm.checks import expect
from replayssm.hf.generation import allow_assistance, forbid_assistance
from replayssm.hf.mixer import MARK, MIXERS, ReplayMixer, core_of, known, reaches, rebind, retyped
from replayssm.hf.options import Options
from replayssm.hf.versions import expect_transformers

STATELESS = ("mlp", "moe")  # layer types for which older releases keep an entry of linear attention all the same


@dataclass(frozen=True)
class Report:
    """What ``patch`` did.

    Attributes:
        replaced: name of each mixer that replays -> the replay layer that it equals.
        left: name of each module with a recurrent state that was left as it was -> why.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} of {len(self.replaced) + len(self.left)} mixers replay"]
        return "\n".join(lines + [f"left as it was: {name}: {why}" for name, why in self.left.items()])


def patch(
    model: nn.Module,
    *,
    window: Window = 16,
    step_tokens: int = 16,
    checkpoint: str = "fp32",
    read_format: str | None = None,
) -> Report:
    """Let a transformers model decode by replay: its Mamba-2, Gated DeltaNet and KDA mixers are re-typed in place.

    Parameters, state-dict keys, adapters, hooks and the config stay as they are, and the model is called, trained and
    saved as before. Where every recurrent layer replays, assisted generation, which transformers refuses such models,
    works too; in a model without any attention (Mamba-2) by prompt lookup alone: for ``assistant_model``, as for
    ``prefill_chunk_size`` unpatched too, transformers asks its cache for a length, which only attention gives one.
    Patching again changes the arguments, for caches that are made afterwards.

    Args:
        model: a model of transformers, or a module that holds one, such as a PEFT model.
        window: most committed records between flushes of a state, or "auto"; see ``ReplayStateCache``.
        step_tokens: most tokens that assisted generation verifies at once, one more than its drafts.
        checkpoint, read_format: how states are stored and read; see ``ReplayStateCache``.

    Returns:
        What was replaced, and what was left and why.

    Raises:
        ImportError: the release of transformers is not one that the patch fits.
        ValueError: an argument is out of range, or there is nothing to replace; the model has not changed then.
        NotImplementedError: a format that does not exist.
    """
    expect_transformers("hf.patch")
    _expect_module("hf.patch", model)
    options = Options(window, step_tokens, checkpoint, read_format)
    options.check()
    report, mixers = Report(), []
    for name, module in model.named_modules():
        if isinstance(module, ReplayMixer) or (known(module) is not None and _obstacle(module) is None):
            mixers.append(module)
            report.replaced[name] = core_of(module).equals.__name__
        elif (obstacle := _obstacle(module)) is not None:
            report.left[name] = obstacle
    report.left.update(_uncovered(model, report))
    expect(
        bool(mixers),
        f"hf.patch: model must have a mixer that can replay, one of {', '.join(MIXERS)}; got a "
        f"{type(model).__name__} with none. {report}. Use it unpatched.",
    )
    for mixer in mixers:
        if not isinstance(mixer, ReplayMixer):
            stock: Any = type(mixer)
            mixer.__class__ = retyped(stock)
            rebind(mixer, stock, type(mixer))
        mixer.__dict__[MARK] = options
    for part in _stateful_models(model):
        if part.__dict__.pop(MARK, None) is not None:
            forbid_assistance(part)
        if not report.left and "_is_stateful" not in part.__dict__:
            allow_assistance(part)
            part.__dict__[MARK] = options
    return report


def unpatch(model: nn.Module) -> None:
    """Undo ``patch``: every module is what it was, adapters and hooks that came later included.

    A cache that the patched model has filled serves it no longer. A model that is not patched stays as it is.

    Raises:
        ValueError: it is no module.
    """
    _expect_module("hf.unpatch", model)
    for module in model.modules():
        if isinstance(module, ReplayMixer):
            replaying, stock = type(module), module.stock
            module.__class__ = stock
            rebind(module, replaying, stock)
            del module.__dict__[MARK]
    for part in _stateful_models(model):
        if part.__dict__.pop(MARK, None) is not None:
            forbid_assistance(part)


def _expect_module(where: str, model: object) -> None:
    expect(
        isinstance(model, nn.Module),
        f"{where}: model must be a module; got {type(model).__name__}. Pass the loaded model.",
    )


def _obstacle(module: nn.Module) -> str | None:
    """Why a module that is a known mixer, or derives from one, cannot replay; None if it can or is no mixer."""
    if known(module) is None:
        parents = [parent.__name__ for parent in type(module).__mro__[1:]]
        derived = next((name for name in parents if name in MIXERS), None)
        return None if derived is None else f"a class of its own derives from {derived}, and may compute something else"
    if module.activation not in ("silu", "swish"):
        return f"its activation is {module.activation}, where a replay layer has silu"
    if not reaches(module, type(module)):
        return "it has a forward of its own, which would hide that of the patch"
    return None


def _uncovered(model: nn.Module, report: Report) -> dict[str, str]:
    """Names of what keeps a recurrent state, by the configs of the models, and is not in the report yet."""
    reported = {*report.replaced, *report.left}
    named = dict(model.named_modules())
    left = {}
    for prefix, part in _outermost_models(model):
        types = getattr(part.config.get_text_config(decoder=True), "layer_types", None) or []
        covered = {named[name].layer_idx for name in reported if name.startswith(prefix)}
        for index, layer_type in enumerate(types):
            entry = DYNAMIC_LAYER_TYPE_MAPPING.get(layer_type)
            if entry is None or not issubclass(entry, LinearAttentionCacheLayerMixin) or index in covered:
                continue
            if layer_type in STATELESS:
                left[prefix or type(part).__name__] = (
                    f"this release of transformers cannot roll back the cache entry of its {layer_type} blocks, so "
                    "assisted generation stays refused; a later one can"
                )
            else:
                name = _innermost(named, prefix, index)
                left[name] = f"{type(named[name]).__name__} is none of the mixers that can replay"
    return left


def _innermost(named: dict[str, nn.Module], prefix: str, index: int) -> str:
    """The name of what layer ``index`` keeps its state in: the deepest module that says it is that layer."""
    inside = {name: module for name, module in named.items() if name.startswith(prefix)}
    own = [name for name, module in inside.items() if module.__dict__.get("layer_idx") == index]
    blocks = [name for name in inside if name.endswith(f"layers.{index}")]
    return max(own or blocks or [prefix], key=lambda name: name.count("."))


def _outermost_models(model: nn.Module) -> Iterator[tuple[str, PreTrainedModel]]:
    """Models of transformers that are not inside another one, with their names."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, PreTrainedModel) and not inside:
            found.append(name)
            yield name, module


def _stateful_models(model: nn.Module) -> Iterator[PreTrainedModel]:
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and type(module)._is_stateful:
            yield module
