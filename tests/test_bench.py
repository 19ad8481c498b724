"""The bench: what it counts, how it takes times, what it refuses to time, and what it makes of the figures."""

import argparse
import importlib.util
import json
import math
import os
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import budgets
import pytest
import torch
from draws import DEVICE
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from replayssm import ReplayGatedDeltaNet, ReplayKDA, ReplayMamba2, ReplayStateCache
from replayssm.bench import gate, kernel, report, timing
from replayssm.bench.cases import CASES, PUBLISHED, Case
from replayssm.bench.command import add_parser, run
from replayssm.bench.gate import Trial
from replayssm.bench.progress import Progress
from replayssm.bench.sequences import Sequences
from replayssm.bench.timing import Time
from replayssm.ops.records import Records, Recurrence
from replayssm.ops.reference import flush_ref, replay_ref
from replayssm.plan import state_bytes

SMALL = [Case(each.layer, "small", 2, 8, 32, 2 if each.layer == "kda" else 1, each.recurrence) for each in CASES]
TRITON = importlib.util.find_spec("triton") is not None and (
    DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
)
needs_triton = pytest.mark.skipif(not TRITON, reason="needs triton and a GPU or its interpreter")
by_layer = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.layer)


class PlainKernels:
    """The two verbs of the decode kernels, row by row with the token loop; with a fault if one is named."""

    def __init__(self, fault: str = "none"):
        self.fault = fault

    def replay(
        self,
        q: Tensor,
        records: Records,
        checkpoint: Tensor,
        ring: Records,
        u: Tensor | None,
        flushing: Tensor,
        seqlen: Tensor,
        flushed: Tensor,
        *,
        recurrence: Recurrence,
    ) -> Tensor:
        if self.fault != "never folds":
            self.flush(flushing, checkpoint, ring, seqlen, flushed, recurrence=recurrence)
        outputs = []
        for row, (end, begin, folds) in enumerate(
            zip(seqlen.tolist(), flushed.tolist(), flushing.tolist(), strict=True)
        ):
            begin = end if folds else begin
            if self.fault == "reads a dead slot":
                begin -= 1
            slots = ring.k.shape[1]
            at = (end + (self.fault == "appends a slot too far")) % slots
            for field, new in zip(ring, records, strict=True):
                field[row, at] = new[row, 0]
            live = [token % slots for token in range(begin, end)] + [at]
            tokens = Records(*(field[row : row + 1, live].float() for field in ring))
            state = checkpoint[row : row + 1]
            outputs.append(replay_ref(q[row : row + 1].float(), tokens, state, delta=recurrence.delta))
        y = torch.cat(outputs)
        return y.bfloat16().float() if self.fault == "rounds its outputs" else y

    def flush(
        self,
        which: Tensor,
        checkpoint: Tensor,
        ring: Records,
        seqlen: Tensor,
        flushed: Tensor,
        *,
        recurrence: Recurrence,
    ) -> None:
        for row in which.nonzero().flatten().tolist():
            tokens = range(int(flushed[row]), int(seqlen[row]) - (self.fault == "folds one record too few"))
            if tokens:
                live = [token % ring.k.shape[1] for token in tokens]
                folded = Records(*(field[row : row + 1, live].float() for field in ring))
                checkpoint[row] = flush_ref(folded, checkpoint[row : row + 1], delta=recurrence.delta)[0]


FAULTS = (
    "never folds",
    "folds one record too few",
    "appends a slot too far",
    "reads a dead slot",
    "rounds its outputs",
)


def plain_step(case: Case, fault: str = "none") -> gate.Step:
    """A conventional step by the token loop."""

    def step(state: Tensor, q: Tensor, records: Records, y: Tensor) -> None:
        tokens = Records(*(field.float() for field in records))
        y.copy_(replay_ref(q.float(), tokens, state, delta=case.recurrence.delta))
        if fault != "leaves the state":
            state.copy_(flush_ref(tokens, state, delta=case.recurrence.delta))

    return step


# what it counts


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.layer)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_case_counts_the_bytes_that_a_cache_of_its_layer_keeps(case: Case, dtype: torch.dtype) -> None:
    sizes: Any = dict(nheads=case.nheads, headdim=case.headdim, d_state=case.d_state, device="meta", dtype=dtype)
    layer = {
        "mamba2": lambda: ReplayMamba2(64, ngroups=case.ngroups, **sizes),
        "gdn": lambda: ReplayGatedDeltaNet(64, ngroups=case.ngroups, **sizes),
        "kda": lambda: ReplayKDA(64, **sizes),
    }[case.layer]()
    kept = state_bytes(ReplayStateCache(layer, 1, window=16, device="meta"))
    assert kept.state == case.state_bytes
    q, records = case.draw(1, 1, dtype=dtype, device="cpu", seed=0)
    assert case.record_bytes(dtype) == sum(field.nbytes for field in records)
    assert q.shape == records.k.shape == (1, 1, case.ngroups, case.d_state)
    assert records.v.shape == (1, 1, case.nheads, case.headdim)
    assert layer.recurrence == case.recurrence


@by_layer
@given(batch=st.integers(1, 4), window=st.integers(1, 9))
def test_bytes_are_those_of_the_tensors_that_a_window_must_touch(case: Case, batch: int, window: int) -> None:
    dtype = torch.bfloat16
    q, new = case.draw(1, 1, dtype=dtype, device="cpu", seed=0)
    state, y = case.state_bytes, 4 * case.nheads * case.headdim
    record = sum(field.nbytes for field in new)
    u = 4 * new.v.numel() if case.recurrence.delta else 0
    needed = new.k.nbytes + new.g.nbytes + u if u else record
    total = 0
    for seqlen, flushed, flushing in timing.schedule(batch, window, spread=True, device="cpu"):
        for pending, folds in zip((seqlen - flushed).tolist(), flushing.tolist(), strict=True):
            total += state + pending * (record if folds else needed) + folds * state  # the ring, and the state
            total += q.nbytes + record + record + u + y  # read, appended, written
    assert case.replay_bytes(batch, window, dtype) == pytest.approx(total / window, abs=1)
    assert case.conventional_bytes(batch, dtype) == batch * (2 * state + q.nbytes + record + y)


# how it takes times


@given(batch=st.integers(1, 40), window=st.integers(0, 20), spread=st.booleans())
def test_the_timed_steps_are_those_of_a_cache_and_flush_each_row_once(batch: int, window: int, spread: bool) -> None:
    steps = timing.schedule(batch, window, spread=spread, device="cpu")
    period = max(window, 1)
    assert len(steps) == period
    for (seqlen, flushed, flushing), (next_seqlen, next_flushed, _) in zip(steps, steps[1:] + steps[:1], strict=True):
        pending = seqlen - flushed
        assert ((pending >= 1) & (pending <= period)).all()
        assert torch.equal(flushing, pending + 1 > window)
        if next_seqlen is not steps[0].seqlen:
            assert torch.equal(next_seqlen, seqlen + 1)
            assert torch.equal(next_flushed, torch.where(flushing, seqlen, flushed))
        else:  # the window closes: the next one begins with the same numbers of pending records
            assert torch.equal(next_seqlen - next_flushed, seqlen + 1 - torch.where(flushing, seqlen, flushed))
    flushes = torch.stack([step.flushing for step in steps])
    assert torch.equal(flushes.sum(0), torch.ones(batch, dtype=torch.int64))
    if spread:
        assert flushes.sum(1).max() <= math.ceil(batch / period)
    else:
        assert flushes[-1].all()


@given(st.integers(1, 10**10))
def test_copies_of_a_state_outgrow_the_cache_and_no_more_are_made(set_bytes: int) -> None:
    count = timing.copies(set_bytes)
    assert (count - 1) * set_bytes < timing.COLD_BYTES <= count * set_bytes


@given(st.lists(st.floats(1, 1e6), min_size=2), st.integers(1, 50))
def test_a_summary_is_per_step_and_lies_within_what_was_taken(taken: list[float], steps: int) -> None:
    median, spread = timing.summary(taken, steps)
    assert min(taken) / steps <= median * (1 + 1e-12)
    assert median <= max(taken) / steps * (1 + 1e-12)
    assert -1e-9 <= spread <= (max(taken) - min(taken)) / steps * (1 + 1e-12)
    assert timing.summary([5.0] * 20 + [1e6], 5) == Time(1.0, 0.0)  # one outlier moves neither


# what it refuses to time


@by_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gate_lets_the_token_loop_pass(case: Case, dtype: torch.dtype) -> None:
    verdict = gate.check(
        case, 3, 4, dtype=dtype, device=torch.device("cpu"), kernels=PlainKernels(), step=plain_step(case)
    )
    assert verdict.passed, verdict


@by_layer
@pytest.mark.parametrize("fault", FAULTS)
def test_the_gate_stops_faulty_kernels(case: Case, fault: str) -> None:
    trial = Trial(case, 3, gate.tokens_for(4), dtype=torch.bfloat16, device="cpu")
    assert not trial.replay_error(PlainKernels(fault), 4) <= trial.budget


@by_layer
def test_the_gate_stops_a_conventional_step_that_leaves_the_state(case: Case) -> None:
    verdict = gate.check(
        case,
        2,
        2,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        kernels=PlainKernels(),
        step=plain_step(case, "leaves the state"),
    )
    assert verdict.replay_error <= verdict.budget < verdict.conventional_error
    assert not verdict.passed


def test_a_wrong_window_0_or_a_nan_fails_the_gate() -> None:
    assert not gate.Verdict(math.nan, 0.0, 1.0).passed
    assert not gate.Verdict(0.0, math.nan, 1.0).passed

    class WrongAtWindow0(PlainKernels):
        def replay(
            self, q: Tensor, records: Records, checkpoint: Tensor, ring: Records, *rest: Any, **named: Any
        ) -> Any:
            y = super().replay(q, records, checkpoint, ring, *rest, **named)
            return y * torch.nan if ring.k.shape[1] == 2 else y

    case = SMALL[0]
    device = torch.device("cpu")
    verdict = gate.check(
        case, 2, 3, dtype=torch.float32, device=device, kernels=WrongAtWindow0(), step=plain_step(case)
    )
    assert math.isnan(verdict.replay_error)


def test_the_gate_is_no_looser_than_the_tests() -> None:
    assert gate.SLACK <= budgets.SLACK32


@needs_triton
@by_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_conventional_step_is_right_in_every_shape(case: Case, dtype: torch.dtype) -> None:
    from replayssm.bench import conventional, tune

    case = Case(case.layer, "small", 2, 64, 128, case.ngroups, case.recurrence)
    trial = Trial(case, 2, 2, dtype=dtype, device=DEVICE)
    for config in conventional.CONFIGS[:: 1 if DEVICE.type == "cuda" else 5]:
        assert trial.conventional_error(tune.step_with(config, case)) <= trial.budget, config


@needs_triton
def test_a_configuration_that_is_wrong_cannot_win(monkeypatch: pytest.MonkeyPatch) -> None:
    from replayssm.bench import conventional, tune

    case = SMALL[1]
    right = conventional.step

    def step(config: Any, state: Tensor, *rest: Any) -> None:
        right(config, state, *rest)
        if config.num_warps == 1:  # a result of the right size, and a wrong one
            state.mul_(1 + 1e-4)

    monkeypatch.setattr(conventional, "step", step)
    monkeypatch.setattr(timing, "measure", made_up_times)
    states = [gate.random_state(case, 2, DEVICE)]
    assert tune.tune(case, states, dtype=torch.float32).num_warps == 2
    monkeypatch.setattr(conventional, "step", lambda config, state, *rest: state.zero_())
    with pytest.raises(RuntimeError, match="must be right to be timed"):
        tune.tune(case, states, dtype=torch.float32)


@needs_triton
def test_the_streaming_sum_reads_every_value() -> None:
    from replayssm.bench import ceiling

    x = torch.randint(-9, 9, (8 * 1024,), device=DEVICE).float()
    for tiles, block in [(1, 1024), (4, 512), (8, 1024)]:
        assert torch.equal(ceiling.sums(x, tiles, block, 4), x.view(-1, tiles * block).sum(1))


def made_up_times(arms: Sequence[Sequence[Callable[[], object]]], rounds: int = 0) -> list[Time]:
    """Every step runs once; the first arm is the fastest."""
    for steps in arms:
        for step in steps:
            step()
    return [Time(10.0 + index, 0.5) for index in range(len(arms))]


GEOMETRY_KEYS = ["layer", "geometry", "nheads", "headdim", "d_state", "ngroups"]
TIME_KEYS = [
    *("conventional_us", "conventional_config", "conventional_tb_s", "replay_us", "replay_spread_us"),
    *("conventional_spread_us", "nonflush_us", "flush_us", "aligned_us", "window0_us"),
]
RUN_KEYS = [
    *(*GEOMETRY_KEYS, "window", "dtype", "batch", *TIME_KEYS),
    *("bytes_conventional", "bytes_replay", "percent_of_ceiling", "speedup", "gate"),
]


@needs_triton
@by_layer
def test_a_measured_case_has_every_figure(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timing, "measure", made_up_times)
    monkeypatch.setattr(timing, "COLD_BYTES", 2 * case.state_bytes)
    measured = dict(window=2, dtype=torch.bfloat16, device=DEVICE, ceiling=4.0, progress=Progress(1, 3))
    entry = kernel.measure_case(case, 1, kernels=PlainKernels(), **measured)
    assert entry is not None
    assert list(entry) == RUN_KEYS
    assert list(entry["gate"]) == ["replay_error", "conventional_error", "budget"]
    assert (entry["conventional_us"], entry["replay_us"], entry["speedup"]) == (10.0, 11.0, 10 / 11)
    assert (entry["nonflush_us"], entry["flush_us"], entry["aligned_us"], entry["window0_us"]) == (12, 13, 12.5, 14)
    json.dumps(entry)
    assert "0.91x" in capsys.readouterr().err

    def never(*arguments: Any, **named: Any) -> None:
        raise AssertionError("a case with wrong results was timed")

    from replayssm.bench import arms

    monkeypatch.setattr(arms, "time_arms", never)
    assert kernel.measure_case(case, 1, kernels=PlainKernels(FAULTS[0]), **measured) is None
    shown = capsys.readouterr().err
    assert "NOT TIMED" in shown
    assert "x\n" not in shown


@needs_triton
@by_layer
def test_the_decode_kernels_pass_the_gate(case: Case) -> None:
    triton_decode = pytest.importorskip("replayssm.ops.triton_decode")
    from replayssm.bench import conventional, tune

    step = tune.step_with(conventional.CONFIGS[0], case)
    verdict = gate.check(case, 2, 2, dtype=torch.bfloat16, device=DEVICE, kernels=triton_decode, step=step)
    assert verdict.passed, verdict


def test_sequences_that_are_timed_hold_finite_records_only() -> None:
    for case in SMALL:
        sequences = Sequences(case, gate.random_state(case, 2, "cpu"), window=5, dtype=torch.bfloat16, seed=0)
        assert all(len(field[0]) == 6 and torch.isfinite(field).all() for field in sequences.ring)
        assert (sequences.u is not None) == case.recurrence.delta
        sequences.poison()
        assert all(torch.isnan(field).all() for field in sequences.ring)


# what it makes of the figures


def made_up_document() -> dict[str, Any]:
    """A JSON in which replay is slower at batch 1 and 1.5 times as fast elsewhere."""
    runs = []
    for case in CASES:
        for batch in (1, 32, 256):
            speedup = 0.8 if batch == 1 else 1.5
            figures = dict.fromkeys(TIME_KEYS, 10.0) | {"conventional_us": speedup * 10, "conventional_tb_s": 3.9}
            about = {key: getattr(case, key) for key in GEOMETRY_KEYS}
            rest = dict(window=16, dtype="bfloat16", batch=batch, speedup=speedup, percent_of_ceiling=75.0)
            runs.append(about | rest | figures)
    names = ("command", "date", "commit", "gpu", "driver", "torch", "triton", "python")
    return {name: f"<{name}>" for name in names} | {"read_ceiling_tb_s": 4.5, "runs": runs}


def test_a_table_has_a_row_for_each_run_and_names_each_loss() -> None:
    document = made_up_document()
    rows = report.table(document).splitlines()[2:]
    assert len(rows) == len(document["runs"])
    assert len({len(row) for row in rows}) == 1
    said = report.losses(document)
    assert all(f"{name} at batch 1 (0.80x)" in said for name in report.NAMES.values())
    assert "batch 32" not in said
    for each in document["runs"]:
        each["speedup"] = 1.0
    assert "No case" in report.losses(document)
    assert all(f"<{name}>" in report.conditions(document) for name in ("gpu", "driver", "torch", "triton", "commit"))


def test_the_plot_shows_every_point_inside_its_panel() -> None:
    document = made_up_document()
    document["runs"][0]["percent_of_ceiling"] = 20.0  # a floor of 4, at batch 1
    drawing = ElementTree.fromstring(report.plot(document))
    svg = "{http://www.w3.org/2000/svg}"
    dots = list(drawing.iter(f"{svg}circle"))
    diamonds = list(drawing.iter(f"{svg}polygon"))
    published = sum(each.speedup is not None for by_batch in PUBLISHED.values() for each in by_batch.values())
    assert len(dots) == len(document["runs"]) + 1  # and one in the legend
    assert len(diamonds) == published + 1
    for panel in drawing.iter(f"{svg}g"):
        heights = [float(dot.get("cy", "nan")) for dot in panel.iter(f"{svg}circle")]
        places = [float(dot.get("cx", "nan")) for dot in panel.iter(f"{svg}circle")]
        assert heights[0] > heights[1] == heights[2] > 0  # 0.8, then 1.5 twice: up is faster
        assert places == sorted(places)
        ends = [float(line.get("y1", "nan")) for line in panel.iter(f"{svg}line")]
        grid = [float(text.get("y", "nan")) - 4 for text in panel.iter(f"{svg}text") if text.get("x") == "-6.0"]
        assert min(grid) <= min(ends)
        assert max(ends) <= max(grid)
        assert places[-1] < max(float(line.get("x2", "nan")) for line in panel.iter(f"{svg}line"))


def test_a_report_rewrites_its_block_and_its_plot_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    options = argparse.Namespace(json=None)
    with pytest.raises(ValueError, match="Run: replayssm bench kernel"):
        report.run(options)
    for name, date in [("a", "2026-02-01"), ("b", "2026-01-01")]:
        (tmp_path / f"kernel_{name}.json").write_text(json.dumps(made_up_document() | {"date": date, "gpu": name}))
    with pytest.raises(ValueError, match="source checkout"):
        report.run(options)
    (tmp_path / "docs").mkdir()
    readme = tmp_path / "README.md"
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="once each"):
        report.run(options)
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for _ in range(2):  # again: the same
        assert report.run(options) == 0
        text = readme.read_text(encoding="utf-8")
        assert text.startswith(f"before\n{report.BEGIN}\n")
        assert text.endswith(f"\n{report.END}\nafter\n")
        assert "old" not in text
        assert "one a (driver" in text  # the newest by its date, not by its name
        ElementTree.parse(tmp_path / report.PLOT)


def test_the_readme_shows_the_newest_measurement() -> None:
    if not list(report.RESULTS.glob("kernel_*.json")):
        pytest.skip("nothing has been measured yet")
    document = report.load(report.newest())
    readme = (report.ROOT / "README.md").read_text(encoding="utf-8")
    assert report.with_block(readme, report.block(document)) == readme, "run: replayssm bench report"
    assert (report.ROOT / report.PLOT).read_text(encoding="utf-8") == report.plot(document)


# the commands


def bench(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(dest="command"))
    return run(parser.parse_args(["bench", *arguments]))


def test_without_a_gpu_the_model_is_printed_and_nothing_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench("kernel", "--layer", "mamba2", "gdn", "--batch", "1", "256") == 0
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("| ")]
    assert [row[:3] for row in rows[2:]] == [
        [case.layer, case.geometry, batch] for case in CASES[:2] for batch in ("1", "256")
    ]
    assert [row[-1] for row in rows[2:]] == ["1.81", "1.81", "1.79", "1.79"]
    assert "Nothing was timed" in shown


@pytest.mark.parametrize("failing", [None, "gdn"])
def test_a_run_writes_what_passed_and_says_what_did_not(
    failing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ceiling = pytest.importorskip("replayssm.bench.ceiling")
    document = made_up_document()

    def measured(case: Case, batch: int, **named: Any) -> dict[str, Any] | None:
        assert (named["window"], named["dtype"], named["ceiling"]) == (16, torch.bfloat16, 4.5)
        entry = next(each for each in document["runs"] if (each["layer"], each["batch"]) == (case.layer, batch))
        return None if case.layer == failing else entry

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(ceiling, "read_ceiling", lambda device: 4.5)
    monkeypatch.setattr(kernel, "measure_case", measured)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert bench("kernel", "--batch", "1", "32", "--commit", "abc") == (failing is not None)
    written = report.load(tmp_path / "kernel_nvidia-h200.json")
    assert set(written) == set(document)
    assert (written["gpu"], written["commit"], written["python"]) == ("NVIDIA H200", "abc", platform.python_version())
    assert written["command"].endswith("--batch 1 32 --window 16 --dtype bfloat16")
    expected = [each for each in document["runs"] if each["batch"] < 256 and each["layer"] != failing]
    assert written["runs"] == expected
    shown = capsys.readouterr()
    assert report.table(written) in shown.out
    assert ("2 of 6 cases gave wrong results" in shown.err) == (failing is not None)
    report.block(written), report.plot(written)  # a JSON without a case can still be shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--window", "1"), "--window must be 2 to 64 tokens; got 1"),
        (("--window", "65"), "--window must be 2 to 64 tokens; got 65"),
        (("--batch", "4", "0"), "--batch must be at least 1; got 0"),
        (("--layer", "gdn", "--geometry", "kimi-linear"), "must name one case at least"),
    ],
)
def test_impossible_options_are_refused(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        bench("kernel", *arguments)


def test_the_commands_need_no_triton() -> None:
    script = "import sys; sys.modules['triton'] = None; import replayssm.bench.command"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_draws_a_bar_in_a_terminal_and_says_each_part_elsewhere(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    progress = Progress(2, 2)
    progress.stage("first")
    progress.part("one done")  # a part that ended early
    progress.stage("second")
    progress.stage("third")
    progress.part("two done")
    shown = capsys.readouterr().err
    if terminal:
        assert [f"{percent:3} %" in shown for percent in (0, 50, 75)] == [True] * 3
    else:
        assert shown == "one done\ntwo done\n"
