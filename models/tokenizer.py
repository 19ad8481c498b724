"""The tokenizer of byte-level models: a token is a byte of the UTF-8 text."""

import codecs
from collections.abc import Sequence

from replayssm.checks import expect


class ByteTokenizer:
    """Text to bytes and back; every text has an encoding and every sequence of bytes a text."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes; an argument or input that was no valid UTF-8 gives back the bytes that it came as."""
        expect(
            isinstance(text, str),
            f"ByteTokenizer.encode: text must be a str; got {type(text).__name__}. Of bytes, list(data) are the ids.",
        )
        return list(text.encode("utf-8", errors="surrogateescape"))

    def decode(self, ids: Sequence[int]) -> str:
        """Text; bytes that are no UTF-8 become U+FFFD."""
        return _as_bytes("ByteTokenizer.decode", ids).decode("utf-8", errors="replace")

    def stream(self) -> "ByteStream":
        """A decoder for text that arrives in pieces."""
        return ByteStream()


class ByteStream:
    """Decodes pieces as they come and holds back the bytes of a character that is not complete yet."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """The text that ``ids`` complete."""
        return self._decoder.decode(_as_bytes("ByteStream.push", ids))

    def finish(self) -> str:
        """What an unfinished character leaves behind: U+FFFD or nothing."""
        return self._decoder.decode(b"", final=True)


def _as_bytes(where: str, ids: Sequence[int]) -> bytes:
    wrong = [i for i in ids if not 0 <= i < 256]
    expect(
        not wrong,
        f"{where}: ids must be between 0 and 255; got {wrong[:5]}. Generate with vocab_size=256, or use the "
        "tokenizer that belongs to the model.",
    )
    return bytes(ids)
