"""The family ``mamba2``: Mamba-2 alone (arXiv 2405.21060), as transformers writes it."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from replayssm.checks import expect
from replayssm.models.config import MODEL_TYPE
from replayssm.models.fields import Fields
from replayssm.models.keys import Link, embeddings, mixer_keys, renamed

UNUSED: tuple[str, ...] = ()
PUBLISHED: dict[str, dict[str, Any]] = {
    "mamba-codestral-7B": {
        "model_type": "mamba2",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
    },
}
# time_step_*: how dt_bias was drawn; time_step_limit alone clamps. The family's code gates first whatever
# norm_before_gate says.
HARMLESS = ["norm_before_gate", "time_step_floor", "time_step_max", "time_step_min", "time_step_rank"]


def read_config(source: Mapping[str, Any]) -> dict[str, Any]:
    field = Fields("mamba2", source, HARMLESS)
    field.only("hidden_act", "silu")
    field.only("rms_norm", True)
    d_model, eps = field("hidden_size", 4096), field("layer_norm_epsilon", 1e-5)
    nheads, headdim = field("num_heads", 128), field("head_dim", 64)
    expand = field("expand", 2)
    expect(
        expand * d_model == nheads * headdim,
        f"{field.where}: num_heads * head_dim must be expand * hidden_size = {expand * d_model}; got "
        f"{nheads * headdim}. Use the config.json that came with the weights.",
    )
    block = {
        "type": "mamba2",
        "nheads": nheads,
        "headdim": headdim,
        "d_state": field("state_size", 128),
        "ngroups": field("n_groups", 8),
        "d_conv": field("conv_kernel", 4),
        "bias": field("use_bias", False),
        "conv_bias": field("use_conv_bias", True),
        "norm_eps": eps,
        "dt_limits": list(field("time_step_limit", (0.0, float("inf")))),
    }
    config = {
        "model_type": MODEL_TYPE,
        "vocab_size": field("vocab_size", 32768),
        "d_model": d_model,
        "tie_embeddings": field("tie_word_embeddings", False),
        "norm_eps": eps,
        "residual_fp32": field("residual_in_fp32", True),
        **field.dtype(),
        "layers": [block] * field("num_hidden_layers", 64),
    }
    field.done()
    return config


def read_layout(source: Mapping[str, Any], stored: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"head_stored": "lm_head.weight" in stored}


def links(source: Mapping[str, Any], layout: Mapping[str, Any]) -> Iterator[Link]:
    config = read_config(source)
    yield from embeddings(
        "backbone.embeddings.weight", tied=config["tie_embeddings"], head_stored=layout["head_stored"]
    )
    names = ["norm.weight", *(f"mixer.{name}" for name in mixer_keys(config["d_model"], config["layers"][0]))]
    for i in range(len(config["layers"])):
        yield from renamed(f"layers.{i}.", f"backbone.layers.{i}.", names)
    yield Link(("norm.weight",), ("backbone.norm_f.weight",))
