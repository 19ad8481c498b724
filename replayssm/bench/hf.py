"""Time ``generate`` of transformers' models, patched to decode by replay, beside the same models unpatched."""

import argparse
import sys
from typing import Any

import torch

from replayssm.bench import hf_report, report
from replayssm.bench.hf_cases import GEOMETRIES, PATCHES
from replayssm.bench.machine import about
from replayssm.bench.options import DTYPES, add_output

LEAST_PROMPT, LEAST_TOKENS = 17, 16  # more than the tokens of a step, so that it is a scan; fewer would be noise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``replayssm bench hf``."""
    names = [geometry.name for geometry in GEOMETRIES]
    parser.add_argument("--models", nargs="+", choices=names, default=names, help="default: all; weights are random")
    parser.add_argument("--batch", nargs="+", type=int, default=[64], help="default: 64")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each row's prompt (default 128)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens that each row gets (default 128)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights (default bfloat16)")
    parser.add_argument("--small", action="store_true", help="narrow models of few layers, for which a CPU will do")
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Check, time, print a table and write the JSON.

    Returns:
        The exit status: 0, or 1 if a patched model gave other logits or had no room; such a case is not written.
    """
    least = {"--batch": 1, "--prompt": LEAST_PROMPT, "--new-tokens": LEAST_TOKENS}
    given = min(options.batch), options.prompt, options.new_tokens
    for (name, bound), value in zip(least.items(), given, strict=True):
        if value < bound:
            raise ValueError(f"{name} must be at least {bound}; got {value}. Give another number.")
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not options.small:
        print("Nothing was timed: torch finds no GPU here. Narrow models run on a CPU as well: add --small.")
        return 0
    import replayssm.hf  # noqa: F401  says which releases of transformers fit, before another import misses them
    from replayssm.bench import hf_measure

    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    geometries = [geometry for geometry in GEOMETRIES if geometry.name in options.models]
    runs = hf_measure.measure(geometries, options, device)
    document: dict[str, Any] = about(_command(options), options.commit, device) | {
        "transformers": hf_measure.RELEASE,
        "small": options.small,
        "dtype": options.dtype,
        "prompt_tokens": options.prompt,
        "new_tokens": options.new_tokens,
        "rounds": hf_measure.ROUNDS,
        "runs": runs,
    }
    path = report.save(document, "hf", options.out)
    print(hf_report.table(document))
    print(f"\n{hf_report.conditions(document)}\n\n{hf_report.losses(document)}\n\nWritten: {path}")
    wanted = len(geometries) * len(options.batch) * len(PATCHES)
    failed = wanted - sum(entry["arm"] in PATCHES for entry in runs)
    if failed:
        print(f"{failed} of {wanted} cases gave other logits or had no room, and are left out.", file=sys.stderr)
    return 1 if failed else 0


def _command(options: argparse.Namespace) -> str:
    names = {"models": options.models, "batch": options.batch, "prompt": [options.prompt]}
    names |= {"new-tokens": [options.new_tokens], "dtype": [options.dtype]}
    given = " ".join(f"--{name} {' '.join(map(str, values))}" for name, values in names.items())
    return f"replayssm bench hf {given}{' --small' if options.small else ''}"
