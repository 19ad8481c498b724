"""Mamba-2 as the authors' own library writes it (state-spaces/mamba2-*): no model_type, a padded vocabulary."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from replayssm.models.config import MODEL_TYPE
from replayssm.models.fields import Fields
from replayssm.models.keys import Link, embeddings, mixer_keys, renamed

UNUSED: tuple[str, ...] = ()
_COMMON: dict[str, Any] = {
    "vocab_size": 50277,
    "ssm_cfg": {"layer": "Mamba2"},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 16,
    "tie_embeddings": True,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "mamba2-130m": {**_COMMON, "d_model": 768, "n_layer": 24},
    "mamba2-370m": {**_COMMON, "d_model": 1024, "n_layer": 48},
    "mamba2-2.7b": {**_COMMON, "d_model": 2560, "n_layer": 64},
}
EPS = 1e-5  # of every norm; no file says it
# How parameters were drawn, and which kernels ran.
SSM_HARMLESS = ["A_init_range", "conv_init", "dt_min", "dt_max", "dt_init_floor", "use_mem_eff_path"]


def read_config(source: Mapping[str, Any]) -> dict[str, Any]:
    field = Fields("state-spaces", source, ["fused_add_norm", "attn_cfg"])
    field.only("rms_norm", True)
    field.only("d_intermediate", 0)
    field.only("attn_layer_idx", [])
    d_model, vocab_size, multiple = field("d_model"), field("vocab_size"), field("pad_vocab_size_multiple", 8)
    config = {
        "model_type": MODEL_TYPE,
        "vocab_size": -(-vocab_size // multiple) * multiple,
        "used_vocab_size": vocab_size,
        "d_model": d_model,
        "tie_embeddings": field("tie_embeddings", True),
        "norm_eps": EPS,
        "residual_fp32": field("residual_in_fp32", True),
        **field.dtype(),
        "layers": [_block(field, field("ssm_cfg"), d_model)] * field("n_layer"),
    }
    field.done()
    return config


def read_layout(source: Mapping[str, Any], stored: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"head_stored": "lm_head.weight" in stored}


def links(source: Mapping[str, Any], layout: Mapping[str, Any]) -> Iterator[Link]:
    config = read_config(source)
    yield from embeddings("backbone.embedding.weight", tied=config["tie_embeddings"], head_stored=layout["head_stored"])
    names = ["norm.weight", *(f"mixer.{name}" for name in mixer_keys(config["d_model"], config["layers"][0]))]
    for i in range(len(config["layers"])):
        yield from renamed(f"layers.{i}.", f"backbone.layers.{i}.", names)
    yield Link(("norm.weight",), ("backbone.norm_f.weight",))


def _block(model: Fields, ssm_cfg: Mapping[str, Any], d_model: int) -> dict[str, Any]:
    field = Fields("state-spaces, ssm_cfg", ssm_cfg, SSM_HARMLESS)
    if field("layer", "Mamba1") != "Mamba2":
        raise NotImplementedError(
            f'{model.where}: ssm_cfg must have "layer": "Mamba2"; got {dict(ssm_cfg)}, which is Mamba-1, another '
            "recurrence. Only Mamba-2 is supported."
        )
    for name, value in (("d_ssm", None), ("D_has_hdim", False), ("rmsnorm", True), ("norm_before_gate", False)):
        field.only(name, value)
    headdim = field("headdim", 64)
    block = {
        "type": "mamba2",
        "nheads": field("expand", 2) * d_model // headdim,
        "headdim": headdim,
        "d_state": field("d_state", 128),
        "ngroups": field("ngroups", 1),
        "d_conv": field("d_conv", 4),
        "bias": field("bias", False),
        "conv_bias": field("conv_bias", True),
        "norm_eps": EPS,
        "dt_limits": list(field("dt_limit", (0.0, float("inf")))),
    }
    field.done()
    return block
