"""What the families of Qwen's hybrids share: the fields of their configs and the order of their layers."""

from typing import Any

from replayssm.checks import expect
from replayssm.models.config import MODEL_TYPE
from replayssm.models.fields import Fields, rotary

LINEAR, FULL = "linear_attention", "full_attention"


def model_config(field: Fields) -> dict[str, Any]:
    """The config of a ``HybridLM``, its layers excepted."""
    field.only("hidden_act", "silu")
    return {
        "model_type": MODEL_TYPE,
        "vocab_size": field("vocab_size"),
        "d_model": field("hidden_size"),
        "tie_embeddings": field("tie_word_embeddings", False),
        "norm_eps": field("rms_norm_eps", 1e-6),
        "norm_plus_one": True,
        **field.dtype(),
    }


def kinds_of_mixer(field: Fields) -> dict[str, dict[str, Any]]:
    """The first block of a decoder layer of each kind."""
    eps = field("rms_norm_eps", 1e-6)
    headdim = field("head_dim", 256)
    field.only("attn_output_gate", True)
    return {
        LINEAR: {
            "type": "gated_deltanet",
            "nheads": field("linear_num_value_heads", 32),
            "headdim": field("linear_value_head_dim", 128),
            "d_state": field("linear_key_head_dim", 128),
            "ngroups": field.number("linear_num_key_heads", 16),
            "d_conv": field("linear_conv_kernel_dim", 4),
            "norm_eps": eps,
        },
        FULL: {
            "type": "attention",
            "nheads": field("num_attention_heads"),
            "headdim": headdim,
            "kv_heads": field("num_key_value_heads"),
            **rotary(field, headdim, share=0.25),
            "gated": True,
            "qk_norm": True,
            "norm_eps": eps,
            "bias": field("attention_bias", False),
        },
    }


def mixture(field: Fields) -> dict[str, Any]:
    """A mixture of experts, but for whether weights are normalised."""
    return {
        "type": "moe",
        "hidden": field("moe_intermediate_size"),
        "num_experts": field("num_experts"),
        "top_k": field("num_experts_per_tok"),
        "shared_hidden": field("shared_expert_intermediate_size"),
        "shared_gate": True,
    }


def layer_types(field: Fields) -> list[str]:
    """The kind of each decoder layer."""
    number, interval = field("num_hidden_layers"), field("full_attention_interval", 4)
    kinds = field("layer_types", None)
    if kinds is None:
        return [LINEAR if (i + 1) % interval else FULL for i in range(number)]
    expect(
        len(kinds) == number and set(kinds) <= {LINEAR, FULL},
        f"{field.where}: layer_types must be {number} of {LINEAR}, {FULL}, as num_hidden_layers says; got {kinds}. Use "
        "the config.json that came with the weights.",
    )
    return kinds
