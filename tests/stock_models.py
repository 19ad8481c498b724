"""Tiny models of transformers itself, every parameter re-drawn: what a family is compared with."""

import importlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from draws import draw
from torch import Tensor, nn

VOCAB = 61


@dataclass(frozen=True)
class Stock:
    """A model of transformers: where its classes are, and what makes it tiny.

    Attributes:
        family: the folder of transformers.
        config, model: its classes.
        settings: of the config.
        exact: changes of the settings for fp64 that transformers would otherwise leave.
    """

    family: str
    config: str
    model: str
    settings: dict[str, Any]
    exact: dict[str, Any] = field(default_factory=dict)

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float32, **changed: Any) -> nn.Module:
        """The model, in eval mode, with numbers that no initialisation would give."""
        # imported here, so that collecting the tests stays fast; an older transformers lacks some families
        module = f"transformers.models.{self.family}"
        pytest.importorskip(module)
        configs = importlib.import_module(f"{module}.configuration_{self.family}")
        models = importlib.import_module(f"{module}.modeling_{self.family}")
        vocabulary = {} if "text_config" in self.settings else {"vocab_size": VOCAB}
        settings = {**vocabulary, **self.settings, **(self.exact if dtype == torch.float64 else {}), **changed}
        model = getattr(models, self.model)(getattr(configs, self.config)(**settings))
        model.generation_config.eos_token_id = None
        with torch.no_grad():
            oracles.redraw(model, seed)
            for name, parameter in model.named_parameters():
                if parameter.ndim == 3 and "conv1d" not in name:  # experts: as the other projections
                    parameter.mul_(1.5 / math.sqrt(parameter.shape[-1]))
            for i, (name, buffer) in enumerate(model.named_buffers()):
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(draw(seed + i, *buffer.shape))
            model.get_input_embeddings().weight.copy_(draw(seed, *model.get_input_embeddings().weight.shape))
        model.set_experts_implementation("eager")  # the other one has no fp64
        return model.to(dtype).eval()

    def write(self, folder: Path, seed: int = 0, **changed: Any) -> nn.Module:
        """The model, and its folder as transformers writes it."""
        model = self.build(seed, **changed)
        model.save_pretrained(folder)
        return model


MAMBA = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 7,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
QWEN = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 5,
}
QWEN_MIXTURE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 5,
    "shared_expert_intermediate_size": 7,
}
STOCK = {
    "mamba2": Stock(
        "mamba2",
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "num_heads": 6,
            "head_dim": 8,
            "state_size": 7,
            "n_groups": 2,
            "chunk_size": 16,
        },
        {"residual_in_fp32": False},
    ),
    "mamba2 tied": Stock(
        "mamba2",
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_heads": 3,
            "head_dim": 16,
            "state_size": 7,
            "n_groups": 1,
            "chunk_size": 16,
            "conv_kernel": 3,
            "use_conv_bias": False,
            "use_bias": True,
            "tie_word_embeddings": True,
            "layer_norm_epsilon": 1e-2,
            "time_step_limit": (0.4, 0.9),
        },
        {"residual_in_fp32": False},
    ),
    "nemotron_h": Stock(
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "hidden_size": 24,
            "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "intermediate_size": 20,
            "mamba_num_heads": 6,
            "mamba_head_dim": 5,
            "ssm_state_size": 7,
            "n_groups": 2,
            "chunk_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "moe_intermediate_size": 12,
            "moe_shared_expert_intermediate_size": 10,
        },
    ),
    "nemotron_h latent": Stock(
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "hidden_size": 24,
            "layers_block_type": ["mamba", "attention", "moe"],
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "mamba_num_heads": 3,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 16,
            "use_bias": True,
            "mlp_bias": True,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "moe_latent_size": 16,
            "moe_intermediate_size": 12,
            "moe_shared_expert_intermediate_size": 10,
            "time_step_min": 0.3,
        },
    ),
    "qwen3_5 text": Stock("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**QWEN, "intermediate_size": 31}),
    "qwen3_5": Stock(
        "qwen3_5",
        "Qwen3_5Config",
        "Qwen3_5ForConditionalGeneration",
        {
            "tie_word_embeddings": True,
            "text_config": {
                **QWEN,
                "vocab_size": VOCAB,
                "intermediate_size": 31,
                "linear_num_value_heads": 2,
                "linear_conv_kernel_dim": 3,
                "rms_norm_eps": 1e-3,
                "attention_bias": True,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 100.0,
                    "partial_rotary_factor": 0.75,
                    "mrope_section": [1, 1, 1],
                },
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 8,
                "num_heads": 2,
                "out_hidden_size": 24,
                "num_position_embeddings": 16,
                "patch_size": 4,
            },
        },
    ),
    "qwen3_5_moe text": Stock("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**QWEN, **QWEN_MIXTURE}),
    "qwen3_next": Stock(
        "qwen3_next",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**QWEN, **QWEN_MIXTURE, "intermediate_size": 31, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "granitemoehybrid": Stock(
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **MAMBA,
            "layer_types": ["mamba", "attention", "mamba"],
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 12,
            "shared_intermediate_size": 10,
        },
    ),
    "granitemoehybrid dense": Stock(
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **MAMBA,
            "layer_types": ["attention", "mamba", "mamba"],
            "position_embedding_type": "rope",
            "num_local_experts": 0,
            "shared_intermediate_size": 10,
            "tie_word_embeddings": True,
            "time_step_limit": (0.3, 0.9),
        },
    ),
    "bamba": Stock(
        "bamba", "BambaConfig", "BambaForCausalLM", {**MAMBA, "attn_layer_indices": [1], "intermediate_size": 20}
    ),
    "kimi_linear": Stock(
        "kimi_linear",
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "intermediate_size": 31,
            "moe_intermediate_size": 5,
            "v_head_dim": 5,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 3,
            "kv_lora_rank": 7,
            "num_experts": 6,
            "num_experts_per_token": 2,
            "num_shared_experts": 2,
            "num_expert_group": 3,
            "topk_group": 2,
            "linear_num_heads": 3,
            "linear_head_dim": 6,
            "linear_conv_kernel_dim": 3,
            "pad_token_id": None,
        },
    ),
}


@torch.no_grad()
def stock_logits(model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    return model(input_ids=ids, attention_mask=mask).logits


@torch.no_grad()
def stock_decoded(model: nn.Module, ids: Tensor, prompt: int) -> Tensor:
    """Logits of ids (batch, t): the first ``prompt`` at once, the rest one by one over transformers' own cache."""
    step = model(input_ids=ids[:, :prompt], use_cache=True)
    outputs = [step.logits]
    for place, column in enumerate(ids[:, prompt:].split(1, 1), prompt):
        cache = step.get("cache", step.get("past_key_values"))
        # Bamba would count positions from 0 again
        places = {"position_ids": torch.full_like(column, place)} if model.config.model_type == "bamba" else {}
        step = model(input_ids=column, cache=cache, use_cache=True, **places)
        outputs.append(step.logits)
    return torch.cat(outputs, 1)
