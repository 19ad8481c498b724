"""Tiny models of every transformers family whose mixers replay, in fp64, with live gates and prompts for them."""

import importlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

LATEST = pytest.importorskip("transformers").__version__.startswith("5.24.")  # the oldest release is tested too
VOCAB = 61
PAD = 0
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "experts_implementation": "eager",  # the grouped one has no fp64
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
LINEAR = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
LATENT = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "dense"],
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}


@dataclass(frozen=True)
class Family:
    """A family: its folder in transformers, the classes of config and model, and what makes the config tiny."""

    folder: str
    prefix: str
    settings: dict[str, Any]
    mixers: int  # in a model of these settings
    config: str = "Config"
    model: str = "ForCausalLM"
    drop: tuple[str, ...] = ()  # of COMMON, what the config does not know
    vision: dict[str, Any] | None = None  # beside a text config of these settings

    def build_config(self, **changes: Any) -> Any:
        module = pytest.importorskip(f"transformers.models.{self.folder}.configuration_{self.folder}")
        settings = {name: value for name, value in COMMON.items() if name not in self.drop}
        settings |= self.settings | changes
        if self.vision is not None:
            settings = {"text_config": settings, "vision_config": self.vision, "experts_implementation": "eager"}
        return getattr(module, self.prefix + self.config)(**settings)

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
        """A causal language model in eval mode, the same for the same seed."""
        config = self.build_config(**changes)
        module = importlib.import_module(f"transformers.models.{self.folder}.modeling_{self.folder}")
        torch.manual_seed(seed)
        model = getattr(module, self.prefix + self.model)(config)
        for name, parameter in model.named_parameters():
            enliven(name, parameter.data)
        model.generation_config.pad_token_id = PAD
        return model.to(dtype).eval()


def enliven(name: str, parameter: Tensor) -> None:
    """Draw a parameter so that states matter: decays from fast to slow, projections that keep the scale."""
    leaf = name.rpartition(".")[2]
    if leaf == "A_log":
        parameter.uniform_(-2.0, 1.0)
    elif leaf == "dt_bias":
        parameter.uniform_(-2.0, 0.5)
    elif leaf == "D":
        parameter.normal_()
    elif leaf == "bias":
        parameter.normal_(std=0.3)
    elif "conv1d" in name:
        parameter.uniform_(-0.8, 0.8)
    elif parameter.ndim >= 2:
        parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)


FAMILIES = {
    "nemotron_h": Family(
        "nemotron_h",
        "NemotronH",
        {
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 8,
            "ssm_state_size": 5,
            "n_groups": 2,
            "chunk_size": 16,
            "head_dim": 8,
        },
        mixers=2,
    ),
    "mamba2": Family(
        "mamba2",
        "Mamba2",
        {"num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 5, "n_groups": 2, "chunk_size": 16}
        | {"expand": 2, "conv_kernel": 3},
        mixers=2,
        drop=("num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings"),
    ),
    "bamba": Family("bamba", "Bamba", {**MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]}, mixers=2),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        {**MAMBA, "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 2}
        | {"shared_intermediate_size": 24},
        mixers=2,
    ),
    "falcon_h1": Family(
        "falcon_h1",
        "FalconH1",
        {**MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 64, "ssm_multipliers": [0.5, 2.0, 0.25, 3.0, 0.7]}
        | {"ssm_in_multiplier": 1.5, "ssm_out_multiplier": 0.8, "head_dim": 8},
        mixers=2,
    ),
    "zamba2": Family(
        "zamba2",
        "Zamba2",
        {
            "num_hidden_layers": 5,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba"],
            "n_mamba_heads": 8,
            "mamba_d_state": 5,
            "mamba_ngroups": 2,
            "chunk_size": 16,
            "num_mem_blocks": 2,
            "num_key_value_heads": 4,
        },
        mixers=5,
    ),
    "qwen3_5": Family("qwen3_5", "Qwen3_5", LINEAR, mixers=2, config="TextConfig"),
    "qwen3_5_moe": Family(
        "qwen3_5_moe", "Qwen3_5Moe", {**LINEAR, **MOE}, mixers=2, config="TextConfig", drop=("intermediate_size",)
    ),
    "qwen3_next": Family("qwen3_next", "Qwen3Next", {**LINEAR, **MOE}, mixers=2),
    "olmo_hybrid": Family(
        "olmo_hybrid",
        "OlmoHybrid",
        {name: value for name, value in LINEAR.items() if name != "head_dim"},
        mixers=2,
    ),
    "lara_mini": Family(
        "lara_mini",
        "LaraMini",
        {**LINEAR, **MOE, "sliding_window": 8},
        mixers=2,
        drop=("intermediate_size",),
    ),
    "kimi_linear": Family(
        "kimi_linear",
        "KimiLinear",
        {**LATENT, "num_local_experts": 4, "linear_head_dim": 6, "linear_num_heads": 3},
        mixers=2,
    ),
    "glm5_next": Family(
        "glm5_next",
        "Glm5Next",
        {**LATENT, "n_routed_experts": 4, "linear_head_dim": 6, "linear_num_heads": 3, "linear_lower_bound": -3.0}
        | {"q_lora_rank": 12, "qk_rope_head_dim": 0, "index_topk": 512, "index_head_dim": 8, "index_n_heads": 2}
        | {"hc_mult": 2, "index_kpool": 4},
        mixers=2,
        model="ForConditionalGeneration",
        vision={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
        | {"projection_intermediate_size": 16, "image_size": 28, "patch_size": 14},
    ),
    "bailing_hybrid": Family(
        "bailing_hybrid",
        "BailingHybrid",
        {**LATENT, "num_local_experts": 4, "n_group": 2, "topk_group": 1, "head_dim": 6, "num_mtp_layers": 0},
        mixers=2,
    ),
}


def prompts(*lengths: int, seed: int = 1) -> dict[str, Tensor]:
    """Ids and mask (batch, longest), padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(1, VOCAB, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths).unsqueeze(1)
    return {"input_ids": ids.where(mask, PAD), "attention_mask": mask.long()}


def assert_same_tokens(got: Tensor, stock: Any, prompt: int, allowed: float) -> None:
    """Tokens of a greedy run against those of ``generate(..., return_dict_in_generate=True, output_logits=True)``.

    Rows may part where stock's two largest logits are closer than ``allowed``, an error in logits: a tie decides.
    """
    expected = stock.sequences
    assert got.shape == expected.shape, f"{tuple(got.shape)} tokens, expected {tuple(expected.shape)}"
    for row, differs in enumerate(got != expected):
        if differs.any():
            first = int(differs.nonzero()[0])
            top = stock.logits[first - prompt][row].topk(2).values
            margin = float(top[0] - top[1])
            assert margin <= allowed, f"row {row} parts at token {first}, where the margin is {margin:.2e}"
