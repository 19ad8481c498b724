"""Whole models: compose one from a config, or load a pretrained one."""

import os

import torch

from replayssm import hub
from replayssm.models.attention import Attention
from replayssm.models.convert import convert
from replayssm.models.hybrid import HybridLM
from replayssm.models.loading import bundled
from replayssm.models.mla import LatentAttention
from replayssm.models.mlp import MLP
from replayssm.models.moe import MoE
from replayssm.models.tokenizer import ByteTokenizer
from replayssm.models.tokenizer_file import TOKENIZER, FileTokenizer, ends

__all__ = [
    "MLP",
    "Attention",
    "ByteTokenizer",
    "FileTokenizer",
    "HybridLM",
    "LatentAttention",
    "MoE",
    "convert",
    "from_pretrained",
]


def from_pretrained(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[HybridLM, ByteTokenizer | FileTokenizer | None]:
    """A pretrained model in eval mode, and its tokenizer.

    Args:
        name: a folder that ``save_pretrained`` or transformers wrote, "org/name" of a repository of the Hub, or "tiny",
            the bundled byte-level model ("./tiny" is a folder).
        revision: of a repository; None for a folder.
        device: where the weights go; None is the CPU.
        dtype: to compute in; None is what the config says, else the file. A_log, dt_bias, D and norm weights keep the
            precision of the file where it is higher.

    Returns:
        The model and its tokenizer, or None where there is none. That of a tokenizer.json needs the extra
        ``tokenizers`` at its first use.

    Raises:
        FileNotFoundError, ValueError: the folder holds no complete model, or there is no such repository.
        NotImplementedError: a family, or a setting of one, that is not known.
    """
    where = "HybridLM.from_pretrained"
    place = hub.find_folder(where, bundled(name), revision)
    model = HybridLM.from_place(place, device=device, dtype=dtype)
    if model.config.get("tokenizer") == "bytes":
        return model, ByteTokenizer()
    file = place.fetch(TOKENIZER)
    return model, None if file is None else FileTokenizer(file, eos=ends(where, place, model.config))
