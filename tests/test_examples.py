"""The scripts that a user copies run, and do what they say."""

import subprocess
import sys
from pathlib import Path

import pytest
from draws import DEVICE
from stock_models import STOCK

from replayssm.models import from_pretrained

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="each is a process of its own, on the CPU")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, *arguments: Path) -> str:
    done = subprocess.run([sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_hybrid_of_ones_own_learns_and_comes_back(tmp_path: Path) -> None:
    printed = run("compose.py", tmp_path / "model")
    bits = [float(line.split()[2]) for line in printed.splitlines() if line.startswith("step ")]
    assert bits[0] > 7
    assert bits[-1] < 5
    assert f"{tmp_path / 'model'}: import " in printed
    model, tokenizer = from_pretrained(tmp_path / "model")
    assert tokenizer is not None
    assert [block["type"] for block in model.config["layers"]].count("mlp") == 3


def test_a_checkpoint_is_converted_there_and_back(tmp_path: Path) -> None:
    STOCK["nemotron_h"].write(tmp_path / "source")
    printed = run("convert.py", tmp_path / "source", tmp_path / "ours")
    assert "2 mamba2, 1 moe, 1 attention, 1 mlp" in printed
    assert "tensors of a nemotron_h checkpoint, bit for bit" in printed
    assert (tmp_path / "ours" / "model.safetensors").is_file()
