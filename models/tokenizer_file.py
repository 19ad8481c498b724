"""The tokenizer of a checkpoint: its tokenizer.json, through the ``tokenizers`` package."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from replayssm import hub
from replayssm.checks import expect

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"


def ends(where: str, place: hub.Folder, config: Mapping[str, Any]) -> list[int]:
    """The ids behind which a text ends: of generation_config.json, else of the config.json that the model came with."""
    file = place.fetch(GENERATION)
    sources = [] if file is None else [hub.read_json(where, file)]
    source = config.get("source", {}).get("config", {})
    sources += [source, source.get("text_config", {})]
    for ids in (source.get("eos_token_id") for source in sources):
        if ids is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    return []


class FileTokenizer:
    """What a tokenizer.json says. The package that reads it is needed at the first use, not before.

    Args:
        path: of the file.
        eos: ids behind which a text ends, as the model's config says.

    Raises:
        ImportError: at the first use, where ``tokenizers`` is not installed.
    """

    def __init__(self, path: Path, eos: Sequence[int] = ()):
        self.path, self.eos = path, list(eos)

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from tokenizers import Tokenizer  # an extra
        except ImportError as error:
            raise ImportError(
                f"FileTokenizer: {self.path} needs the package tokenizers, which is not installed. Install "
                "replayssm[tokenizers], or give ids instead of text."
            ) from error
        try:
            return Tokenizer.from_file(str(self.path))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(
                f"FileTokenizer: {self.path} must be a file that tokenizers reads; got an error: {error}. Copy or "
                "download it again."
            ) from error

    @property
    def vocab_size(self) -> int:
        """Ids that have a meaning are below this."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the file puts around it."""
        expect(
            isinstance(text, str),
            f"FileTokenizer.encode: text must be a str; got {type(text).__name__}. Decode it first.",
        )
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids)))

    def stream(self) -> "TextStream":
        """A decoder for text that arrives in pieces."""
        return TextStream(self)


class TextStream:
    """Decodes pieces as they come and holds back a character that is not complete yet.

    A piece is decoded behind the one before it: a token's text may depend on the token in front of it.
    """

    def __init__(self, tokenizer: FileTokenizer):
        self._tokenizer = tokenizer
        self._before: list[int] = []  # said already
        self._pending: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """The text that ``ids`` complete."""
        self._pending += ids
        text = self._text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._before, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """What an unfinished character leaves behind."""
        text = self._text()
        self._before, self._pending = self._pending, []
        return text

    def _text(self) -> str:
        said = self._tokenizer.decode(self._before)
        return self._tokenizer.decode(self._before + self._pending)[len(said) :]
