"""What README shows of ``replayssm bench hf``: table, conditions, losses."""

from collections.abc import Mapping
from typing import Any

from replayssm.bench.hf_cases import PATCHES
from replayssm.bench.report import markdown, versions


def block(document: dict[str, Any]) -> str:
    """What stands between the marks of the README: table, conditions, and where replay does not help."""
    return "\n\n".join([table(document), conditions(document), losses(document)])


def table(document: dict[str, Any]) -> str:
    """Times and memory of ``generate``, a row for each model, batch and way of running it."""
    header = [
        *("model", "batch", "decoded by", "a step (ms)", "tokens/s", "of unpatched", "prompt (s)"),
        *("whole call, tokens/s", "of unpatched", "memory, prompt (GB)", "memory, steps (GB)"),
    ]
    rows = [
        [
            run["model"],
            str(run["batch"]),
            name_of(run),
            f"{run['step_ms']:.2f} ± {run['step_ms_spread'] / 2:.2f}",
            f"{run['tokens_s']:,.0f}",
            f"{run['tokens_s_ratio']:.2f}",
            f"{run['prefill_s']:.2f} ± {run['prefill_s_spread'] / 2:.2f}",
            f"{run['generate_tokens_s']:,.0f}",
            f"{run['generate_tokens_s_ratio']:.2f}",
            *(f"{run[part]:.1f}" if run[part] else "" for part in ("prefill_gb", "decode_gb")),
        ]
        for run in document["runs"]
    ]
    return markdown(header, rows)


def conditions(document: dict[str, Any]) -> str:
    """One paragraph: on what, with what, and how the figures were taken."""
    runs = document["runs"]
    packages = sorted({package for run in runs for package in run["packages"]})
    found = f"it found kernels of {' and '.join(packages)}" if packages else "no package with kernels for it was there"
    geometry = "Models of few narrow layers" if document["small"] else "The published geometries"
    return (
        f"`model.generate` of transformers {document['transformers']}, greedy, {document['prompt_tokens']} tokens of "
        f"prompt and {document['new_tokens']} more in every row, on {versions(document)}; {found}. {geometry} with "
        f"random {document['dtype']} weights. Replay is the same model after `hf.patch`, window 16. Medians over "
        f"{document['rounds']} calls of each, in turn; ± is half of what lies between the fastest and the slowest. "
        "tokens/s are those of the steps behind the prompt, and further right those of the whole call. Memory is the "
        "peak of what was allocated, weights included. The logits of each patched model were compared with those of "
        "transformers' plain PyTorch first, in a model of few layers."
    )


def losses(document: dict[str, Any]) -> str:
    """Every case in which a patched model decodes more slowly, by name."""
    slower = [
        f"{run['model']} by {name_of(run)} at batch {run['batch']} ({run['tokens_s_ratio']:.2f}x)"
        for run in document["runs"]
        if run["arm"] in PATCHES and run["tokens_s_ratio"] < 1
    ]
    return f"Where it does not help: {', '.join(slower)}." if slower else "No case of this run is slower than 1.0x."


def plots(document: dict[str, Any]) -> dict[str, str]:
    """None are drawn."""
    return {}


def name_of(run: Mapping[str, Any]) -> str:
    """How a row of the table, or a loss, names what was run."""
    if run["arm"] not in PATCHES:
        return f"transformers, {' and '.join(run['packages']) or 'plain PyTorch'}"
    return f"replay, {run['checkpoint']} read as {run['read_format']}" if "checkpoint" in run else "replay"
