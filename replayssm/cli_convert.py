"""``replayssm convert``: another library's checkpoint to a folder of ours, or back."""

import argparse
import sys

from replayssm.models.convert import Report, convert

SHOWN = 8  # names of unused tensors


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``convert`` to the subparsers of the command line."""
    command = commands.add_parser(
        "convert",
        help="write a checkpoint in the other form",
        description="Write a checkpoint of a known family as a folder of this library, or such a folder as the "
        "checkpoint it came from: the same tensors, bit for bit. Pickled weights are read without running code.",
    )
    command.add_argument("source", help="a folder, or org/name of a repository of the Hub")
    command.add_argument("target", help="a folder that does not exist; it appears whole or not at all")
    command.add_argument("--to", choices=("hf", "replayssm"), default="replayssm", help="the form (default replayssm)")
    command.add_argument("--revision", help="branch, tag or commit of a repository")


def run(options: argparse.Namespace) -> int:
    """Convert, and say on standard error what was written."""
    report = convert(options.source, options.target, to=options.to, revision=options.revision)
    print(f"[{options.target}: {described(report)}]", file=sys.stderr)
    return 0


def described(report: Report) -> str:
    """A line about a conversion."""
    dtypes = ", ".join(f"{nbytes:,} bytes of {dtype}" for dtype, nbytes in report.dtypes.most_common())
    text = f"{report.tensors:,} tensors, {dtypes}"
    if report.companions:
        text += f"; also {', '.join(report.companions)}"
    if report.unused:
        rest = "" if len(report.unused) <= SHOWN else f" and {len(report.unused) - SHOWN:,} more"
        text += f"; carried along, without a place in the model: {', '.join(report.unused[:SHOWN])}{rest}"
    return text
