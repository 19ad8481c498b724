"""Redraw the plots and tables of the README from the JSON files of the measurements."""

import argparse
from pathlib import Path

from replayssm.bench import drift_report, hf_report, kernel_report, report, speculative_report, verify_report

ROOT = Path(__file__).parent.parent.parent  # of a source checkout
REPORTS = {
    "kernel": kernel_report,
    "verify": verify_report,
    "speculative": speculative_report,
    "drift": drift_report,
    "hf": hf_report,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``replayssm bench report``."""
    parser.add_argument(
        "json", nargs="*", type=Path, help="default: the newest of each kind in replayssm/bench/results/"
    )


def run(options: argparse.Namespace) -> int:
    """Rewrite the plots in docs/ and the marked blocks of README.md; what was never measured is left as it is.

    Returns:
        The exit status 0.

    Raises:
        ValueError: there is no JSON, or this is no source checkout; nothing has been written then.
    """
    found = {bench: report.newest(bench) for bench in REPORTS}
    paths = options.json or [path for path in found.values() if path is not None]
    if not paths:
        raise ValueError(f"JSON must be a file, or one in {report.RESULTS}; got none. Run: replayssm bench kernel")
    readme = ROOT / "README.md"
    if not readme.is_file():
        raise ValueError(
            f"README.md must be in {ROOT}; got no such file. Run it from a source checkout, installed "
            "with pip install -e ."
        )
    text = readme.read_text(encoding="utf-8")
    plots: dict[str, str] = {}
    for path in paths:
        document = report.load(path)
        bench = _bench_of(path, document["command"])
        try:
            block, drawings = REPORTS[bench].block(document), REPORTS[bench].plots(document)
        except KeyError as error:
            raise ValueError(
                f"{path} must hold all that replayssm bench {bench} writes; got one without {error}. Measure again."
            ) from error
        text = report.with_block(text, bench, block)
        plots |= drawings
    for name, drawing in plots.items():
        (ROOT / name).write_text(drawing, encoding="utf-8")
    readme.write_text(text, encoding="utf-8")
    print(f"Written: {', '.join(str(ROOT / name) for name in plots)} and the blocks of {readme}")
    return 0


def _bench_of(path: Path, command: str) -> str:
    """Which measurement a command was."""
    for bench in REPORTS:
        if command.startswith(f"replayssm bench {bench} "):
            return bench
    known = " or ".join(f"replayssm bench {bench}" for bench in REPORTS)
    raise ValueError(f"JSON must be of {known}; got {command!r} in {path}. Give another file.")
