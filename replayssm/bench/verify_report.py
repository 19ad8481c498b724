"""What README shows of ``replayssm bench verify``: plot, table, conditions, losses."""

from typing import Any

from replayssm.bench.cases import PUBLISHED_VERIFY, PUBLISHED_VERIFY_BATCH
from replayssm.bench.plot import cost_plot
from replayssm.bench.report import NAMES, markdown, versions

PLOT = "docs/verify_speed.svg"


def block(document: dict[str, Any]) -> str:
    """What stands between the marks of the README: plot, table, conditions, and where replay does not help."""
    layers = list(dict.fromkeys(run["layer"] for run in document["runs"]))
    alt = f"Cost of a step over its tokens for {', '.join(NAMES[layer] for layer in layers)}"
    return "\n\n".join([f"![{alt}]({PLOT})", table(document), conditions(document), losses(document)])


def table(document: dict[str, Any]) -> str:
    """The cost of a step of several tokens of one layer, a row for each case."""
    header = [
        *("layer", "batch", "tokens", "window", "conventional (us)", "replay (us)", "in steps", "half kept (us)"),
        *("in steps", "native (us)", "in steps", "best published replay, native"),
    ]
    rows = []
    for run in document["runs"]:
        costs = [[_us(run, name), f"{run[f'{name}_steps']:.2f}"] for name in ("replay", "replay_half", "native")]
        sizes = [str(run[name]) for name in ("batch", "tokens", "window")]
        flat = [cell for cost in costs for cell in cost]
        rows.append([NAMES[run["layer"]], *sizes, _us(run, "conventional"), *flat, _published(run)])
    return markdown(header, rows)


def conditions(document: dict[str, Any]) -> str:
    """One paragraph: on what, with what, and how the figures were taken."""
    dtypes = " and ".join(sorted({run["dtype"] for run in document["runs"]}))
    return (
        f"One layer's step that reads a token and its drafts, on {versions(document)}. {dtypes} activations, fp32 "
        "state, always from memory; medians in CUDA graphs, all in turn, over as many steps as lie between two flushes "
        "of a row, with the rows' flushes spread over them; ± is half of what lies between the 10th and the 90th "
        "percentile. A step costs as much as that many conventional steps of one token, which is the best of the "
        "launch configurations of a Triton kernel. Replay: all tokens are kept; half kept: the rest is rejected, so a "
        "row flushes less often. Native is the best of as many configurations of a kernel that writes a state behind "
        "each token, for rollback. Every case was compared with the fp64 token loop first, rejected tokens included."
    )


def losses(document: dict[str, Any]) -> str:
    """Every case in which replay costs more than native, by name."""
    slower = [
        f"{NAMES[run['layer']]} with {run['tokens']} tokens at batch {run['batch']} "
        f"({run['replay_steps']:.2f} steps, native {run['native_steps']:.2f})"
        for run in document["runs"]
        if max(run["replay_steps"], run["replay_half_steps"]) >= run["native_steps"]
    ]
    return f"Where it does not help: {', '.join(slower)}." if slower else "No case of this run costs more than native."


def plots(document: dict[str, Any]) -> dict[str, str]:
    """File -> drawing: cost over tokens, a panel for each layer, at the batch of what is published or the largest."""
    batches = {run["batch"] for run in document["runs"]}
    batch = PUBLISHED_VERIFY_BATCH if PUBLISHED_VERIFY_BATCH in batches else max(batches)
    panels = []
    for layer, name in NAMES.items():
        runs = [run for run in document["runs"] if run["layer"] == layer and run["batch"] == batch]
        if runs:
            runs.sort(key=lambda run: run["tokens"])
            replay, half, native = (
                [(run["tokens"], run[f"{kind}_steps"]) for run in runs] for kind in ("replay", "replay_half", "native")
            )
            found = PUBLISHED_VERIFY[layer] if batch == PUBLISHED_VERIFY_BATCH else {}
            published = [(tokens, each.replay) for tokens, each in found.items()]
            panels.append((f"{name}, {runs[0]['geometry']}", replay, half, native, published))
    title = f"{document['gpu']}, batch {batch}: a step of several tokens, in conventional steps of one"
    return {PLOT: cost_plot(panels, title)}


def _us(run: dict[str, Any], name: str) -> str:
    return f"{run[f'{name}_us']:.1f} ± {run[f'{name}_spread_us'] / 2:.1f}"


def _published(run: dict[str, Any]) -> str:
    found = PUBLISHED_VERIFY[run["layer"]].get(run["tokens"])
    if found is None or run["batch"] != PUBLISHED_VERIFY_BATCH:
        return ""
    return f"{found.replay:.2f}, {found.native:.2f}"
