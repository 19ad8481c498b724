"""Models of transformers with random weights, what they run on, and their ``generate``. Needs transformers."""

import contextlib
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from replayssm import hf
from replayssm.hf.cores import Core
from replayssm.hf.mixer import MIXERS, ReplayMixer, core_of
from replayssm.layers.gates import reset_decay

NAMES_OF_DTYPES = ("dtype", "torch_dtype")  # fields of published configs; the caller says which dtype


def build(settings: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """A causal language model in eval mode, its weights drawn on the device.

    Weights are drawn as transformers draws them, but for decays, step sizes and convolutions, which are the Mamba-2
    reference code's: with transformers' own a state would be forgotten within a token, or hardly be written at all.

    Args:
        settings: fields of its config, with the model type.
    """
    fields = {name: value for name, value in settings.items() if name not in NAMES_OF_DTYPES}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for mixer in mixers(model):
        reset_decay(mixer.A_log, mixer.dt_bias)
        mixer.conv1d.reset_parameters()
    return model


def mixers(model: Any) -> list[Any]:
    """The modules with a recurrent state, patched or not."""
    return [module for module in model.modules() if isinstance(module, ReplayMixer) or type(module).__name__ in MIXERS]


@contextlib.contextmanager
def patched(model: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """Let the model decode by replay meanwhile.

    Args:
        options: of ``hf.patch``.

    Raises:
        RuntimeError: not every mixer replays.
    """
    report = hf.patch(model, **options)
    try:
        if len(report.replaced) != len(mixers(model)):
            raise RuntimeError(
                f"bench hf: every mixer must replay, {len(mixers(model))} of them; got {report}. "
                "Compare with a release of transformers that the patch fits."
            )
        yield
    finally:
        hf.unpatch(model)


def fast_kernels(model: Any) -> dict[str, str]:
    """Functions that an unpatched model's mixers call, and for which transformers found a package -> the package."""
    found = {}
    for name, function in vars(_modeling(model)).items():
        if isinstance(function, types.FunctionType):
            chosen = inspect.getclosurevars(function).nonlocals
            if chosen.get("is_new_implementation", False):
                found[name] = chosen["implementation"].__module__.partition(".")[0]
    return found


def core(model: Any) -> Core:
    """The replay layer inside one of the model's mixers, patched or not."""
    mixer = mixers(model)[0]
    return core_of(mixer)(mixer, torch.empty(0, dtype=model.dtype, device=model.device))


@contextlib.contextmanager
def torch_path(model: Any) -> Iterator[None]:
    """Let an unpatched model run the plain PyTorch of transformers meanwhile, whatever packages it found."""
    module = _modeling(model)
    chosen = {name: vars(module)[name] for name in fast_kernels(model)}
    vars(module).update({name: inspect.unwrap(function) for name, function in chosen.items()})
    try:
        yield
    finally:
        vars(module).update(chosen)


def prompts(model: Any, batch: int, tokens: int, seed: int = 0) -> Tensor:
    """(batch, tokens) random ids, on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, model.config.vocab_size, (batch, tokens), generator=generator)
    return ids.to(model.device)


def greedy(model: Any, ids: Tensor, new_tokens: int, watch: LogitsProcessor, **options: Any) -> Any:
    """``model.generate``, greedy, from (batch, tokens) ids to a fixed length.

    Args:
        watch: is given the ids so far and the next logits, and returns logits.
        options: further arguments of ``generate``.
    """
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        logits_processor=LogitsProcessorList([watch]),
        **options,
    )


def _modeling(model: Any) -> types.ModuleType:
    """The file in which transformers defines the mixers."""
    return sys.modules[type(mixers(model)[0]).__module__]
