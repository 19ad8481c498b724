"""The content of a hybrid model's config.json: what may stand in it, checked before anything is built."""

import inspect
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin

import torch

from replayssm import ReplayGatedDeltaNet, ReplayKDA, ReplayLayer, ReplayMamba2
from replayssm.checks import expect, expect_choice, expect_positive
from replayssm.models.attention import Attention
from replayssm.models.mla import LatentAttention
from replayssm.models.mlp import MLP
from replayssm.models.moe import MoE

MODEL_TYPE = "replayssm_hybrid"
Mixer: TypeAlias = ReplayLayer | Attention | LatentAttention | MLP | MoE
MIXERS: dict[str, Callable[..., Mixer]] = {
    "mamba2": ReplayMamba2,
    "gated_deltanet": ReplayGatedDeltaNet,
    "kda": ReplayKDA,
    "attention": Attention,
    "mla": LatentAttention,
    "mlp": MLP,
    "moe": MoE,
}
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_REQUIRED = ("model_type", "vocab_size", "d_model", "tie_embeddings", "norm_eps", "layers")
_FLAGS = ("norm_plus_one", "residual_fp32")  # false unless given
_FACTORS = ("embed_scale", "residual_scale", "logits_divisor")  # 1 unless given
_OPTIONAL = ("tokenizer", "dtype", "used_vocab_size", "mtp", *_FLAGS, *_FACTORS, "source")
_BY_THE_MODEL = ("d_model", "device", "dtype")  # constructor arguments that no entry of layers gives


def check_config(config: dict[str, Any]) -> None:
    """Refuse a config that is not understood to the last key: an ignored switch is a wrong model.

    Raises:
        ValueError: names the key, where it stands, and what may stand there.
    """
    expect(
        isinstance(config, dict),
        f"HybridLM: config must be a dict; got {type(config).__name__}. Give the content of config.json.",
    )
    if "model_type" in config:  # first, as the keys of another family say nothing
        expect_choice("HybridLM", "model_type", config["model_type"], (MODEL_TYPE,))
    _check_keys("config", config, _REQUIRED, _REQUIRED + _OPTIONAL)
    expect_positive("HybridLM", vocab_size=config["vocab_size"], d_model=config["d_model"])
    tie, eps, layers = config["tie_embeddings"], config["norm_eps"], config["layers"]
    expect(isinstance(tie, bool), f"HybridLM: tie_embeddings must be true or false; got {tie!r}. Write one of them.")
    expect(
        isinstance(eps, int | float) and not isinstance(eps, bool) and eps > 0,
        f"HybridLM: norm_eps must be a positive number; got {eps!r}. 1e-5 is usual.",
    )
    for name in _FLAGS:
        flag = config.get(name, False)
        expect(isinstance(flag, bool), f"HybridLM: {name} must be true or false; got {flag!r}. Write one of them.")
    for name in _FACTORS:
        factor = config.get(name, 1)
        expect(
            isinstance(factor, int | float) and not isinstance(factor, bool) and factor > 0,
            f"HybridLM: {name} must be a positive number; got {factor!r}. Leave it out for 1.",
        )
    if "used_vocab_size" in config:
        used = config["used_vocab_size"]
        expect_positive("HybridLM", used_vocab_size=used)
        expect(
            used <= config["vocab_size"],
            f"HybridLM: used_vocab_size must be at most vocab_size={config['vocab_size']}; got {used}. It leaves out "
            "rows of the embedding that only pad it.",
        )
    if "source" in config:
        expect(
            isinstance(config["source"], dict)
            and config["source"].keys() == {"config", "layout"}
            and all(isinstance(part, dict) for part in config["source"].values()),
            f"HybridLM: source must be a dict of config and layout, both dicts; got {config['source']!r:.80}. It is "
            "written by loading a checkpoint of another library: leave it out otherwise.",
        )
    if "dtype" in config:
        expect_choice("HybridLM", "dtype", config["dtype"], tuple(DTYPES))
    if "tokenizer" in config:
        expect_choice("HybridLM", "tokenizer", config["tokenizer"], ("bytes",))
        expect(
            config["vocab_size"] >= 256,
            f"HybridLM: vocab_size must be at least 256 for the bytes tokenizer; got {config['vocab_size']}. Widen it.",
        )
    _check_blocks("layers", layers)
    if "mtp" in config:
        _check_blocks("mtp", config["mtp"])


def _check_blocks(where: str, layers: object) -> None:
    """Refuse a list of blocks that is not understood to the last key."""
    if not isinstance(layers, list) or not layers:
        raise ValueError(
            f"HybridLM: {where} must be a list with at least one entry; got {layers!r}. Describe each block by a dict."
        )
    for i, entry in enumerate(layers):
        known = isinstance(entry, dict) and isinstance(entry.get("type"), str) and entry["type"] in MIXERS
        expect(
            known,
            f'HybridLM: {where}[{i}] must be a dict with "type" one of {", ".join(MIXERS)}; got {entry!r}. Choose one.',
        )
        parameters = inspect.signature(MIXERS[entry["type"]]).parameters
        allowed = ["type", *(name for name in parameters if name not in _BY_THE_MODEL)]
        required = ["type", *(name for name in allowed[1:] if parameters[name].default is inspect.Parameter.empty)]
        what = f"{where}[{i}] ({entry['type']})"
        _check_keys(what, entry, required, allowed)
        for name in entry.keys() - {"type"}:
            hint = parameters[name].annotation
            expect(
                _fits(entry[name], hint),
                f"HybridLM: {what}: {name} must be {inspect.formatannotation(hint)}; got {entry[name]!r}. Correct the "
                "config.",
            )


def _check_keys(what: str, given: dict[str, Any], required: Sequence[str], allowed: Sequence[str]) -> None:
    unknown = [key for key in given if key not in allowed]
    missing = [key for key in required if key not in given]
    faults = [f"unknown key {key!r}" for key in unknown] + [f"no {key!r}" for key in missing]
    expect(
        not faults,
        f"HybridLM: {what} must have the keys {', '.join(required)} and may have "
        f"{', '.join(key for key in allowed if key not in required)}; got {', '.join(faults)}. Nothing is ignored: "
        "remove what is unknown, add what is missing.",
    )


def _fits(value: object, hint: Any) -> bool:
    """Whether a value out of a JSON file is one of a constructor argument's annotated type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, choice) for choice in inner)
    if origin is Literal:
        return value in inner
    if origin in (tuple, Sequence):
        return isinstance(value, list | tuple) and all(_fits(item, inner[0]) for item in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float) if hint is float else isinstance(value, hint)
