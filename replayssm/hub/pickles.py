"""Pickled weights, for conversion only: read by torch's restricted unpickler, which builds tensors and runs no code."""

import pickle
from pathlib import Path

import torch
from torch import Tensor

from replayssm.checks import expect
from replayssm.hub.folders import Folder
from replayssm.hub.weights import PICKLES, files_of


class Pickles:
    """The tensors of pytorch_model.bin, or of the shards that its index names, mapped into memory and not copied.

    Attributes:
        entries: key -> shape and dtype of each tensor, on meta.

    Raises:
        FileNotFoundError: the folder holds no such file.
        ValueError: a file holds something else than tensors, or cannot be mapped.
    """

    def __init__(self, where: str, folder: Folder):
        single, index = (folder.fetch(name) for name in PICKLES)
        if single is not None:
            paths = [single]
        elif index is not None:
            names = sorted(set(files_of(where, index).values()))
            inside = [name for name in names if Path(name).name == name]
            expect(
                inside == names and len(names) > 0,
                f"{where}: {index} must name files beside it; got {', '.join(names) or 'none'}. Restore the file.",
            )
            found = {name: folder.fetch(name) for name in names}
            missing = [name for name, path in found.items() if path is None]
            expect(
                not missing, f"{where}: {index} must name files that exist; got {', '.join(missing)}. Download them."
            )
            paths = [path for path in found.values() if path is not None]
        else:
            raise FileNotFoundError(
                f"{where}: {folder.path} must hold model.safetensors or {PICKLES[0]}, or the index of "
                f"shards of either; got {folder.listed()}. Give the folder of a model."
            )
        self._tensors: dict[str, Tensor] = {}
        self._files: dict[str, Path] = {}
        for path in paths:
            tensors = _load(where, path)
            double = sorted(tensors.keys() & self._files.keys())
            expect(not double, f"{where}: {path} must hold tensors of its own; got {', '.join(double)}. Remove a copy.")
            self._tensors |= tensors
            self._files |= dict.fromkeys(tensors, path)
        self.entries = {key: torch.empty_like(tensor, device="meta") for key, tensor in self._tensors.items()}

    def read(self, key: str) -> Tensor:
        """A tensor in the file's dtype; it shares the file's memory."""
        return self._tensors[key]

    def file_of(self, key: str) -> Path:
        """Where a tensor lies."""
        return self._files[key]

    def close(self) -> None:
        """Files are let go with the last tensor."""


def _load(where: str, path: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{where}: {path} must be a file of torch.save that holds tensors and nothing else; got one that "
            f"torch.load does not read with weights_only=True and mmap=True, so nothing of it has run. It says: {said}"
        ) from error
    expect(
        isinstance(content, dict)
        and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items())
        and not any(value.is_quantized or value.is_meta for value in content.values()),
        f"{where}: {path} must hold a dict of tensors, neither quantised nor on meta; got {type(content).__name__}. "
        "Save the state dict of the model.",
    )
    return content
