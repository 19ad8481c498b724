"""What README shows of ``replayssm bench drift``: table, conditions, growth, spectra and a plot."""

import math
import statistics
from typing import Any

from replayssm.bench import plot
from replayssm.bench.report import markdown, versions

PLOT = "docs/drift.svg"
GROWS = 1.5  # the last bin over the middle ones, from which a run is said to grow


def block(document: dict[str, Any]) -> str:
    """What stands between the marks of the README."""
    drawing = f"![Divergence over position in the text for each pair of formats]({PLOT})"
    parts = [drawing, table(document), conditions(document), losses(document), spectra_table(document)]
    return "\n\n".join(parts)


def table(document: dict[str, Any]) -> str:
    """A row for each pair of formats: what it keeps and moves, and its divergence early, in the middle and late."""
    shown = _shown(document)
    header = ["state", "read as", "kept", "moved", *(f"KL {_span(document['bins'][at])}" for at in shown), "same token"]
    rows = [
        [
            run["checkpoint"],
            run["read_format"] or "it is",
            f"{2 * run['kept_bytes'] / run['conventional_bytes']:.2f}",
            f"{run['moved_bytes'] / run['conventional_bytes']:.2f}",
            *(f"{run['kl'][at]:.1e}" for at in shown),
            f"{run['top1'][-1]:.2%}",
        ]
        for run in document["runs"]
    ]
    return markdown(header, rows)


def conditions(document: dict[str, Any]) -> str:
    """One paragraph: on what, with what, and how the figures were taken."""
    return (
        f"The bundled model over {document['texts']} x {document['tokens']:,} bytes of held-out modules of the "
        f"standard library, every byte given, window {document['window']}, on {versions(document)}. KL is the "
        "divergence of the next byte's distribution from that of decoding with states in fp32, in nats, a mean over "
        "the positions named; the last column is how often both would choose the same byte in the last of them. Kept "
        "and moved are bytes of state and copy, and of a step without its activations, over those of conventional "
        "decoding in fp32. The first row is replay in fp32: what the order of sums alone does."
    )


def losses(document: dict[str, Any]) -> str:
    """Which pairs of formats grow worse with length, by name."""
    grown = [
        f"{_named(run)} ({run['kl'][-1] / middle:.1f}x)"
        for run in document["runs"][1:]
        if (middle := run["kl"][_middle(document)]) and run["kl"][-1] > GROWS * middle
    ]
    told = ", ".join(grown)
    return (
        f"Grows with length: {told}." if grown else f"None diverges {GROWS} times as far at the end as in the middle."
    )


def spectra_table(document: dict[str, Any]) -> str:
    """How many directions the states hold, and what two formats miss of them."""
    header = ["layer", "stable rank of its heads", "nvfp4 misses", "lr_if4 misses", "lr_if4 / nvfp4", "worst head"]
    rows = []
    for layer in document["spectra"]:
        ranks = layer["stable_rank"]
        ratios = [ours / theirs for ours, theirs in zip(layer["lr_if4"], layer["nvfp4"], strict=True)]
        rows.append(
            [
                layer["layer"],
                f"{min(ranks):.1f} to {max(ranks):.1f}",
                f"{statistics.mean(layer['nvfp4']):.1%}",
                f"{statistics.mean(layer['lr_if4']):.1%}",
                f"{math.exp(statistics.mean(map(math.log, ratios))):.2f}",
                f"{max(ratios):.2f}",
            ]
        )
    return markdown(header, rows)


def plots(document: dict[str, Any]) -> dict[str, str]:
    """The file and the drawing of divergence over position."""
    lines = [
        (_named(run), [(high, kl) for (_, high), kl in zip(document["bins"], run["kl"], strict=True) if kl > 0])
        for run in document["runs"]
    ]
    return {PLOT: plot.drift_plot(lines, f"Divergence from states in fp32, {document['gpu']}")}


def _shown(document: dict[str, Any]) -> list[int]:
    """An early bin, the middle one and the last, as far as there are so many."""
    last = len(document["bins"]) - 1
    return sorted({min(1, last // 2), _middle(document), last})


def _middle(document: dict[str, Any]) -> int:
    return (len(document["bins"]) - 1) // 2


def _span(positions: list[int]) -> str:
    """How a bin is named: 1K-2K."""
    return "-".join(f"{at // 1024}K" if at and at % 1024 == 0 else str(at) for at in positions)


def _named(run: dict[str, Any]) -> str:
    return run["checkpoint"] if run["read_format"] is None else f"{run['checkpoint']} read as {run['read_format']}"
