"""On what a measurement ran: the first entries of every JSON in results/."""

import datetime
import importlib.metadata
import platform
import re
import shutil
import subprocess
from pathlib import Path

import torch


def about(command: str, commit: str | None, device: torch.device) -> dict[str, str]:
    """What was run, when, and on what.

    Args:
        command: as it could be typed again.
        commit: of the source; None asks git.
        device: a GPU, or a CPU, on which nothing runs on triton.
    """
    on_gpu = device.type == "cuda"
    return dict(
        command=command,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        commit=commit or _said("git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"),
        gpu=torch.cuda.get_device_name(device) if on_gpu else device.type,
        driver=_driver(device) if on_gpu else "none",
        torch=torch.__version__,
        triton=importlib.metadata.version("triton") if on_gpu else "none",
        python=platform.python_version(),
    )


def slug(name: str) -> str:
    """The name of a GPU as a part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _driver(device: torch.device) -> str:
    return _said("nvidia-smi", f"--id={device.index}", "--query-gpu=driver_version", "--format=csv,noheader")


def _said(program: str, *arguments: str) -> str:
    """The output of a program; "unknown" where it is missing or fails."""
    if shutil.which(program) is None:
        return "unknown"
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
