"""Weights of a folder: one safetensors file or the shards of an index; headers first, then tensor by tensor."""

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from replayssm.checks import expect
from replayssm.hub.folders import Folder, read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
DTYPES = {
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


class Weights:
    """The tensors of a folder; what is wrong with its files is found, and listed, before the first one is read.

    Args:
        folder: of a repository of the Hub, only the files that hold wanted tensors are fetched.
        name: of the file, in whose place shards and an index will do.
        wanted: whether a key matters; None is all. Files without such keys are not opened.

    Attributes:
        entries: key -> shape and dtype of each wanted tensor, on meta.

    Raises:
        FileNotFoundError: the folder holds no such weights.
        ValueError: a file is missing, cut short, corrupt or outside the folder, or does not hold what the index says.
    """

    def __init__(self, where: str, folder: Folder, name: str = WEIGHTS, *, wanted: Callable[[str], bool] | None = None):
        self._folder, self._wanted = folder, wanted
        self.entries: dict[str, Tensor] = {}
        self._files: dict[str, Path] = {}
        self._open: tuple[Path, Any] | None = None
        self._faults: list[str] = []
        path = folder.fetch(name)
        if path is not None:
            self._add_header(path, path.name, {})
            remedy = "It is corrupt or cut short: copy or download it again."
            if any("tensors of" in fault for fault in self._faults):
                remedy = f"Convert them to one of {', '.join(DTYPES)} first."
            rule = "be a complete safetensors file"
        else:
            path = folder.fetch(f"{name}.index.json")
            if path is None:
                raise FileNotFoundError(_missing(where, folder, name))
            self._read_index(where, path)
            rule, remedy = "name complete safetensors files beside it", "Copy or download the files again."
        expect(not self._faults, f"{where}: {path} must {rule}; got {'; '.join(self._faults)}. {remedy}")

    def read(self, key: str) -> Tensor:
        """A tensor on the CPU, in the file's dtype; it may share the file's memory, so copy what you keep."""
        path = self._files[key]
        if self._open is None or self._open[0] != path:
            self.close()
            self._open = (path, safe_open(path, framework="pt", device="cpu").__enter__())
        return self._open[1].get_tensor(key)

    def file_of(self, key: str) -> Path:
        """Where a tensor lies; reading those of one file together opens it once."""
        return self._files[key]

    def close(self) -> None:
        """Let go of the file that was read last."""
        if self._open is not None:
            self._open[1].__exit__(None, None, None)
            self._open = None

    def nbytes(self) -> int:
        """Bytes of all tensors in ``entries``."""
        return sum(entry.nbytes for entry in self.entries.values())

    def _read_index(self, where: str, path: Path) -> None:
        files = files_of(where, path)
        wanted = {key: file for key, file in files.items() if self._wanted is None or self._wanted(key)}
        for name in sorted(set(wanted.values())):
            shard = self._shard(name)
            if shard is not None and self._add_header(shard, name, files):
                own = [key for key, file in wanted.items() if file == name]
                self._faults += [f"no {key} in {name}" for key in own if self._files.get(key) != shard]

    def _shard(self, name: str) -> Path | None:
        """The path of a file that an index names, which must be a file of the folder."""
        pure = PurePosixPath(name)
        path = None
        if not pure.is_absolute() and ".." not in pure.parts and "\\" not in name and ":" not in name:
            path = self._folder.fetch(name)
            if path is None:
                self._faults.append(f"no {name}")
                return None
        if path is None or not path.resolve().is_relative_to(self._root()):
            self._faults.append(f"{name}, which lies outside the folder")
            return None
        return path

    def _root(self) -> Path:
        """What a link may lead to: a snapshot in the Hub's cache holds links to files of the repository beside it."""
        path = self._folder.path.absolute()
        return (path.parent.parent if path.parent.name == "snapshots" else path).resolve()

    def _add_header(self, path: Path, name: str, files: dict[str, str]) -> bool:
        """Take shapes and dtypes of a file, unless it is broken; ``files``: where the index says that each key lies."""
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
                entries = {key: (part.get_shape(), part.get_dtype()) for key, part in slices.items()}
        except SafetensorError as error:
            self._faults.append(f"{name}: {error}")
            return False
        for key, (shape, dtype) in entries.items():
            if files and files.get(key) != name:
                where = f"lies in {files[key]}" if key in files else "does not exist"
                self._faults.append(f"{key} in {name}, which {where} by the index")
            elif self._wanted is not None and not self._wanted(key):
                continue
            elif dtype not in DTYPES:
                self._faults.append(f"{key}, one of the tensors of type {dtype}")
            else:
                self.entries[key] = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
                self._files[key] = path
        return True


def files_of(where: str, index: Path) -> dict[str, str]:
    """The file of each tensor, by an index.

    Raises:
        ValueError: the index does not say.
    """
    files: Any = read_json(where, index).get("weight_map")
    expect(
        isinstance(files, dict) and all(isinstance(file, str) for file in files.values()),
        f"{where}: {index} must hold weight_map, the file of each tensor; got {files!r:.80}. Restore the file.",
    )
    return files


def _missing(where: str, folder: Folder, name: str) -> str:
    pickled = next((pickle for pickle in PICKLES if folder.holds(pickle)), None) if name == WEIGHTS else None
    if pickled is not None:
        return (
            f"{where}: {folder.path / name} must exist; got {pickled}, a pickle, which could run code and is "
            "not opened here. Make safetensors of it once: replayssm convert SOURCE TARGET --to replayssm"
        )
    return (
        f"{where}: {folder.path / name} must exist; got a folder that holds {folder.listed()}. Give the folder of a "
        "model in safetensors form, as save_pretrained writes it."
    )
