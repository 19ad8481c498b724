"""What the README says is what the code does."""

import re
from pathlib import Path

import pytest
import torch

import replayssm
from replayssm.hf.mixer import MIXERS
from replayssm.hf.versions import NEWEST, OLDEST
from replayssm.models import from_pretrained
from replayssm.plan import StateBytes, conventional_traffic, replay_traffic

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BUNDLED = (ROOT / "models/tiny/README.md").read_text(encoding="utf-8")

# name in the table of the README -> bytes of state and of a record, fp32 state and bf16 activations
GEOMETRIES = {
    "Mamba-2": StateBytes(128 * 64 * 128 * 4, 8 * 128 * 2 + 128 * 64 * 2 + 128 * 4 + 128 * 4),
    "Gated DeltaNet": StateBytes(32 * 128 * 128 * 4, 16 * 128 * 2 + 32 * 128 * 2 + 32 * 4 + 32 * 4),
    "KDA": StateBytes(32 * 128 * 128 * 4, 32 * 128 * 2 + 32 * 128 * 2 + 32 * 128 * 4 + 32 * 4),
}


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(import torch.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "tensor([17])" in shown  # 16 bytes of prompt, and the one token kept
    assert "'checkpoint'" in shown


def test_the_example_of_speculation_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(acceptance = .*?)```", README, re.DOTALL)
    model, tokenizer = from_pretrained("tiny")
    ids = torch.tensor([tokenizer.encode("import os\n\n\ndef ")])
    names = {"replayssm": replayssm, "model": model, "ids": ids}
    exec(compile(example, "README.md", "exec"), names)
    (said,) = re.findall(r"# (mean accepted length .*)", example)
    assert capsys.readouterr().out.strip() == said
    assert torch.equal(names["tokens"], replayssm.generate(model, ids, max_new_tokens=64))


def test_the_example_of_draft_trees_keeps_what_plain_decoding_writes() -> None:
    (example,) = re.findall(r"```python\n(from replayssm.trees import .*?)```", README, re.DOTALL)
    model, tokenizer = from_pretrained("tiny")
    ids = torch.tensor([tokenizer.encode("import os\n\n\ndef ")])
    first, second, third, fourth = replayssm.generate(model, ids, max_new_tokens=4)[0].tolist()
    cache = replayssm.ReplayStateCache(model, 1, step_tokens=4, max_seqlen=32)
    drafts = torch.tensor([[first, second, second + 1, third]])
    names = {"torch": torch, "model": model, "cache": cache, "drafts": drafts}
    with torch.no_grad():
        model(ids, cache)
        cache.commit()
        exec(compile(example, "README.md", "exec"), names)
    assert names["n"].tolist() == [3]
    assert names["path"].tolist() == [[0, 1, 3, -1]]
    assert names["targets"][0, 3].item() == fourth
    assert cache.seqlen.tolist() == [ids.shape[1] + 3]


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_table_of_bytes_follows_from_the_traffic_model(name: str) -> None:
    (row,) = [line for line in README.splitlines() if line.startswith(f"| {name}, ")]
    conventional, replay, ratio = (float(cell.split()[0]) for cell in row.split("|")[2:5])
    counted = sum(conventional_traffic(GEOMETRIES[name])), sum(replay_traffic(GEOMETRIES[name], 16))
    assert conventional == pytest.approx(counted[0] / 2**20, abs=0.05)
    assert replay == pytest.approx(counted[1] / 2**20, abs=0.05)
    assert ratio == pytest.approx(counted[0] / counted[1], abs=0.005)


def test_the_figures_of_the_bundled_model_are_those_of_its_page() -> None:
    def figure(name: str) -> list[float]:
        (row,) = [line for line in BUNDLED.splitlines() if line.startswith(f"| {name} |")]
        return [float(x) for x in re.findall(r"[0-9.]+(?=[ ,])", row.split("|", 2)[2])]

    said = " ".join(README.split())
    (held_out,), (xz,) = figure("Held-out bits per byte"), figure("`xz -9` bits per byte")
    assert f"{held_out:.2f} bits per byte, where `xz -9` needs {xz:.2f}" in said
    (near,), far = figure("Bits per byte at 1K to 2K"), figure("Bits per byte at 64K to 128K")
    lengths = re.findall(r"^\| (?:mtp|prompt_lookup) \|.* \| ([0-9.]+) \|$", BUNDLED, re.MULTILINE)
    greedy, greedy_lookup, sampled, sampled_lookup = lengths
    assert f"{greedy} tokens a step against {greedy_lookup}" in said
    assert f"{sampled} against {sampled_lookup}" in said
    assert f"{near:.2f} at positions 1K to 2K and {max(far):.2f} on the same passages" in said


def test_the_releases_and_families_of_transformers_are_those_of_the_patch() -> None:
    said, (oldest, newest) = " ".join(README.split()), (".".join(map(str, release)) for release in (OLDEST, NEWEST))
    assert f"transformers {oldest} to {newest}" in said
    assert len({known.family for known in MIXERS.values()}) == 14
    assert "layers of fourteen families" in said
