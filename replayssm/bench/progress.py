"""How far a measurement is, on standard error: a bar in a terminal, one line per part elsewhere."""

import sys
from typing import TextIO

WIDTH = 30  # characters of the bar


class Progress:
    """``total`` parts of a known number of stages each.

    Args:
        stages: of a part, for the bar; a part may end early.
    """

    def __init__(self, total: int, stages: int, stream: TextIO | None = None):
        self._total, self._stages = total * stages, stages
        self._parts = self._done = 0
        self._stream = sys.stderr if stream is None else stream

    def stage(self, what: str) -> None:
        """The next stage begins."""
        if self._stream.isatty():
            filled = WIDTH * self._done // self._total
            bar = "#" * filled + "." * (WIDTH - filled)
            print(f"\r\x1b[K[{bar}] {100 * self._done // self._total:3} %  {what}", end="", file=self._stream)
            self._stream.flush()
        self._done += 1

    def part(self, what: str) -> None:
        """A part is done: say what came of it."""
        self._parts += 1
        self._done = self._parts * self._stages
        if self._stream.isatty():
            print("\r\x1b[K", end="", file=self._stream)
        print(what, file=self._stream, flush=True)
