"""How far a copy is: a bar on standard error, on a terminal only."""

import sys

WIDTH = 30  # characters of the bar


class Progress:
    """Counts bytes up to ``total``; as a context it takes the bar away at the end, also after an error.

    Args:
        what: is being done, the word before the bar.
    """

    def __init__(self, what: str, total: int):
        self._what, self._total, self._done, self._shown = what, max(total, 1), 0, -1

    def advance(self, nbytes: int) -> None:
        """So many more bytes are done."""
        self._done += nbytes
        percent = 100 * self._done // self._total
        if percent == self._shown or not sys.stderr.isatty():
            return
        self._shown = percent
        bar = "#" * (WIDTH * percent // 100)
        size = f"{self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB"
        print(f"\r\x1b[K{self._what} [{bar:.<{WIDTH}}] {size}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown >= 0:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
