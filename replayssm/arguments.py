"""Types of command-line arguments: text in, a number out, or an ``ArgumentTypeError`` that argparse shows."""

import argparse
from typing import Literal


def count(text: str, least: int = 1) -> int:
    """A whole number of at least ``least``."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}; got {text!r}")
    return int(text)


def window(text: str) -> int | Literal["auto"]:
    """A number of tokens, or "auto"; the cache checks its range."""
    try:
        return "auto" if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'must be a number of tokens or "auto"; got {text!r}') from None
