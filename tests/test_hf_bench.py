"""The bench of transformers' models: narrow ones with random weights, made-up times, and the published sizes."""

import argparse
import contextlib
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_stand_ins import made_up_transformers
from draws import DEVICE

pytest.importorskip("transformers")

from replayssm import hf
from replayssm.bench import hf_gate, hf_measure, hf_models, hf_report, hf_timing, report
from replayssm.bench.command import add_parser
from replayssm.bench.command import run as run_bench
from replayssm.bench.hf_cases import GEOMETRIES, PATCHES, Geometry
from replayssm.hf.cache_layer import ReplayLinearLayer
from replayssm.hf.mixer import ReplayMixer

RUN_KEYS = [
    *("model", "batch", "arm", "packages", "prefill_s", "prefill_s_spread", "step_ms", "step_ms_spread", "tokens_s"),
    *("generate_tokens_s", "prefill_gb", "decode_gb", "tokens_s_ratio", "generate_tokens_s_ratio"),
]
QWEN, NEMOTRON = GEOMETRIES
by_family = pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)


def small(geometry: Geometry) -> Any:
    return hf_models.build({**geometry.settings, **geometry.small}, dtype=torch.float32, device=DEVICE)


def bench(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(dest="command"))
    return run_bench(parser.parse_args(["bench", "hf", *arguments]))


# the check


@by_family
def test_a_patched_model_passes_with_exact_states_and_in_formats(geometry: Geometry) -> None:
    model = small(geometry)
    exact, formats = hf_gate.check(model, PATCHES).values()
    assert exact.passed
    assert formats.passed
    assert exact.allowed < formats.error, "states that hardly matter would hide faults"
    assert exact.agreement == 1.0
    assert exact.margin > 0
    assert not any(isinstance(module, ReplayMixer) for module in model.modules())


@by_family
def test_a_small_fault_in_what_a_patched_model_keeps_is_seen(
    geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part in a thousand, in one tensor of one layer, three tokens behind the prompt: a fault for each arm."""
    faults = ["checkpoint", "ring", "convolution", "nan"]
    coming, forward = iter(faults), ReplayLinearLayer.forward

    def faulty(self: Any, mixer: Any, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        y = forward(self, mixer, x, mask)
        if self.layer_idx == 0 and self.columns == hf_gate.PROMPT + 3:
            fault, state = next(coming), self.replay[0]
            kept = {"checkpoint": state.stored.checkpoint.planes[0], "ring": state.ring.v}.get(fault, state.conv)
            kept *= math.nan if fault == "nan" else 1.001
        return y

    monkeypatch.setattr(ReplayLinearLayer, "forward", faulty)
    verdicts = hf_gate.check(small(geometry), {fault: {} for fault in faults})
    assert next(coming, None) is None
    assert {fault: verdict.passed for fault, verdict in verdicts.items()} == dict.fromkeys(faults, False)


def test_a_mixer_that_does_not_replay_stops_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(QWEN)
    monkeypatch.setattr(hf, "patch", lambda model, **options: hf.Report({"a": "b"}, {"c": "d"}))
    with (
        pytest.raises(RuntimeError, match=r"every mixer must replay, 3 of them; got 1 of 2 mixers replay"),
        hf_models.patched(model, {}),
    ):
        pytest.fail("it was to be refused")


# the models


def test_models_have_the_published_sizes() -> None:
    meta, dtype = torch.device("meta"), torch.bfloat16
    models = [hf_models.build(geometry.settings, dtype=dtype, device=meta) for geometry in GEOMETRIES]
    assert [sum(parameter.numel() for parameter in model.parameters()) for model in models] == [
        4_205_751_296,
        3_973_556_832,
    ]
    assert [len(hf_models.mixers(model)) for model in models] == [24, 21]
    assert {parameter.dtype for model in models for parameter in model.parameters()} == {dtype}
    few = [hf_models.build({**each.settings, **each.few}, dtype=dtype, device=meta) for each in GEOMETRIES]
    assert [len(hf_models.mixers(model)) for model in few] == [3, 2]
    assert [model.config.hidden_size for model in few] == [model.config.hidden_size for model in models]


def test_kernels_of_packages_are_found_and_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A modeling file of two functions, for one of which transformers finds the package ``math``."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    @use_kernel_func_from_hub_with_fallback("sqrt", "math")
    def found(x: float) -> float:
        return -1.0

    @use_kernel_func_from_hub_with_fallback("sqrt", "a_package_that_does_not_exist")
    def missing(x: float) -> float:
        return -2.0

    module = types.ModuleType("modeling")
    vars(module).update(found=found, missing=missing, other=math.sqrt)
    model = small(QWEN)
    assert hf_models.fast_kernels(model) == {}, "the tests run without such packages"
    monkeypatch.setitem(sys.modules, type(hf_models.mixers(model)[0]).__module__, module)
    assert hf_models.fast_kernels(model) == {"found": "math"}
    assert hf_measure.packages_of(model, "unpatched") == ["math"]
    assert list(hf_measure.arms_of(model, ["replay"])) == ["unpatched", "torch path", "replay"]
    assert (module.found(9.0), module.missing(9.0)) == (3.0, -2.0)
    with hf_models.torch_path(model):
        assert (module.found(9.0), module.missing(9.0)) == (-1.0, -2.0)
    assert module.found is found


# the times


def test_the_prompt_and_the_steps_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt takes 3 s and gives the first token, a further one takes 0.25 s; the slow arm takes twice that."""
    now, factor, calls = 0.0, 1.0, []

    def generate(model: Any, ids: torch.Tensor, new_tokens: int, watch: Any) -> torch.Tensor:
        nonlocal now
        calls.append((model, new_tokens, factor))
        for seconds in [3.0, *[0.25] * (new_tokens - 1)]:
            now += factor * seconds
            watch(ids, ids)
        return torch.zeros(ids.shape[0], ids.shape[1] + new_tokens)

    class Slowed:
        def __enter__(self) -> None:
            nonlocal factor
            factor = 2.0

        def __exit__(self, *_: Any) -> None:
            nonlocal factor
            factor = 1.0

    monkeypatch.setattr(hf_timing, "greedy", generate)
    monkeypatch.setattr(hf_timing.time, "perf_counter", lambda: now)
    monkeypatch.setattr(hf_timing, "WARM_TOKENS", 5)
    ids, told = torch.zeros(4, 7), []
    arms = {"slow": Slowed, "fast": contextlib.nullcontext}
    figures = hf_timing.measure("model", ids, 9, arms, 2, told.append)
    assert figures["fast"]["prefill_s"] == pytest.approx(3.0)
    assert figures["fast"]["step_ms"] == pytest.approx(250.0)
    assert figures["fast"]["tokens_s"] == pytest.approx(4 / 0.25)
    assert figures["fast"]["generate_tokens_s"] == pytest.approx(4 * 9 / (3 + 8 * 0.25))
    assert figures["slow"]["tokens_s"] == pytest.approx(4 / 0.5)
    assert figures["slow"]["step_ms_spread"] == pytest.approx(0.0)
    turn = [("model", 9, 2.0), ("model", 9, 1.0)]
    assert calls == [("model", 5, 2.0), ("model", 5, 1.0), *turn, *turn]
    assert told[:3] == ["slow, warming up", "fast, warming up", "slow, round 1 of 2"]


def test_a_text_that_ends_early_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def ending(model: Any, ids: torch.Tensor, new_tokens: int, watch: Any) -> torch.Tensor:
        watch(ids, ids)
        return ids

    monkeypatch.setattr(hf_timing, "greedy", ending)
    with pytest.raises(RuntimeError, match=r"must end with \(2, 12\) tokens; got \(2, 3\)"):
        hf_timing.timed(None, torch.zeros(2, 3), 9)


# the command


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Everything is short, and goes to this folder."""
    monkeypatch.setattr(hf_gate, "NEW_TOKENS", 4)
    monkeypatch.setattr(hf_timing, "WARM_TOKENS", 2)
    monkeypatch.setattr(hf_measure, "ROUNDS", 1)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    return tmp_path


def test_every_model_is_measured_patched_and_unpatched(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--small", "--batch", "1", "3", "--prompt", "17", "--new-tokens", "16", "--commit", "abc") == 0
    (path,) = short.glob("hf_*.json")
    document = report.load(path)
    assert document["command"] == (
        "replayssm bench hf --models Qwen3.5-4B Nemotron-3-Nano-4B --batch 1 3 --prompt 17 --new-tokens 16 "
        "--dtype bfloat16 --small"
    )
    assert (document["commit"], document["small"], document["rounds"]) == ("abc", True, 1)
    runs = document["runs"]
    arms = ["unpatched", *PATCHES]
    assert [(run["model"], run["batch"], run["arm"]) for run in runs] == [
        (geometry.name, batch, arm) for geometry in GEOMETRIES for batch in (1, 3) for arm in arms
    ]
    unpatched = {(run["model"], run["batch"]): run for run in runs if run["arm"] == "unpatched"}
    for run in runs:
        more = [*PATCHES[run["arm"]], "check"] if run["arm"] in PATCHES else []
        assert sorted(run) == sorted(RUN_KEYS + more)
        baseline = unpatched[run["model"], run["batch"]]
        for rate in ("tokens_s", "generate_tokens_s"):
            assert run[f"{rate}_ratio"] == run[rate] / baseline[rate] > 0
    shown = capsys.readouterr()
    assert hf_report.table(document) in shown.out
    assert "Nemotron-3-Nano-4B: checked, in float32 error" in shown.err
    assert "Qwen3.5-4B, batch 3, tokens/s: unpatched" in shown.err


@pytest.mark.parametrize("failing", list(PATCHES))
def test_what_gives_other_logits_is_not_timed(
    failing: str, short: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(model: Any, arms: dict[str, Any]) -> dict[str, hf_gate.Verdict]:
        return {arm: hf_gate.Verdict(math.nan if arm == failing else 0.0, 0.5, 1.0, 0.1) for arm in arms}

    def measured(model: Any, ids: Any, new_tokens: int, arms: dict[str, Any], *_: Any) -> dict[str, Any]:
        return dict.fromkeys(arms, hf_timing.figures([hf_timing.Run(1.0, 1.0, 0, 0)], 64, new_tokens))

    monkeypatch.setattr(hf_gate, "check", check)
    monkeypatch.setattr(hf_timing, "measure", measured)
    assert bench("--small", "--models", "Qwen3.5-4B") == 1
    (path,) = short.glob("hf_*.json")
    document, shown = report.load(path), capsys.readouterr()
    timed = [run["arm"] for run in document["runs"]]
    if failing == "replay":
        assert timed == []
        assert "Qwen3.5-4B: NOT TIMED, patched it gives other logits: in float32 error nan" in shown.err
        assert "2 of 2 cases" in shown.err
    else:
        assert timed == ["unpatched", "replay"]
        assert "Qwen3.5-4B, replay_formats: LEFT OUT, it gives other logits: in torch.bfloat16 error nan" in shown.err
        assert "1 of 2 cases" in shown.err
    hf_report.block(document)  # a JSON without a case can still be shown


def test_a_batch_without_room_does_not_end_the_bench(
    short: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = hf_timing.timed

    def crowded(model: Any, ids: torch.Tensor, new_tokens: int) -> hf_timing.Run:
        if len(ids) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return timed(model, ids, new_tokens)

    monkeypatch.setattr(hf_timing, "timed", crowded)
    sizes = ("--batch", "3", "2", "--prompt", "17", "--new-tokens", "16")
    assert bench("--small", "--models", "Nemotron-3-Nano-4B", *sizes) == 1
    (path,) = short.glob("hf_*.json")
    assert {run["batch"] for run in report.load(path)["runs"]} == {2}
    shown = capsys.readouterr().err
    assert "Nemotron-3-Nano-4B, batch 3: NOT TIMED, no room: out of memory" in shown
    assert "2 of 4 cases" in shown


def test_without_a_gpu_the_published_models_are_not_timed(
    short: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench() == 0
    assert "Nothing was timed" in capsys.readouterr().out
    assert not list(short.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--batch", "4", "0"), "--batch must be at least 1; got 0"),
        (("--prompt", "16"), "--prompt must be at least 17; got 16"),
        (("--new-tokens", "15"), "--new-tokens must be at least 16; got 15"),
    ],
)
def test_impossible_options_are_refused(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        bench(*arguments)


# the report


def test_a_report_has_a_row_for_each_run_and_names_each_loss() -> None:
    document = made_up_transformers()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in hf_report.table(document).splitlines()[2:]
    ]
    assert len(rows) == len(document["runs"])
    assert [row[2] for row in rows[:4]] == [
        *("transformers, fla", "transformers, plain PyTorch", "replay", "replay, fp16_sr read as int8"),
    ]
    assert rows[2] == ["a", "1", "replay", "10.00 ± 0.25", "100", "2.00", "0.25 ± 0.01", "40", "1.25", "9.0", ""]
    said = hf_report.losses(document)
    assert said == "Where it does not help: a by replay, fp16_sr read as int8 at batch 1 (0.90x)."
    for run in document["runs"]:
        run["tokens_s_ratio"] = 1.0
    assert "No case" in hf_report.losses(document)
    told = hf_report.conditions(document)
    assert "it found kernels of fla" in told
    assert all(f"<{name}>" in told for name in ("gpu", "driver", "torch", "triton", "commit", "transformers"))
    assert hf_report.plots(document) == {}
    for run in document["runs"]:
        run["packages"] = []
    document["small"] = True
    told = hf_report.conditions(document)
    assert "no package with kernels for it" in told
    assert "narrow layers" in told
