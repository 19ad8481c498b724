"""The bench: what it counts, how it takes times, and what it refuses to time."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import budgets
import pytest
import torch
from bench_stand_ins import (
    FAULTS,
    RUN_KEYS,
    SMALL,
    TOKENS_FAULTS,
    VERIFY_KEYS,
    PlainKernels,
    by_layer,
    needs_triton,
    plain_native,
    plain_step,
)
from draws import DEVICE
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from replayssm import ReplayStateCache, plan
from replayssm.bench import arms, gate, kernel, timing, verify
from replayssm.bench.cases import CASES, Case
from replayssm.bench.gate import Trial
from replayssm.bench.progress import Progress
from replayssm.bench.sequences import Sequences
from replayssm.bench.timing import Time
from replayssm.cache.auto_window import LayerBytes
from replayssm.ops.records import Records
from replayssm.plan import conventional_step, replay_step

# what it counts


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.layer)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_case_is_its_layer(case: Case, dtype: torch.dtype) -> None:
    layer, sizes = case.build(dtype), case.layer_bytes(dtype)
    q, records = case.draw(1, 1, dtype=dtype, device="cpu", seed=0)
    assert sizes.state == case.state_bytes == 4 * case.nheads * case.headdim * case.d_state
    assert sizes.record == sum(field.nbytes for field in records)
    assert q.shape == records.k.shape == (1, 1, case.ngroups, case.d_state)
    assert records.v.shape == (1, 1, case.nheads, case.headdim)
    assert layer.recurrence == case.recurrence
    cache = ReplayStateCache(layer, 1, window=16, backend="triton", device="meta")
    assert case.layer_bytes(dtype) == LayerBytes.of(cache[0])


@by_layer
@given(batch=st.integers(1, 4), window=st.integers(1, 9))
def test_bytes_are_those_of_the_tensors_that_a_window_must_touch(case: Case, batch: int, window: int) -> None:
    q, new = case.draw(1, 1, dtype=torch.bfloat16, device="cpu", seed=0)
    state, y = case.state_bytes, 4 * case.nheads * case.headdim
    record = sum(field.nbytes for field in new)
    u = 4 * new.v.numel() if case.recurrence.delta else 0
    needed = new.k.nbytes + new.g.nbytes + u if u else record
    total = 0
    for seqlen, flushed, flushing in timing.schedule(batch, window, spread=True, device="cpu"):
        for pending, folds in zip((seqlen - flushed).tolist(), flushing.tolist(), strict=True):
            total += state + pending * (record if folds else needed) + folds * state  # the ring, and the state
            total += q.nbytes + record + record + u + y  # read, appended, written
    sizes = case.layer_bytes(torch.bfloat16)
    assert batch * replay_step(sizes, window).moved == pytest.approx(total / window, abs=2 * batch)  # reads and writes
    assert conventional_step(sizes).moved == 2 * state + q.nbytes + record + y


# how it takes times


@given(
    batch=st.integers(1, 40),
    window=st.integers(0, 40),
    spread=st.booleans(),
    tokens=st.integers(1, 9),
    rejected=st.integers(0, 8),
)
def test_the_timed_steps_of_several_tokens_go_on_as_a_cache_does(
    batch: int, window: int, spread: bool, tokens: int, rejected: int
) -> None:
    kept = max(1, tokens - rejected)
    steps = timing.schedule(batch, window, spread=spread, device="cpu", tokens=tokens, kept=kept)
    assert torch.equal(torch.stack([step.flushing for step in steps]).sum(0), torch.ones(batch, dtype=torch.int64))
    seqlen, flushed = steps[0].seqlen, steps[0].flushed
    assert len(steps) == 1 or (len({*(seqlen - flushed).tolist()}) > 1) == (spread and batch > 1)
    for step in [*steps, *steps]:  # once more: a window later every row has as many records pending
        assert torch.equal(step.seqlen - step.flushed, seqlen - flushed)
        assert torch.equal(step.flushing, seqlen - flushed + tokens > window)
        flushed = torch.where(step.flushing, seqlen, flushed)
        seqlen = seqlen + kept
        assert (seqlen - flushed <= max(window, tokens)).all()  # what a ring holds beside the new tokens


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


@by_layer
@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_the_gate_of_several_tokens_lets_the_token_loop_pass(case: Case, tokens: int) -> None:
    verdict = check_tokens(case, tokens)
    assert verdict.passed, verdict


@by_layer
@pytest.mark.parametrize("fault", [*FAULTS, *TOKENS_FAULTS])
def test_the_gate_of_several_tokens_stops_faulty_kernels(case: Case, fault: str) -> None:
    verdict = check_tokens(case, 4, fault)
    assert not verdict.replay_half_error <= verdict.budget
    assert max(verdict.native_error, verdict.native_half_error, verdict.conventional_error) <= verdict.budget
    assert not verdict.passed


@by_layer
def test_the_gate_stops_a_native_step_that_cannot_go_back(case: Case) -> None:
    verdict = check_tokens(case, 4, native=plain_native(case, "keeps the last state only"))
    assert verdict.native_error <= verdict.budget
    assert math.isnan(verdict.native_half_error)
    assert not verdict.passed


def check_tokens(case: Case, tokens: int, fault: str = "none", native: gate.Native | None = None) -> gate.TokensVerdict:
    return gate.check_tokens(
        case,
        3,
        6,
        tokens,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        kernels=PlainKernels(fault),
        step=plain_step(case),
        native=native or plain_native(case),
    )


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
@by_layer
def test_the_native_step_is_right_in_every_shape_for_any_number_of_tokens(case: Case) -> None:
    from replayssm.bench import conventional, tune

    case = Case(case.layer, "small", 2, 64, 64, case.ngroups, case.recurrence)
    trial = Trial(case, 1, 3, dtype=torch.bfloat16, device=DEVICE)
    fitting = [each for each in conventional.CONFIGS if each.segment <= case.d_state]
    for index, config in enumerate(fitting[:: 1 if DEVICE.type == "cuda" else 4]):
        tokens = 3 - index % 3
        for kept in (tokens, gate.half(tokens)):
            error = trial.native_error(tune.native_with(config, case), tokens, kept)
            assert error <= trial.budget, (config, tokens, kept)


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


def made_up_times(arms: Sequence[Sequence[Callable[[], object]]], rounds: int = 0, launches: int = 0) -> list[Time]:
    """Every step runs once; the first arm is the fastest."""
    for steps in arms:
        for step in steps:
            step()
    return [Time(10.0 + index, 0.5) for index in range(len(arms))]


@by_layer
def test_each_arm_is_whole_windows_over_every_copy(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    window, batch = 4, 6
    recording = Recording(monkeypatch)
    states = [gate.random_state(case, batch, "cpu") for _ in range(3)]
    arms.time_arms(case, states, recording.step, window=window, dtype=torch.bfloat16, kernels=recording)
    assert recording.arms([state.data_ptr() for state in states]) == [
        [(0, 0)] * window,
        [(5, 1), (5, 1), (5, 2), (5, 2)],  # six rows in four phases
        [(5, 0)] * (window - 1),
        [(5, batch)],
        [(2, batch)],
    ]


@by_layer
def test_each_arm_of_several_tokens_is_whole_windows_over_every_copy(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, tokens = 6, 4
    recording = Recording(monkeypatch)
    states = [gate.random_state(case, batch, "cpu") for _ in range(3)]
    snapshots = [torch.empty(batch, tokens, *state.shape[1:]) for state in states]
    arms.time_tokens(
        case,
        states,
        snapshots,
        recording.step,
        lambda state, snapshots, *rest: recording.step(state),
        tokens=tokens,
        window=12,
        dtype=torch.bfloat16,
        kernels=recording,
    )
    assert recording.launches == timing.LAUNCHES // tokens
    assert recording.arms([state.data_ptr() for state in states]) == [
        [(0, 0)] * timing.LAUNCHES,
        [(0, 0)],
        [(16, 2)] * 3,  # 4, 8 and 12 records: the third step has no room
        [(16, 1)] * 4 + [(16, 2)],  # 2, 4, .. 10: six rows in five phases
    ]


class Recording(PlainKernels):
    """Runs what would be timed, and notes for each call: which copy, slots of its ring, how many rows flush."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self.called: list[tuple[int, int, int]] = []
        self.seen: list[list[tuple[int, int, int]]] = []
        self.launches = 0
        monkeypatch.setattr(timing, "measure", self.measure)

    def replay(self, q: Tensor, records: Records, checkpoint: Tensor, ring: Records, *rest: Any, **named: Any) -> Any:
        self.called.append((checkpoint.data_ptr(), ring.k.shape[1], int(rest[1].sum())))

    def step(self, state: Tensor, *rest: Any) -> None:
        self.called.append((state.data_ptr(), 0, 0))

    def measure(self, arms: Sequence[Sequence[Callable[[], object]]], rounds: int = 0, launches: int = 0) -> list[Time]:
        self.launches = launches
        for steps in arms:
            self.called.clear()
            for each in steps:
                each()
            self.seen.append(list(self.called))
        return [Time(1.0, 0.0)] * len(arms)

    def arms(self, copies: list[int]) -> list[list[tuple[int, int]]]:
        """Slots and flushes of each step of each arm, which must go over the copies in turn: each is cold again."""
        for arm in self.seen:
            assert [copy for copy, _, _ in arm] == copies * (len(arm) // len(copies))
        return [[each[1:] for each in arm[:: len(copies)]] for arm in self.seen]


@needs_triton
@by_layer
def test_a_measured_case_has_every_figure(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timing, "measure", made_up_times)
    monkeypatch.setattr(timing, "COLD_BYTES", 2 * case.state_bytes)
    measured = dict(window=2, dtype=torch.bfloat16, device=DEVICE, ceiling=4.0, progress=Progress(1, 3))
    entry = kernel.measure_case(case, 2, kernels=PlainKernels(), **measured)
    assert entry is not None
    assert list(entry) == RUN_KEYS
    assert list(entry["gate"]) == ["replay_error", "conventional_error", "budget"]
    assert (entry["conventional_us"], entry["replay_us"], entry["speedup"]) == (10.0, 11.0, 10 / 11)
    assert (entry["nonflush_us"], entry["flush_us"], entry["aligned_us"], entry["window0_us"]) == (12, 13, 12.5, 14)
    sizes = case.layer_bytes(measured["dtype"])
    assert entry["bytes_conventional"] == 2 * conventional_step(sizes).moved
    assert entry["bytes_replay"] == 2 * replay_step(sizes, measured["window"]).moved
    json.dumps(entry)
    assert "0.91x" in capsys.readouterr().err

    def never(*arguments: Any, **named: Any) -> None:
        raise AssertionError("a case with wrong results was timed")

    monkeypatch.setattr(arms, "time_arms", never)
    assert kernel.measure_case(case, 1, kernels=PlainKernels(FAULTS[0]), **measured) is None
    shown = capsys.readouterr().err
    assert "NOT TIMED" in shown
    assert "x\n" not in shown


@needs_triton
def test_a_measured_verification_has_every_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from replayssm.bench import conventional

    case = SMALL[1]
    monkeypatch.setattr(timing, "measure", made_up_times)
    monkeypatch.setattr(timing, "COLD_BYTES", case.state_bytes)
    monkeypatch.setattr(timing, "LAUNCHES", 1)
    monkeypatch.setattr(conventional, "CONFIGS", conventional.CONFIGS[:1])
    monkeypatch.setattr(conventional, "HINTS", conventional.HINTS[-1:])
    measured = dict(dtype=torch.bfloat16, device=DEVICE, ceiling=4.0, progress=Progress(2, 3))
    entries = verify.measure_batch(case, 1, {1: 2, 3: 4}, kernels=PlainKernels(), **measured)
    assert [list(entry) for entry in entries] == [VERIFY_KEYS] * 2
    one, three = entries
    assert (one["tokens"], one["half"], one["window"]) == (1, 1, 2)
    assert "load evict_first, store .cs" in one["native_config"]
    assert (three["tokens"], three["half"], three["window"]) == (3, 1, 4)
    assert (three["conventional_us"], three["native_us"], three["replay_us"], three["replay_half_us"]) == (
        10,
        11,
        12,
        13,
    )
    assert (three["native_steps"], three["replay_steps"], three["replay_half_steps"]) == (1.1, 1.2, 1.3)
    sizes = case.layer_bytes(torch.bfloat16)
    assert three["bytes_native"] == plan.conventional_step(sizes, 3).moved
    assert three["bytes_replay"] == plan.replay_step(sizes, 4, 3).moved
    assert three["bytes_replay_half"] == plan.replay_step(sizes, 4, 3, 1).moved
    assert three["bytes_conventional"] == conventional_step(case.layer_bytes(torch.bfloat16)).moved
    assert list(three["gate"]) == list(gate.TokensVerdict._fields)
    json.dumps(entries)
    assert "native 1.10, replay 1.20, replay_half 1.30" in capsys.readouterr().err.replace("_steps", "")

    def never(*arguments: Any, **named: Any) -> None:
        raise AssertionError("a case with wrong results was timed")

    monkeypatch.setattr(arms, "time_tokens", never)
    assert verify.measure_batch(case, 1, {3: 4}, kernels=PlainKernels("folds drafts"), **measured) == []
    assert "NOT TIMED" in capsys.readouterr().err


@needs_triton
@by_layer
def test_the_decode_kernels_pass_the_gate_of_several_tokens(case: Case) -> None:
    triton_decode = pytest.importorskip("replayssm.ops.triton_decode")
    trial = Trial(case, 2, 7, dtype=torch.bfloat16, device=DEVICE)
    assert trial.replay_error(triton_decode, 4, 3, 2) <= trial.budget


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
