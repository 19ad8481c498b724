"""What README shows of ``replayssm bench speculative``: table, conditions, losses."""

from typing import Any

from replayssm.bench.report import markdown, versions

NAMES = {
    "prompt_lookup": "prompt lookup",
    "mtp": "the model's own head",
    "draft": "itself as its draft model (the most that can be accepted)",
}


def block(document: dict[str, Any]) -> str:
    """What stands between the marks of the README: table, conditions, and where drafts do not help."""
    return "\n\n".join([table(document), conditions(document), losses(document)])


def table(document: dict[str, Any]) -> str:
    """Tokens a step and tokens a second, a row for each drafter and batch."""
    header = ["drafter", "batch", "drafts a step", "tokens a step", "accepted", "tokens/s", "without", "speed-up"]
    rows = [
        [
            NAMES[run["drafter"]],
            str(run["batch"]),
            str(run["num_drafts"]),
            f"{run['mean_length']:.2f}",
            f"{sum(run['accepted']) / max(sum(run['proposed']), 1):.0%}",
            f"{run['tokens_s']:,.0f} ± {run['tokens_s_spread'] / 2:,.0f}",
            f"{run['plain_tokens_s']:,.0f} ± {run['plain_tokens_s_spread'] / 2:,.0f}",
            f"{run['speedup']:.2f}",
        ]
        for run in document["runs"]
    ]
    return markdown(header, rows)


def conditions(document: dict[str, Any]) -> str:
    """One paragraph: on what, with what, and how the figures were taken."""
    runs = document["runs"]
    tokens = " and ".join(sorted({str(run["max_new_tokens"]) for run in runs}))
    differing, texts = sum(run["texts_differing"] for run in runs), sum(run["texts"] for run in runs)
    return (
        f"The bundled model ({document['parameters']:,} parameters with its head for drafts), greedy, behind "
        f"{document['prompt_tokens']} bytes of held-out modules of the standard library, {tokens} more tokens a row, "
        f"on {versions(document)}. Medians over {document['rounds']} rounds of other passages, in turn with no drafts; "
        "± is half of what lies between the fastest and the slowest. Prompt and recording of the graphs are not in the "
        "times; a batch takes as long as its slowest row. Every text was compared with the one without drafts: "
        f"{differing} of {texts} differ, where two tokens are as likely as each other up to rounding."
    )


def losses(document: dict[str, Any]) -> str:
    """Every case in which drafts make decoding slower, by name."""
    slower = [
        f"{NAMES[run['drafter']]} at batch {run['batch']} ({run['speedup']:.2f}x)"
        for run in document["runs"]
        if run["speedup"] < 1
    ]
    return f"Where it does not help: {', '.join(slower)}." if slower else "No case of this run is slower than 1.0x."


def plots(document: dict[str, Any]) -> dict[str, str]:
    """None are drawn."""
    return {}
