"""``replayssm bench``: the measurements, each a module with ``add_arguments(parser)`` and ``run(options) -> int``."""

import argparse

from replayssm.bench import drift, hf, kernel, prefill, readme, speculative, verify

COMMANDS = {
    "kernel": kernel,
    "verify": verify,
    "speculative": speculative,
    "prefill": prefill,
    "drift": drift,
    "hf": hf,
    "report": readme,
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``bench`` and its own commands; a command's module says in its first line what it is for."""
    bench = commands.add_parser("bench", help="measure what decoding costs", description="Measure what decoding costs.")
    measurements = bench.add_subparsers(dest="bench", required=True)
    for name, module in COMMANDS.items():
        summary = str(module.__doc__).splitlines()[0]
        module.add_arguments(measurements.add_parser(name, help=summary, description=summary))


def run(options: argparse.Namespace) -> int:
    """Run the measurement that ``options`` name; returns the exit status."""
    return COMMANDS[options.bench].run(options)
