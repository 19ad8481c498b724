"""Where models come from: a folder's config and weights, read without running anything that lies in it.

A model is ``config.json`` beside ``model.safetensors``. Pickled weights are never opened.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from replayssm.checks import expect

CONFIG, WEIGHTS, MTP = "config.json", "model.safetensors", "mtp.safetensors"
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def find_folder(where: str, name: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder that a model's name stands for.

    Raises:
        NotImplementedError: a name of the Hugging Face Hub.
        FileNotFoundError, ValueError: no folder; or a revision, which only Hub names have.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        expect(
            revision is None,
            f"{where}: revision must be None for a folder; got {revision!r}. A folder has one version: leave it out.",
        )
        return folder
    expect(
        not folder.exists(),
        f"{where}: name must be a folder; got the file {folder}. Give the folder that holds {CONFIG} and {WEIGHTS}.",
    )
    if _HUB_NAME.fullmatch(str(name)):
        raise NotImplementedError(
            f"{where}: name must be a folder, since Hub names are not supported yet; got {str(name)!r}, and no folder "
            'has this name here. Give the path of a folder, or "tiny" for the bundled model.'
        )
    raise FileNotFoundError(f"{where}: name must be a folder; got {str(name)!r}, which does not exist. Check the path.")


def read_config(where: str, folder: Path) -> dict[str, Any]:
    """The content of the folder's config.json.

    Raises:
        FileNotFoundError, ValueError: it is missing, or no JSON object.
    """
    path = _existing(where, folder, CONFIG)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: {path} must be JSON; got {error}. Restore or correct the file.") from error
    expect(
        isinstance(config, dict),
        f"{where}: {path} must be a JSON object; got {type(config).__name__}. Restore or correct the file.",
    )
    return config


def describe_weights(where: str, folder: Path, name: str = WEIGHTS) -> dict[str, Tensor]:
    """Shape and dtype of every tensor of a file of the folder, as tensors on meta; reads the file's header only.

    Raises:
        FileNotFoundError, ValueError: the file is missing, corrupt or cut short.
    """
    path = _existing(where, folder, name)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
            entries = {key: (part.get_shape(), part.get_dtype()) for key, part in slices.items()}
    except SafetensorError as error:
        raise ValueError(
            f"{where}: {path} must be a complete safetensors file; got {error}. It is corrupt or cut short: copy or "
            "download it again."
        ) from error
    unknown = sorted({dtype for _, dtype in entries.values()} - _DTYPES.keys())
    expect(
        not unknown,
        f"{where}: {path} must hold tensors of {', '.join(_DTYPES)}; got {', '.join(unknown)}. Convert them first.",
    )
    return {key: torch.empty(shape, dtype=_DTYPES[dtype], device="meta") for key, (shape, dtype) in entries.items()}


def read_weights(folder: Path, name: str = WEIGHTS) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a file, one at a time; a tensor shares the file's memory until it is copied."""
    with safe_open(folder / name, framework="pt", device="cpu") as file:
        for key in file.keys():  # noqa: SIM118 (not a dict)
            yield key, file.get_tensor(key)


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], head: Mapping[str, Tensor] | None = None
) -> None:
    """Write config.json, model.safetensors and, for a model with a head for drafts, mtp.safetensors.

    An interrupted write leaves the files that were there. A head of other weights does not stay.
    """
    text = json.dumps(dict(config), indent=2) + "\n"
    weights = {WEIGHTS: _on_the_host(tensors)} | ({} if head is None else {MTP: _on_the_host(head)})
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:  # one for each of two writers
        config_path = Path(partial, CONFIG)
        config_path.write_text(text, encoding="utf-8")
        paths = [config_path]
        for name, content in weights.items():
            paths.append(Path(partial, name))
            save_file(content, paths[-1], metadata={"format": "pt"})
            shutil.copymode(config_path, paths[-1])  # save_file lets nobody but the owner read
        for path in reversed(paths):
            path.replace(folder / path.name)
    if head is None:
        (folder / MTP).unlink(missing_ok=True)


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file, in a folder that is made if need be; interrupted it leaves what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=path.parent) as partial:
        written = Path(partial, path.name)
        written.touch()
        mode = written.stat().st_mode
        save_file(_on_the_host(tensors), written, metadata={"format": "pt"})
        written.chmod(mode)  # save_file lets nobody but the owner read
        written.replace(path)


def _on_the_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}


def _existing(where: str, folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise FileNotFoundError(
            f"{where}: {path} must exist; got a folder that holds {found}. Give the folder of a model in safetensors "
            "form, as save_pretrained writes it."
        )
    return path
