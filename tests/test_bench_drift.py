"""The bench of smaller states: fed in pairs of steps as token by token, on known spectra, and its report."""

import argparse
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from bench_stand_ins import made_up_drift
from budgets import assert_e64
from draws import DEVICE, draw
from format_caches import NoValues, unreadable
from hybrids import ATTENTION, GATED_DELTANET, KDA, MAMBA2, MLP, WINDOWED, build, config, token_ids
from torch import Tensor

from replayssm import ReplayStateCache
from replayssm.bench import drift, drift_report, plot, report
from replayssm.bench.command import add_parser
from replayssm.bench.command import run as run_bench
from replayssm.bench.held_out import SEPARATOR
from replayssm.bench.spectra import read_error, spectra, stable_rank
from replayssm.models import HybridLM

WINDOW = 6


def hybrid(dtype: torch.dtype = torch.float64) -> HybridLM:
    """With the attention that the bundled model has; full attention would need to know the length."""
    return build(config(MAMBA2, MLP, GATED_DELTANET, WINDOWED, KDA, vocab_size=256), dtype)


def one_by_one(model: HybridLM, ids: Tensor, **formats: str | None) -> Tensor:
    """Logits (texts, tokens, vocab) of decoding that is given every token."""
    cache = ReplayStateCache(model, len(ids), window=WINDOW, backend="torch", **formats)
    logits = []
    with torch.no_grad():
        for token in ids.split(1, 1):
            logits.append(model(token, cache))
            cache.commit()
    return torch.cat(logits, 1)


@pytest.mark.parametrize("formats", [drift.ARMS[0], drift.ARMS[1], drift.ARMS[3], drift.ARMS[5]], ids=str)
def test_an_arm_sees_what_decoding_token_by_token_does(formats):
    """In fp64, where the order of sums cannot turn a rounding."""
    model, ids = hybrid(), token_ids(2, 4 * WINDOW)
    expected = one_by_one(model, ids, checkpoint="fp32", read_format=None)
    place = torch.zeros((), dtype=torch.int64, device=DEVICE)
    arm = drift.Arm(model, ids, expected, place, WINDOW, *formats)
    with torch.no_grad():
        drift.force([arm], place, 4, WINDOW)
    checkpoint, read_format = formats
    found = one_by_one(model, ids, checkpoint=checkpoint, read_format=read_format)
    log, other = expected.log_softmax(-1), found.log_softmax(-1)
    divergence = (log.exp() * (log - other)).sum(-1)
    # as near as the logits are to each other
    assert_e64(1 + arm.divergence, 1 + divergence, "divergence")
    assert torch.equal(arm.agrees, expected.argmax(-1) == found.argmax(-1))
    if formats != ("fp32", None):
        assert divergence[:, WINDOW:].mean() > 1e-9, "the formats change nothing: nothing is tested"


def test_the_expected_distributions_are_those_of_conventional_decoding():
    model, ids = hybrid(), token_ids(2, 40)
    with torch.no_grad():
        expected, states = drift.reference(model, ids)
    assert_e64(expected, one_by_one(model, ids, checkpoint="fp32", read_format=None), "logits")
    assert list(states) == [f"layers.{i}.mixer" for i in (0, 2, 4)]


def test_an_arm_waits_for_nothing():
    model, ids = hybrid(torch.float32), token_ids(2, 3 * WINDOW)
    place = torch.zeros((), dtype=torch.int64, device=DEVICE)
    with torch.no_grad(), unreadable():
        arm = drift.Arm(model, ids, torch.zeros(*ids.shape, 256, device=DEVICE), place, WINDOW, "fp16_sr", "lr_if4")
        with NoValues():
            arm.advance()


def test_a_model_with_full_attention_is_refused_by_its_cache():
    model = build(config(MAMBA2, ATTENTION, vocab_size=256), torch.float32)
    with torch.no_grad(), pytest.raises(ValueError, match="max_seqlen"):
        drift.measure(model, token_ids(1, 2 * WINDOW), WINDOW)


def test_texts_begin_apart_and_are_of_the_held_out_modules():
    ids = drift.texts(3, 500)
    assert ids.shape == (3, 500)
    assert (ids[:, 0] == SEPARATOR[0]).all()
    pieces = {bytes(row.tolist()) for row in ids}
    assert len(pieces) == 3
    stream = b"".join(text + SEPARATOR for text in drift.held_out_documents().values())
    assert all(piece[1:] in stream for piece in pieces)
    assert drift.texts(1, len(stream) + 100)[0, -99:].tolist() == list(stream[:99])


@pytest.mark.parametrize(
    ("tokens", "bins"),
    [(16, [[0, 16]]), (128, [[0, 128]]), (300, [[0, 128], [128, 256], [256, 300]])],
)
def test_bins_are_octaves(tokens, bins):
    assert drift.bins_of(tokens) == bins
    assert drift.bins_of(2**17)[-1] == [2**16, 2**17]


def test_spectra_tell_states_of_few_directions_from_others():
    one = torch.einsum("bhp,bhn->bhpn", draw(1, 2, 3, 40), draw(2, 2, 3, 48)).float()
    alike = torch.eye(48, device=DEVICE).expand(2, 3, 48, 48)
    assert stable_rank(one).sub(1).abs().max() < 1e-6
    assert stable_rank(alike).sub(48).abs().max() < 1e-6
    assert (read_error("lr_if4", one) < read_error("nvfp4", one) / 4).all()
    entry, other = spectra({"a": one, "b": alike})
    assert (entry["layer"], other["layer"]) == ("a", "b")
    assert all(len(entry[name]) == 3 for name in ("stable_rank", "nvfp4", "lr_if4"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A small model with random weights stands for the bundled one, and there are three arms."""
    model = hybrid(torch.float32).eval()
    monkeypatch.setattr(drift, "from_pretrained", lambda name, device, dtype: (model, None))
    monkeypatch.setattr(drift, "ARMS", (("fp32", None), ("nvfp4_sr", None), ("fp16_sr", "lr_if4")))
    monkeypatch.setattr(report, "RESULTS", tmp_path)


def bench(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(dest="command"))
    return run_bench(parser.parse_args(["bench", "drift", *arguments]))


def test_the_measurement_is_written_and_shown(small, tmp_path, capsys):
    assert bench("--tokens", "135", "--texts", "2", "--window", "5", "--commit", "abc") == 0
    (path,) = tmp_path.glob("drift_*.json")
    document: dict[str, Any] = report.load(path)
    assert document["command"] == "replayssm bench drift --tokens 135 --texts 2 --window 5"
    assert (document["window"], document["texts"], document["tokens"]) == (5, 2, 135)
    assert document["bins"] == [[0, 128], [128, 135]]
    exact, shared, apart = document["runs"]
    assert [run["checkpoint"] for run in document["runs"]] == ["fp32", "nvfp4_sr", "fp16_sr"]
    assert max(exact["kl"]) < min(apart["kl"]) < max(shared["kl"])
    assert exact["top1"] == [1, 1]
    assert shared["kept_bytes"] < exact["kept_bytes"] == exact["conventional_bytes"] // 2
    assert all(len(run["kl"]) == len(run["kl_by_text"]) == 2 for run in document["runs"])
    shown = capsys.readouterr()
    for part in (drift_report.table(document), drift_report.conditions(document), drift_report.spectra_table(document)):
        assert part in shown.out
    assert "135 tokens" in shown.err


@pytest.mark.parametrize("arguments", [["--window", "1"], ["--tokens", "8"]], ids=str)
def test_a_window_without_a_copy_to_read_is_refused(small, tmp_path, arguments):
    with pytest.raises(ValueError, match=r"--window must be at least 2 .* got \d+\. "):
        bench(*arguments)
    assert not list(tmp_path.iterdir())


def test_the_report_names_what_grows():
    document = made_up_drift(last=8e-3)
    assert drift_report.losses(document) == "Grows with length: nvfp4_sr (4.0x)."
    assert "None" in drift_report.losses(made_up_drift(last=2e-3))
    header, _, _, shared, _ = drift_report.table(document).splitlines()
    assert [cell.strip() for cell in header.split("|")][5:7] == ["KL 128-1K", "KL 1K-2K"]
    assert re.search(r"nvfp4_sr +\| it is +\| 0\.50 +\| 0\.14 .* 8\.0e-03 +\| 99\.00%", shared)
    told = drift_report.spectra_table(document)
    assert re.search(r"a +\| 1\.0 to 2\.5 .*\| 9\.0% .*\| 6\.0% .*\| 0\.50 .*\| 1\.00", told)


def test_the_plot_has_a_line_for_each_pair_on_logarithmic_axes():
    (drawing,) = drift_report.plots(made_up_drift(last=8e-3)).values()
    lines = re.findall(r'<polyline points="([^"]+)"', drawing)
    assert len(lines) == 3
    points = [tuple(map(float, point.split(","))) for point in lines[1].split()]
    places = [x for x, _ in points]
    assert places[2] - places[1] == pytest.approx((places[1] - places[0]) / 3, abs=0.2)  # 128, 1024, 2048
    assert "1K" in drawing
    heights = [y for _, y in points]
    decades = 10  # from 1e-12 to 1e-2
    assert heights[1] - heights[2] == pytest.approx(plot.HEIGHT / decades * 0.602, abs=0.2)  # a factor of 4
    ElementTree.fromstring(drawing)
