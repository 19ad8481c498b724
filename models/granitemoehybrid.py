"""The family ``granitemoehybrid`` (Granite 4.0 H): Mamba-2 and a little attention, MLPs or mixtures of experts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from replayssm.checks import expect
from replayssm.models.config import MODEL_TYPE
from replayssm.models.decoder import decoder_links, same_names
from replayssm.models.fields import Fields, rotary
from replayssm.models.keys import Link

UNUSED: tuple[str, ...] = ()
HARMLESS = ["init_method", "mamba_chunk_size"]  # how numbers were drawn; how a kernel cuts a sequence
KINDS = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}
_COMMON: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "num_hidden_layers": 40,
    "position_embedding_type": "nope",
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Granite-4.0-H-Micro": {
        **_COMMON,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_n_heads": 64,
        "shared_intermediate_size": 8192,
        "num_local_experts": 0,
    },
    "Granite-4.0-H-Tiny": {
        **_COMMON,
        "hidden_size": 1536,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "mamba_n_heads": 48,
        "shared_intermediate_size": 1024,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "intermediate_size": 512,
    },
    "Granite-4.0-H-Small": {
        **_COMMON,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_n_heads": 128,
        "shared_intermediate_size": 1536,
        "num_local_experts": 72,
        "num_experts_per_tok": 10,
        "intermediate_size": 768,
    },
}


class Halves:
    """Two tensors of ours, one over the other in theirs."""

    def ours(self, theirs: Sequence[Tensor]) -> Sequence[Tensor]:
        return theirs[0].chunk(2)

    def theirs(self, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.cat(list(ours))]


def read_config(source: Mapping[str, Any]) -> dict[str, Any]:
    field = Fields("granitemoehybrid", source, HARMLESS)
    field.only("hidden_act", "silu")
    field.only("normalization_function", "rmsnorm")
    eps = field("rms_norm_eps", 1e-6)
    mixers = {"mamba": mamba(field, eps), "attention": _attention(field)}
    feed_forward = _feed_forward(field)
    config = {
        "model_type": MODEL_TYPE,
        "vocab_size": field("vocab_size"),
        "d_model": field("hidden_size"),
        "tie_embeddings": field("tie_word_embeddings", False),
        "norm_eps": eps,
        "embed_scale": field("embedding_multiplier", 1.0),
        "residual_scale": field("residual_multiplier", 1.0),
        "logits_divisor": field("logits_scaling", 1.0),
        **field.dtype(),
        "layers": [dict(block) for kind in _kinds(field) for block in (mixers[kind], feed_forward)],
    }
    field.done()
    return config


def read_layout(source: Mapping[str, Any], stored: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"head_stored": "lm_head.weight" in stored}


def links(source: Mapping[str, Any], layout: Mapping[str, Any]) -> Iterator[Link]:
    config = read_config(source)

    def mixer(block: Mapping[str, Any], ours: str, theirs: str) -> Iterator[Link]:
        part = "mamba" if block["type"] == "mamba2" else "self_attn"
        return same_names(config["d_model"], block, ours, f"{theirs}{part}.")

    def feed_forward(block: Mapping[str, Any], ours: str, theirs: str) -> Iterator[Link]:
        shared = ours
        if block["type"] == "moe":
            shared, mixture = f"{ours}shared_expert.", f"{theirs}block_sparse_moe."
            yield Link((f"{ours}gate.weight",), (f"{mixture}router.layer.weight",))
            yield Link((f"{ours}experts.gate_up_proj",), (f"{mixture}input_linear.weight",))
            yield Link((f"{ours}experts.down_proj",), (f"{mixture}output_linear.weight",))
        parts = (f"{shared}gate_proj.weight", f"{shared}up_proj.weight")
        yield Link(parts, (f"{theirs}shared_mlp.input_linear.weight",), Halves())
        yield Link((f"{shared}down_proj.weight",), (f"{theirs}shared_mlp.output_linear.weight",))

    return decoder_links(config, "model.", head_stored=layout["head_stored"], mixer=mixer, feed_forward=feed_forward)


def mamba(field: Fields, eps: float) -> dict[str, Any]:
    """The Mamba-2 block of the families that name its fields ``mamba_*``."""
    inner, nheads = field("mamba_expand", 2) * field("hidden_size"), field("mamba_n_heads")
    headdim = field("mamba_d_head", "auto")
    headdim = inner // nheads if headdim == "auto" else headdim
    expect(
        nheads * headdim == inner,
        f"{field.where}: mamba_n_heads * mamba_d_head must be mamba_expand * hidden_size = {inner}; got "
        f"{nheads * headdim}. Use the config.json that came with the weights.",
    )
    return {
        "type": "mamba2",
        "nheads": nheads,
        "headdim": headdim,
        "d_state": field("mamba_d_state", 256),
        "ngroups": field("mamba_n_groups", 1),
        "d_conv": field("mamba_d_conv", 4),
        "bias": field("mamba_proj_bias", False),
        "conv_bias": field("mamba_conv_bias", True),
        "norm_eps": eps,
        "dt_limits": list(field("time_step_limit", (0.0, float("inf")))),
    }


def _attention(field: Fields) -> dict[str, Any]:
    nheads = field("num_attention_heads")
    headdim, kv_heads = field("head_dim", field("hidden_size") // nheads), field("num_key_value_heads", None)
    positions = rotary(field, headdim)
    return {
        "type": "attention",
        "nheads": nheads,
        "headdim": headdim,
        "kv_heads": nheads if kv_heads is None else kv_heads,
        **(positions if field.only("position_embedding_type", None, "nope", "rope") == "rope" else {}),
        "scale": field("attention_multiplier", 1.0),
        "bias": field("attention_bias", False),
    }


def _feed_forward(field: Fields) -> dict[str, Any]:
    shared, experts = field.number("shared_intermediate_size", 1024), field("num_local_experts", 8)
    top_k, hidden = field("num_experts_per_tok", 2), field("intermediate_size", 11008)
    if experts == 0:
        return {"type": "mlp", "hidden": shared}
    return {"type": "moe", "hidden": hidden, "num_experts": experts, "top_k": top_k, "shared_hidden": shared}


def _kinds(field: Fields) -> list[str]:
    number = field("num_hidden_layers")
    names = field("layer_types", None) or field("layers_block_type", None) or ["mamba"] * number
    expect(
        len(names) == number and set(names) <= KINDS.keys(),
        f"{field.where}: layer_types must be {number} of {', '.join(KINDS)}, as num_hidden_layers says; got {names}. "
        "Use the config.json that came with the weights.",
    )
    return [KINDS[name] for name in names]
