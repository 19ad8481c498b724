"""The family ``qwen3_5``: Gated DeltaNet and gated attention, with MLPs or mixtures of experts (Qwen3.5, Qwen3.6).

Of a multimodal checkpoint the language model is loaded. Its positions are those of text, which are the same in all
three axes of mrope, so that the sections of mrope do not matter.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from replayssm.models.decoder import decoder_links, is_stacked, layout_of_parts, mixture_links, mtp_links, same_names
from replayssm.models.fields import Fields
from replayssm.models.keys import Link
from replayssm.models.qwen import FULL, kinds_of_mixer, layer_types, mixture, model_config

UNUSED: tuple[str, ...] = (r"model\.visual\.", r"visual\.", r"mtp\.")
# Of other modalities and of drafts; how another library stores the recurrent state; training.
HARMLESS = ["mamba_ssm_dtype", "mlp_only_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"]
OUTER_HARMLESS = ["image_token_id", "video_token_id", "vision_config", "vision_end_token_id", "vision_start_token_id"]
_TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-6,
    "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}
_MIXTURE = {**_TEXT, "model_type": "qwen3_5_moe_text", "num_experts": 256, "num_experts_per_tok": 8}


def _published(text: dict[str, Any], *, tied: bool = False) -> dict[str, Any]:
    outer = text["model_type"].removesuffix("_text")
    return {"model_type": outer, "tie_word_embeddings": tied, "text_config": text, "vision_config": {}}


PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3.5-4B": _published(
        {
            **_TEXT,
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 32,
        },
        tied=True,
    ),
    "Qwen3.5-27B": _published(
        {
            **_TEXT,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 48,
        }
    ),
    "Qwen3.5-35B-A3B": _published(
        {
            **_MIXTURE,
            "hidden_size": 2048,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 32,
        }
    ),
    "Qwen3.5-122B-A10B": _published(
        {
            **_MIXTURE,
            "hidden_size": 3072,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 64,
        }
    ),
}


def read_config(source: Mapping[str, Any]) -> dict[str, Any]:
    if "text_config" not in source:
        return _read_text(source)
    outer = Fields("qwen3_5", source, OUTER_HARMLESS)
    config = {**outer.dtype(), **_read_text(outer("text_config"))}
    config["tie_embeddings"] = outer("tie_word_embeddings", config["tie_embeddings"])
    outer.done()
    return config


def read_layout(source: Mapping[str, Any], stored: Mapping[str, Tensor]) -> dict[str, Any]:
    prefix = "model.language_model." if "text_config" in source else "model."
    for key in stored:
        found = re.match(r"((?:model\.|language_model\.)*)(?:layers|embed_tokens)\.", key)
        if found is not None:
            prefix = found[1]
    return {"prefix": prefix, **layout_of_parts(stored)}


def links(source: Mapping[str, Any], layout: Mapping[str, Any]) -> Iterator[Link]:
    config = read_config(source)
    d_model = config["d_model"]

    def mixer(block: Mapping[str, Any], ours: str, theirs: str) -> Iterator[Link]:
        part = "linear_attn" if block["type"] == "gated_deltanet" else "self_attn"
        return same_names(d_model, block, ours, f"{theirs}{part}.")

    def feed_forward(block: Mapping[str, Any], ours: str, theirs: str) -> Iterator[Link]:
        if block["type"] == "moe":
            return mixture_links(d_model, block, ours, f"{theirs}mlp.", stacked=is_stacked(layout, ours))
        return same_names(d_model, block, ours, f"{theirs}mlp.")

    root, head_stored = layout["prefix"], layout["head_stored"]
    yield from decoder_links(config, root, head_stored=head_stored, mixer=mixer, feed_forward=feed_forward)
    if layout["mtp"]:
        yield from mtp_links(config, mixer=mixer, feed_forward=feed_forward)


def _read_text(source: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the language model."""
    field = Fields("qwen3_5", source, HARMLESS)
    field.only("output_gate_type", "swish", "silu")
    config = model_config(field)
    if field("model_type") == "qwen3_5_moe_text":
        field.only("norm_topk_prob", True)
        feed_forward = mixture(field)
    else:
        feed_forward = {"type": "mlp", "hidden": field("intermediate_size")}
    mixers = kinds_of_mixer(field)
    config["layers"] = [dict(block) for kind in layer_types(field) for block in (mixers[kind], feed_forward)]
    config["mtp"] = [dict(mixers[FULL]), dict(feed_forward)]
    field.done()
    return config
