"""What all reports of the bench share: where results lie, layers' names, tables, blocks between marks."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replayssm.bench.machine import slug

RESULTS = Path(__file__).parent / "results"
NAMES = {"mamba2": "Mamba-2", "gdn": "Gated DeltaNet", "kda": "KDA"}


def save(document: dict[str, Any], bench: str, out: Path | None) -> Path:
    """Write the JSON of a measurement to ``out``, else to the file in ``RESULTS`` that is named after the device."""
    path = out or RESULTS / f"{bench}_{slug(document['gpu'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def load(path: Path) -> dict[str, Any]:
    """A document that ``save`` wrote.

    Raises:
        ValueError: the file holds something else.
    """
    remedy = "Give a file that replayssm bench has written."
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of the decoding, too
        raise ValueError(f"{path} must be JSON; got {error}. {remedy}") from error
    kinds = {"command": str, "date": str, "runs": list}
    if not isinstance(document, dict) or not all(isinstance(document.get(key), kind) for key, kind in kinds.items()):
        raise ValueError(f"{path} must hold a measurement; got other JSON. {remedy}")
    return document


def newest(bench: str) -> Path | None:
    """The JSON of this measurement in ``RESULTS`` with the latest date, or None."""
    return max(RESULTS.glob(f"{bench}_*.json"), key=lambda path: load(path)["date"], default=None)


def with_block(text: str, bench: str, content: str) -> str:
    """``text`` with ``content`` between the two marks of a measurement.

    Raises:
        ValueError: the marks are not there, or not once each.
    """
    begin, end = marks(bench)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(
            f"README.md must have {begin} and {end} once each, in this order; got "
            f"{text.count(begin)} and {text.count(end)}. Put them around the place of the table."
        )
    return f"{text[: text.index(begin)]}{begin}\n\n{content}\n\n{text[text.index(end) :]}"


def marks(bench: str) -> tuple[str, str]:
    """What stands before and behind the block of a measurement in README.md."""
    return f"<!-- bench {bench}: begin -->", f"<!-- bench {bench}: end -->"


def versions(document: dict[str, Any]) -> str:
    """On what a measurement ran, for its conditions; a CPU has no driver and no use for triton."""
    names = [name for name in ("driver", "torch", "triton", "python", "commit") if document[name] != "none"]
    listed = ", ".join(f"{name} {document[name]}" for name in names)
    return f"one {document['gpu']} ({listed}, {document['date'][:10]})"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    cells = (" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(f"| {line} |" for line in cells)
