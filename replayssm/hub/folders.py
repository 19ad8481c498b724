"""A model's folder: one that lies here, or a repository of the Hub, whose files are fetched when they are asked for."""

import errno
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayssm.checks import expect

CONFIG = "config.json"
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Folder:
    """A folder of a model.

    Attributes:
        path: where it lies; for a repository of the Hub, its snapshot in the cache, which may not hold all files.
        repository: "org/name" of a repository, or None.
        revision: the commit of the snapshot; the whole model is of that one.
    """

    path: Path
    repository: str | None = None
    revision: str | None = None

    def fetch(self, name: str) -> Path | None:
        """The path of a file, downloaded if need be; None where there is no such file."""
        path = self.path / name
        if _is_file(path) or self.repository is None:
            return path if _is_file(path) else None
        return _download(self.repository, name, self.revision)

    def holds(self, name: str) -> bool:
        """Whether there is such a file; nothing is downloaded, and what cannot be asked counts as no."""
        if _is_file(self.path / name) or self.repository is None:
            return _is_file(self.path / name)
        from huggingface_hub import file_exists

        try:
            return file_exists(self.repository, name, revision=self.revision)
        except OSError:  # offline, or not reached
            return False

    def listed(self) -> str:
        """What lies here, for errors."""
        return ", ".join(sorted(entry.name for entry in self.path.iterdir())[:8]) or "nothing"


def find_folder(where: str, name: str | os.PathLike[str], revision: str | None = None) -> Folder:
    """The folder that a model's name stands for: a folder of this path, else a repository of the Hub.

    Of a repository only config.json is fetched. huggingface_hub's environment variables hold: its cache, its offline
    mode, its token.

    Raises:
        FileNotFoundError: no such folder or repository, or it cannot be reached.
        ValueError: a file; or a folder with a revision, which only repositories have.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        expect(
            revision is None,
            f"{where}: revision must be None for a folder; got {revision!r}. A folder has one version: leave it out.",
        )
        return Folder(path)
    expect(
        not path.exists(),
        f"{where}: name must be a folder; got the file {path}. Give the folder that holds {CONFIG} and "
        "model.safetensors.",
    )
    if not _HUB_NAME.fullmatch(str(name)):
        raise FileNotFoundError(
            f'{where}: name must be a folder, or "org/name" of a repository of the Hub; got {str(name)!r}, which does '
            "not exist. Check the path."
        )
    repository = str(name)
    try:
        config = _download(repository, CONFIG, revision)
    except (OSError, ValueError) as error:  # what huggingface_hub raises, and Python where there is no network
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise FileNotFoundError(
            f'{where}: name must be a folder, or "org/name" of a repository of the Hub that can be reached; got '
            f"{repository!r}{'' if revision is None else f' at revision {revision!r}'}. huggingface_hub says: {said}"
        ) from error
    if config is None:
        raise FileNotFoundError(
            f"{where}: {repository} must hold {CONFIG}; got a repository without, or one that is not in "
            "the cache while HF_HUB_OFFLINE is set. Check the name."
        )
    return Folder(config.parent, repository, config.parent.name)


def read_config(where: str, folder: Folder) -> dict[str, Any]:
    """The content of the folder's config.json.

    Raises:
        FileNotFoundError, ValueError: it is missing, or no JSON object.
    """
    path = folder.fetch(CONFIG)
    if path is None:
        raise FileNotFoundError(
            f"{where}: {folder.path / CONFIG} must exist; got a folder that holds {folder.listed()}. Give the "
            "folder of a model, as save_pretrained writes it."
        )
    return read_json(where, path)


def read_json(where: str, path: Path) -> dict[str, Any]:
    """The content of a file that holds a JSON object.

    Raises:
        ValueError: it does not.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no JSON, no text, a number or a nesting beyond what Python reads
        raise ValueError(f"{where}: {path} must be JSON; got {error}. Restore or correct the file.") from error
    expect(
        isinstance(content, dict),
        f"{where}: {path} must be a JSON object; got {type(content).__name__}. Restore or correct the file.",
    )
    return content


def _is_file(path: Path) -> bool:
    """Whether there is such a file; there is none of a name that the file system cannot hold."""
    try:
        return path.is_file()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False


def _download(repository: str, name: str, revision: str | None) -> Path | None:
    from huggingface_hub import hf_hub_download  # here: whoever has a folder needs neither it nor its import time
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(repository, name, revision=revision))
    except EntryNotFoundError:
        return None
