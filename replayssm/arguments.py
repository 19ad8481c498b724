"""Types of command-line arguments: text in, a number out, or an ``ArgumentTypeError`` that argparse shows.

And the arguments that several commands share.
"""

import argparse
from typing import Literal

from replayssm.cache import checkpoint, formats


def add_formats(command: argparse.ArgumentParser) -> None:
    """Add how states are stored and read; the cache refuses names that it does not know."""
    command.add_argument(
        "--checkpoint",
        default=checkpoint.EXACT,
        help=f"how the state is stored: {', '.join(checkpoint.NAMES)} (default fp32)",
    )
    command.add_argument(
        "--read-format",
        help=f"a smaller copy of the state to read: {', '.join(formats.names())}; default: read the state itself",
    )


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
