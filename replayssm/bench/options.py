"""The options that the measurements of kernels share."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from replayssm.bench.cases import CASES, Case

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def add_cases(parser: argparse.ArgumentParser, batches: Sequence[int]) -> None:
    """Add what is measured: layers, geometries, batches (these by default) and the dtype of activations."""
    layers, geometries = [case.layer for case in CASES], [case.geometry for case in CASES]
    parser.add_argument("--layer", nargs="+", choices=layers, default=layers, help="default: all")
    parser.add_argument("--geometry", nargs="+", choices=geometries, default=geometries, help="default: all")
    said = f"default: {' '.join(map(str, batches))}"
    parser.add_argument("--batch", nargs="+", type=int, default=list(batches), help=said)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of q, k and v; states are fp32")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add where the figures go."""
    parser.add_argument(
        "--out", type=writable, help="the JSON file; default: one named after the device, in bench/results/"
    )
    parser.add_argument("--commit", help="what was measured, where the source is not a git checkout")


def writable(text: str) -> Path:
    """A file that can be written: found out before anything is measured."""
    path = Path(text)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"must be a file in a folder that can be written to; got {text!r}")
    return path


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """The cases that ``options`` name.

    Raises:
        ValueError: none, or a batch that is not positive.
    """
    cases = [each for each in CASES if each.layer in options.layer and each.geometry in options.geometry]
    if not cases:
        raise ValueError(
            f"--layer and --geometry must name one case at least; got {' '.join(options.layer)} and "
            f"{' '.join(options.geometry)}. Leave one of the two out."
        )
    if min(options.batch) < 1:
        raise ValueError(f"--batch must be at least 1; got {min(options.batch)}. Give other sizes.")
    return cases


def named(options: argparse.Namespace) -> str:
    """The options of ``add_cases`` as they could be typed again, up to the batches."""
    sizes = f"--layer {' '.join(options.layer)} --geometry {' '.join(options.geometry)}"
    return f"{sizes} --batch {' '.join(map(str, options.batch))}"
