"""The bench of drafts: on a small model with random weights, with made-up times, and on the held-out text."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_stand_ins import made_up_speculation
from draws import DEVICE
from hybrids import GATED_DELTANET, MAMBA2, MLP, build, config

from replayssm import generate
from replayssm.bench import held_out, report, speculative, speculative_report
from replayssm.bench.command import add_parser
from replayssm.bench.command import run as run_bench
from replayssm.bench.progress import Progress
from replayssm.drafters.mtp import MTPHead
from replayssm.models import HybridLM

RUN_KEYS = [
    *("drafter", "batch", "num_drafts", "max_new_tokens", "mean_length", "proposed", "accepted", "tokens_s"),
    *("tokens_s_spread", "plain_tokens_s", "plain_tokens_s_spread", "speedup", "texts", "texts_differing"),
    "texts_wrong",
]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HybridLM:
    """Stands for the bundled model, and everything is short."""
    model = build(config(MAMBA2, MLP, GATED_DELTANET, vocab_size=256), torch.float32).eval()
    model.mtp = MTPHead(24, 16, device=DEVICE)
    monkeypatch.setattr(speculative, "from_pretrained", lambda name, device: (model, None))
    monkeypatch.setattr(speculative, "PROMPT", 12)
    monkeypatch.setattr(speculative, "FIRST", 4)
    monkeypatch.setattr(speculative, "ROUNDS", 2)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    return model


def bench(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(dest="command"))
    return run_bench(parser.parse_args(["bench", "speculative", *arguments]))


def written(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("speculative_*.json")
    return report.load(path)


def test_every_drafter_is_measured_beside_no_drafts(
    small: HybridLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--batch", "2", "--num-drafts", "3", "--max-new-tokens", "16", "--commit", "abc") == 0
    document = written(tmp_path)
    assert document["command"] == (
        "replayssm bench speculative --batch 2 --drafter prompt_lookup mtp draft --num-drafts 3 --max-new-tokens 16"
    )
    assert document["commit"] == "abc"
    assert [list(run) for run in document["runs"]] == [RUN_KEYS] * 3
    lookup, head, itself = document["runs"]
    assert itself["mean_length"] == pytest.approx(19 / 5)  # of 20 tokens the prompt gives one, and 5 steps the rest
    assert min(lookup["mean_length"], head["mean_length"]) >= 1
    assert max(lookup["mean_length"], head["mean_length"]) < itself["mean_length"]
    for run in document["runs"]:
        assert (run["batch"], run["texts"], run["texts_wrong"]) == (2, 4, 0)
        assert run["speedup"] == run["tokens_s"] / run["plain_tokens_s"] > 0
    shown = capsys.readouterr()
    assert speculative_report.table(document) in shown.out
    if DEVICE.type == "cpu":
        assert "driver" not in shown.out
    assert "batch 2: no drafts" in shown.err


def test_a_model_without_a_head_is_measured_without_it(small: HybridLM, tmp_path: Path) -> None:
    small.mtp = None
    assert bench("--batch", "1", "--max-new-tokens", "16") == 0
    assert [run["drafter"] for run in written(tmp_path)["runs"]] == ["prompt_lookup", "draft"]
    with pytest.raises(ValueError, match="MTP head"):
        bench("--batch", "1", "--drafter", "mtp")


def test_a_text_that_rounding_does_not_explain_is_left_out(
    small: HybridLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def faulty(*arguments: Any, drafter: object, **options: Any) -> Any:
        tokens = generate(*arguments, drafter=drafter, **options)
        if drafter == "mtp":
            tokens[0, -1] = (tokens[0, -1] + 1) % 256
        return tokens

    monkeypatch.setattr(speculative, "generate", faulty)
    assert bench("--batch", "2", "--drafter", "mtp", "prompt_lookup", "--max-new-tokens", "16") == 1
    assert [run["drafter"] for run in written(tmp_path)["runs"]] == ["prompt_lookup"]
    shown = capsys.readouterr().err
    assert "batch 2, mtp: LEFT OUT, 2 texts are wrong" in shown
    assert "1 of 2 cases gave other texts" in shown


def test_rounding_explains_two_tokens_that_are_equally_likely_and_no_others(small: HybridLM) -> None:
    prompt = torch.tensor(list(b"\0def main("))
    plain = generate(small, prompt.unsqueeze(0), max_new_tokens=6)[0]
    other = plain.clone()
    other[4] = (other[4] + 1) % 256
    assert not speculative.explained(small, prompt, plain, other)
    with torch.no_grad():
        small.lm_head.weight[other[4]] = small.lm_head.weight[plain[4]]
    assert speculative.explained(small, prompt, plain, other)
    both = other.clone()
    both[4] = (both[4] + 1) % 256
    assert not speculative.explained(small, prompt, other, both)


def test_the_first_tokens_are_not_in_the_times(small: HybridLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt and its graph take 5 s, a token 10 ms without drafts, and 4 ms with."""
    begun: list[tuple[str | None, int]] = []

    def timed(model: HybridLM, ids: torch.Tensor, num_tokens: int, drafter: str | None, *rest: Any) -> Any:
        begun.append((drafter, num_tokens))
        return 5 + num_tokens * (0.01 if drafter is None else 0.004), torch.zeros(len(ids), num_tokens)

    monkeypatch.setattr(speculative, "_timed", timed)
    (entry,) = speculative.measure_batch(small, 3, ["mtp"], 4, 50, Progress(1, 6))
    assert entry["plain_tokens_s"] == pytest.approx(3 / 0.01)
    assert entry["tokens_s"] == pytest.approx(3 / 0.004)
    assert entry["speedup"] == pytest.approx(2.5)
    turn = [(None, 4), (None, 54), ("mtp", 4), ("mtp", 54)]
    assert begun == [(None, 4), ("mtp", 4), *turn, *turn]


def test_prompts_are_other_pieces_of_held_out_modules_in_each_round() -> None:
    texts = held_out.held_out_documents().values()
    rounds = [[bytes(ids) for ids in speculative.prompts(64, number).tolist()] for number in range(3)]
    every = [prompt for prompts in rounds for prompt in prompts]
    assert len(set(every)) == 3 * 64
    for prompt in every:
        assert len(prompt) == speculative.PROMPT
        assert prompt[:1] == held_out.SEPARATOR
        assert any(prompt[1:] in text for text in texts)
    assert not any(text.startswith(prompt[1:]) for prompt in every for text in texts)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--batch", "4", "0"), "--batch must be at least 1; got 0"),
        (("--num-drafts", "0"), "--num-drafts must be at least 1; got 0"),
        (("--max-new-tokens", "15"), "--max-new-tokens must be at least 16; got 15"),
    ],
)
def test_impossible_options_are_refused(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        bench(*arguments)


def test_a_report_has_a_row_for_each_run_and_names_each_loss() -> None:
    document = made_up_speculation()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in speculative_report.table(document).splitlines()
    ]
    assert rows[2] == ["prompt lookup", "1", "4", "1.50", "25%", "1,500 ± 10", "1,000 ± 5", "1.50"]
    assert len(rows) == 2 + len(document["runs"])
    assert speculative_report.losses(document) == "Where it does not help: prompt lookup at batch 256 (0.90x)."
    document["runs"][1]["speedup"] = 1.0
    assert "No case" in speculative_report.losses(document)
    told = speculative_report.conditions(document)
    assert "4 of 1542 differ" in told
    assert all(f"<{name}>" in told for name in ("gpu", "driver", "torch", "triton", "commit"))
    assert speculative_report.plots(document) == {}


@pytest.mark.parametrize("option", ["--batch", "--num-drafts", "--max-new-tokens"])
def test_a_number_beyond_64_bits_is_refused_by_name(small: HybridLM, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be an int of 64 bits; got 1{'0' * 20}. Give another number."):
        bench(option, str(10**20))


def test_prompts_beyond_memory_are_refused_before_one_is_made() -> None:
    with pytest.raises(RuntimeError, match="allocate"):
        speculative.prompts(10**13, 0)
