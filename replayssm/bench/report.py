"""Redraw the plot and the table of the README from a JSON of ``replayssm bench kernel``."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replayssm.bench.cases import PUBLISHED
from replayssm.bench.plot import speedup_plot

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent.parent  # of a source checkout
PLOT = "docs/kernel_speed.svg"
BEGIN, END = "<!-- bench kernel: begin -->", "<!-- bench kernel: end -->"
NAMES = {"mamba2": "Mamba-2", "gdn": "Gated DeltaNet", "kda": "KDA"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``replayssm bench report``."""
    parser.add_argument("json", nargs="?", type=Path, help="default: the newest in replayssm/bench/results/")


def run(options: argparse.Namespace) -> int:
    """Rewrite docs/kernel_speed.svg and the marked block of README.md; returns the exit status.

    Raises:
        ValueError: there is no such JSON, or this is no source checkout.
    """
    document = load(options.json or newest())
    readme = ROOT / "README.md"
    if not readme.is_file():
        raise ValueError(
            f"README.md must be in {ROOT}; got no such file. Run it from a source checkout, installed "
            "with pip install -e ."
        )
    text = with_block(readme.read_text(encoding="utf-8"), block(document))
    (ROOT / PLOT).write_text(plot(document), encoding="utf-8")
    readme.write_text(text, encoding="utf-8")
    print(f"Written: {ROOT / PLOT} and the block of {readme}")
    return 0


def load(path: Path) -> dict[str, Any]:
    """The content of a JSON of ``replayssm bench kernel``.

    Raises:
        ValueError: it is something else.
    """
    remedy = "Give a file that replayssm bench kernel has written."
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of the decoding, too
        raise ValueError(f"{path} must be JSON; got {error}. {remedy}") from error
    if not isinstance(document, dict) or "read_ceiling_tb_s" not in document:
        raise ValueError(f"{path} must hold times of decode steps; got other JSON. {remedy}")
    return document


def newest() -> Path:
    """The JSON of kernel times in the results folder with the latest date.

    Raises:
        ValueError: there is none.
    """
    found = sorted(RESULTS.glob("kernel_*.json"), key=lambda path: load(path)["date"])
    if not found:
        raise ValueError(f"JSON must be a file, or one in {RESULTS}; got none. Run: replayssm bench kernel")
    return found[-1]


def block(document: dict[str, Any]) -> str:
    """What stands between the marks of the README: plot, table, conditions, and where replay does not help."""
    layers = list(dict.fromkeys(run["layer"] for run in document["runs"]))
    alt = f"Speed-up over batch size for {', '.join(NAMES[layer] for layer in layers)}"
    return "\n\n".join([f"![{alt}]({PLOT})", table(document), conditions(document), losses(document)])


def with_block(text: str, content: str) -> str:
    """``text`` with ``content`` between the two marks.

    Raises:
        ValueError: the marks are not there, or not once each.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(
            f"README.md must have {BEGIN} and {END} once each, in this order; got "
            f"{text.count(BEGIN)} and {text.count(END)}. Put them around the place of the table."
        )
    return f"{text[: text.index(BEGIN)]}{BEGIN}\n\n{content}\n\n{text[text.index(END) :]}"


def table(document: dict[str, Any]) -> str:
    """Microseconds of a decode step of one layer, a row for each case."""
    header = [
        *("layer", "batch", "conventional", "TB/s", "replay", "speed-up", "no row flushes", "all flush", "window 0"),
        *("of the read ceiling", "best published"),
    ]
    rows = [
        [
            NAMES[run["layer"]],
            str(run["batch"]),
            f"{run['conventional_us']:.1f} ± {run['conventional_spread_us'] / 2:.1f}",
            f"{run['conventional_tb_s']:.2f}",
            f"{run['replay_us']:.1f} ± {run['replay_spread_us'] / 2:.1f}",
            f"{run['speedup']:.2f}",
            f"{run['nonflush_us']:.1f}",
            f"{run['flush_us']:.1f}",
            f"{run['window0_us']:.1f}",
            f"{run['percent_of_ceiling']:.0f} %",
            _published(run["layer"], run["batch"]),
        ]
        for run in document["runs"]
    ]
    return markdown(header, rows)


def conditions(document: dict[str, Any]) -> str:
    """One paragraph: on what, with what, and how the figures were taken."""
    runs = document["runs"]
    windows = " and ".join(sorted({str(run["window"]) for run in runs}))
    dtypes = " and ".join(sorted({run["dtype"] for run in runs}))
    versions = ", ".join(f"{name} {document[name]}" for name in ("driver", "torch", "triton", "python", "commit"))
    return (
        f"Microseconds of one layer's step, one token a row, on one {document['gpu']} ({versions}, "
        f"{document['date'][:10]}). Window {windows}, {dtypes} activations, fp32 state, always from memory. Medians "
        "over whole windows in CUDA graphs, each row flushing once a window; ± is half of what lies between the 10th "
        "and the 90th percentile. Conventional is the best of the launch configurations of a Triton kernel, timed in "
        f"turn with replay, and its TB/s count the state alone; this card read {document['read_ceiling_tb_s']:.2f} "
        "TB/s in the same run. Every case was compared with the fp64 token loop first."
    )


def losses(document: dict[str, Any]) -> str:
    """Every case in which replay is slower than the conventional step, by name."""
    slower = [
        f"{NAMES[run['layer']]} at batch {run['batch']} ({run['speedup']:.2f}x)"
        for run in document["runs"]
        if run["speedup"] < 1
    ]
    return f"Where it does not help: {', '.join(slower)}." if slower else "No case of this run is slower than 1.0x."


def plot(document: dict[str, Any]) -> str:
    """The SVG: speed-up over batch size, a panel for each layer."""
    panels = []
    for layer, name in NAMES.items():
        runs = [run for run in document["runs"] if run["layer"] == layer]
        if runs:
            measured = [(run["batch"], run["speedup"]) for run in runs]
            floor = [(run["batch"], run["speedup"] * 100 / run["percent_of_ceiling"]) for run in runs]
            published = [(batch, each.speedup) for batch, each in PUBLISHED[layer].items() if each.speedup is not None]
            panels.append((f"{name}, {runs[0]['geometry']}", measured, floor, published))
    return speedup_plot(panels, f"{document['gpu']}, speed-up over the conventional step")


def _published(layer: str, batch: int) -> str:
    """The conventional step, and the speed-up where there is one."""
    if batch not in PUBLISHED[layer]:
        return ""
    conventional_us, speedup = PUBLISHED[layer][batch]
    return f"{conventional_us:.1f}" if speedup is None else f"{conventional_us:.1f}, {speedup:.2f}x"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    cells = (" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(f"| {line} |" for line in cells)
