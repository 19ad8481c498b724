"""The modules of the standard library that the bundled model was not trained on, of the Python that runs this."""

import sysconfig
from pathlib import Path

STDLIB = Path(sysconfig.get_path("stdlib"))
SEPARATOR = b"\0"  # stands between two documents

# Plain Python in CPython 3.10 to 3.14, where Debian leaves them in, and not another module's twin.
HELD_OUT = (
    "asyncio/queues",
    "bdb",
    "calendar",
    "cmd",
    "configparser",
    "copy",
    "csv",
    "dataclasses",
    "email/message",
    "fileinput",
    "fractions",
    "ftplib",
    "gettext",
    "graphlib",
    "heapq",
    "html/parser",
    "http/cookies",
    "json/decoder",
    "logging/config",
    "netrc",
    "plistlib",
    "queue",
    "random",
    "reprlib",
    "sched",
    "shlex",
    "socketserver",
    "textwrap",
    "timeit",
    "zipapp",
)


def held_out_documents() -> dict[str, bytes]:
    """Module -> text of the held-out modules, in a fixed order."""
    return {name: (STDLIB / f"{name}.py").read_bytes() for name in HELD_OUT}


def passages(length: int, spacing: int) -> list[bytes]:
    """Pieces of ``length`` bytes that begin ``spacing`` bytes apart, in turn from one module after another.

    The beginnings of the modules are left out: notices of copyright are alike.
    """
    documents = list(held_out_documents().values())
    starts = range(spacing, max(map(len, documents)), spacing)
    return [text[start : start + length] for start in starts for text in documents if start + length <= len(text)]
