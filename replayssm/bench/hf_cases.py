"""What ``replayssm bench hf`` measures: published geometries as transformers takes them, and the ways to run them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replayssm.models import nemotron_h, qwen3_5

UNPATCHED, TORCH_PATH = "unpatched", "torch path"  # the second only where transformers found kernels for the first
PATCHES: dict[str, dict[str, str]] = {  # name -> what hf.patch is told; the window is its default, 16
    "replay": {},
    "replay_formats": {"checkpoint": "fp16_sr", "read_format": "int8"},
}
ALWAYS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}  # no text ends before its length


@dataclass(frozen=True)
class Geometry:
    """One model.

    Attributes:
        settings: the config's fields, with the model type.
        few: what changes for the check before the times: blocks of the published widths, but a few of them.
        small: what changes for a run without a GPU; weights that keep the scale of activations as the published widths
            do.
    """

    name: str
    settings: Mapping[str, Any]
    few: Mapping[str, Any]
    small: Mapping[str, Any]


def _text_of(outer: Mapping[str, Any]) -> dict[str, Any]:
    """The language model of a multimodal config."""
    return {**outer["text_config"], "tie_word_embeddings": outer["tie_word_embeddings"]}


GEOMETRIES = (
    Geometry(
        "Qwen3.5-4B",
        {**_text_of(qwen3_5.PUBLISHED["Qwen3.5-4B"]), **ALWAYS},
        few={"num_hidden_layers": 4, "vocab_size": 4096},
        small={
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "initializer_range": 0.125,
        },
    ),
    Geometry(
        "Nemotron-3-Nano-4B",
        {
            **nemotron_h.PUBLISHED["Nemotron-3-Nano-4B"],
            **ALWAYS,
            # Tokens that a scan multiplies at once, which moves results by rounding alone. Published are 256, for which
            # transformers 5.17 makes a product of 206 GB out of a batch of 64.
            "chunk_size": 64,
        },
        # A limit that clamps steps of the prompt and none behind it would show in the check as an error of replay's.
        few={"hybrid_override_pattern": "M-M*", "vocab_size": 4096, "time_step_min": 1e-9},
        small={
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 96,
            "hybrid_override_pattern": "M-M*",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "time_step_min": 1e-9,
            "initializer_range": 0.125,
        },
    ),
)
