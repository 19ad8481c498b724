"""What README shows of ``replayssm bench kernel``: plot, table, conditions, losses."""

from typing import Any

from replayssm.bench.cases import PUBLISHED
from replayssm.bench.plot import speedup_plot
from replayssm.bench.report import NAMES, markdown, versions

PLOT = "docs/kernel_speed.svg"


def block(document: dict[str, Any]) -> str:
    """What stands between the marks of the README: plot, table, conditions, and where replay does not help."""
    layers = list(dict.fromkeys(run["layer"] for run in document["runs"]))
    alt = f"Speed-up over batch size for {', '.join(NAMES[layer] for layer in layers)}"
    return "\n\n".join([f"![{alt}]({PLOT})", table(document), conditions(document), losses(document)])


def table(document: dict[str, Any]) -> str:
    """Microseconds of a decode step of one layer, a row for each case."""
    header = [
        *(
            "layer",
            "window",
            "batch",
            "conventional",
            "TB/s",
            "replay",
            "speed-up",
            "no row flushes",
            "all flush",
            "window 0",
        ),
        *("of the read ceiling", "best published"),
    ]
    rows = [
        [
            NAMES[run["layer"]],
            str(run["window"]),
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
    dtypes = " and ".join(sorted({run["dtype"] for run in runs}))
    return (
        f"Microseconds of one layer's step, one token a row, on {versions(document)}: {dtypes} "
        "activations, fp32 state, always from memory. Medians over whole windows in CUDA graphs, each row flushing "
        "once a window; ± is half of what lies between the 10th and the 90th percentile. Conventional is the best of "
        "the launch configurations of a Triton kernel, timed in turn with replay, and its TB/s count the state alone; "
        f"this card read {document['read_ceiling_tb_s']:.2f} TB/s in the same run. Every case was compared with the "
        "fp64 token loop first."
    )


def losses(document: dict[str, Any]) -> str:
    """Every case in which replay is slower than the conventional step, by name."""
    slower = [
        f"{NAMES[run['layer']]} at batch {run['batch']} ({run['speedup']:.2f}x)"
        for run in document["runs"]
        if run["speedup"] < 1
    ]
    return f"Where it does not help: {', '.join(slower)}." if slower else "No case of this run is slower than 1.0x."


def plots(document: dict[str, Any]) -> dict[str, str]:
    """File -> drawing: speed-up over batch size, a panel for each layer."""
    panels = []
    for layer, name in NAMES.items():
        runs = [run for run in document["runs"] if run["layer"] == layer]
        if runs:
            measured = [(run["batch"], run["speedup"]) for run in runs]
            floor = [(run["batch"], run["speedup"] * 100 / run["percent_of_ceiling"]) for run in runs]
            published = [(batch, each.speedup) for batch, each in PUBLISHED[layer].items() if each.speedup is not None]
            panels.append((f"{name}, {runs[0]['geometry']}", measured, floor, published))
    drawing = speedup_plot(panels, f"{document['gpu']}, speed-up over the conventional step")
    return {PLOT: drawing}


def _published(layer: str, batch: int) -> str:
    """The conventional step, and the speed-up where there is one."""
    if batch not in PUBLISHED[layer]:
        return ""
    conventional_us, speedup = PUBLISHED[layer][batch]
    return f"{conventional_us:.1f}" if speedup is None else f"{conventional_us:.1f}, {speedup:.2f}x"
