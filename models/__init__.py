"""Whole models: compose one from a config, or load a pretrained one."""

import os
from pathlib import Path

import torch

from replayssm import hub
from replayssm.models.attention import Attention
from replayssm.models.hybrid import HybridLM
from replayssm.models.mla import LatentAttention
from replayssm.models.mlp import MLP
from replayssm.models.moe import MoE
from replayssm.models.tokenizer import ByteTokenizer

__all__ = ["MLP", "Attention", "ByteTokenizer", "HybridLM", "LatentAttention", "MoE", "from_pretrained"]

_BUNDLED = {"tiny": Path(__file__).parent / "tiny"}


def from_pretrained(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[HybridLM, ByteTokenizer | None]:
    """A pretrained model in eval mode, and its tokenizer.

    Args:
        name: a folder that ``save_pretrained`` wrote, or "tiny", the bundled byte-level model ("./tiny" is a folder).
        revision: of a Hub name; None for a folder.
        device: where the weights go; None is the CPU.
        dtype: to compute in; None is what the config says, else the file. A_log, dt_bias, D and norm weights keep the
            precision of the file where it is higher.

    Returns:
        The model and its tokenizer, or None where the config names none.

    Raises:
        NotImplementedError: Hub names are not supported yet.
        FileNotFoundError, ValueError: the folder holds no complete model of a known kind.
    """
    where = "HybridLM.from_pretrained"
    bundled = name in _BUNDLED and revision is None
    folder = _BUNDLED[str(name)] if bundled else hub.find_folder(where, name, revision)
    model = HybridLM.from_pretrained(folder, device=device, dtype=dtype)
    return model, ByteTokenizer() if model.config.get("tokenizer") == "bytes" else None
