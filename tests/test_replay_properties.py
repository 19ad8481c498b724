"""What must hold for every layer, window and acceptance pattern: the numbered properties of docs/design.md."""

import pytest
import torch
from backends import both_backends, given
from budgets import assert_e32, assert_e64, assert_same_bits, e32
from draws import DEVICE, draw, same_bits_everywhere, seeds
from geometries import CASES, R, decode_in_pieces, geometries, windows
from hypothesis import strategies as st
from passthrough import PASSTHROUGH
from programs import BATCH, Program, poison, programs, run

import replayssm

pytestmark = both_backends
every_layer = pytest.mark.parametrize("geometry", [*CASES, R], ids=lambda g: g.kind)


def exact_rows(geometry, layer, stream, outputs):
    """The token loop's outputs for as many tokens as each row kept."""
    exact = geometry.trace(layer, stream)
    return [exact.output[row, : len(kept)] for row, kept in enumerate(outputs)], exact


def assert_rows(outputs, exact):
    for row, (got, expected) in enumerate(zip(outputs, exact, strict=True)):
        if len(got):
            assert_e64(got, expected, f"row {row}")


@given(geometry=geometries, program=programs(flush=True), seed=seeds)
def test_any_split_into_windows_flushes_and_steps_gives_the_same_outputs(geometry, program, seed):
    layer = geometry.build(seed=seed)
    stream = geometry.input(BATCH, program.longest, seed)
    outputs, cache = run(layer, stream, program)
    exact, trace = exact_rows(geometry, layer, stream, outputs)
    assert_rows(outputs, exact)
    assert_e64(cache[0].state(), trace.states[:, -1], "state")


@every_layer
@given(program=programs(reject=True, flush=True), seed=seeds)
def test_rejected_drafts_leave_no_trace(geometry, program, seed):
    layer = geometry.build()
    stream = geometry.input(BATCH, max(program.longest, 1), seed)
    outputs, cache = run(layer, stream, program, draft_seed=1000)
    exact, trace = exact_rows(geometry, layer, stream, outputs)
    assert_rows(outputs, exact)
    for row, kept in enumerate(outputs):
        state = trace.states[row, len(kept) - 1] if len(kept) else torch.zeros_like(trace.states[row, 0])
        assert_e64(cache[0].state()[row], state, f"state of row {row}")
    others, twin = run(layer, stream, program, draft_seed=2000)
    for row in range(BATCH):
        assert_same_bits(outputs[row], others[row], f"row {row} after other drafts")
    assert_same_bits(cache[0].state(), twin[0].state(), "state after other drafts")


@every_layer
@given(program=programs(reject=True, flush=True), seed=seeds, value=st.sampled_from([torch.nan, torch.inf]))
def test_dead_slots_are_never_read(geometry, program, seed, value):
    layer = geometry.build()
    stream = geometry.input(BATCH, max(program.longest, 1), seed)
    clean, cache = run(layer, stream, program)
    poisoned, twin = run(layer, stream, program, after_commit=lambda cache: poison(cache, value))
    for row in range(BATCH):
        assert_same_bits(poisoned[row], clean[row], f"row {row}")
    assert_same_bits(twin[0].checkpoint, cache[0].checkpoint, "checkpoint")
    assert_same_bits(twin[0].state(), cache[0].state(), "state")


@every_layer
@given(window=windows(3), sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8), dead=st.integers(0, 3), seed=seeds)
def test_a_row_that_is_off_is_neither_read_nor_written(geometry, window, sizes, dead, seed):
    """Row ``dead`` of the cache holds NaN and sits out; what x holds in its place is NaN too."""
    layer = geometry.build()
    x = geometry.input(4, sum(sizes), seed)
    exact = geometry.trace(layer, x).output
    cache = replayssm.ReplayStateCache([layer], 4, window=window, step_tokens=3)
    for name, tensor in cache.tensors().items():
        if "counters" not in name:
            tensor[dead] = torch.nan
    before = {name: tensor[dead].clone() for name, tensor in cache.tensors().items()}
    rows = torch.tensor([-1 if row == dead else row for row in (2, 0, 3, 1)], device=DEVICE)
    pieces = []
    with torch.no_grad():
        for piece in x.split(sizes, 1):
            piece = piece[[2, 0, 3, 1]].clone()
            piece[rows < 0] = torch.nan
            pieces.append(layer(piece, cache[0], rows=rows))
            cache.commit()
    y = torch.cat(pieces, 1)
    assert torch.equal(y[rows < 0], torch.zeros_like(y[rows < 0]))
    assert_e64(y[rows >= 0], exact[rows[rows >= 0]])
    for name, tensor in cache.tensors().items():
        assert_same_bits(tensor[dead], before[name], f"{name} of the row that was off")
    cache.reset(dead)
    with torch.no_grad():
        only = torch.tensor([dead], device=DEVICE)
        assert_e64(layer(x[dead : dead + 1, :2], cache[0], rows=only), exact[dead : dead + 1, :2], "after reset")


@same_bits_everywhere
@pytest.mark.parametrize("kind", PASSTHROUGH, ids=lambda kind: kind.__name__)
@given(program=programs(reject=True, flush=True), seed=seeds, order=st.permutations(range(BATCH)))
def test_permuting_the_batch_permutes_the_outputs_bit_for_bit(kind, program, seed, order):
    layer = kind()
    stream = draw(seed, BATCH, max(program.longest, 1), layer.features, dtype=torch.float32)
    outputs, cache = run(layer, stream, program)
    moved, twin = run(layer, stream[order], permuted(program, order))
    for place, row in enumerate(order):
        assert_same_bits(moved[place], outputs[row], f"row {row} at place {place}")
    assert twin.seqlen.tolist() == [cache.seqlen[row] for row in order]
    assert twin.flushed.tolist() == [cache.flushed[row] for row in order]
    assert_same_bits(twin[0].state(), cache[0].state()[order], "state")


def permuted(program: Program, order: list[int]) -> Program:
    """The same acceptances for rows that stand elsewhere."""
    actions = [
        type(action)(
            action.t,
            tuple(action.kept[row] for row in order),
            tuple(order.index(row) for row in action.flush),
        )
        for action in program.actions
    ]
    return Program(program.window, program.step_tokens, tuple(actions))


@given(geometry=geometries, n=st.integers(1, 40), seed=seeds, data=st.data())
def test_prefill_then_decode_equals_forward(geometry, n, seed, data):
    step_tokens = data.draw(st.integers(1, 5))
    window = data.draw(windows(step_tokens))
    sizes = data.draw(st.lists(st.integers(1, step_tokens), min_size=1, max_size=12))
    layer = geometry.build(seed=seed)
    x = geometry.input(2, n + sum(sizes), seed)
    y, _ = decode_in_pieces(layer, x, [n, *sizes], window, step_tokens)
    with torch.no_grad():
        forward = layer(x)
    assert_e64(y, forward)
    assert_e64(forward, geometry.trace(layer, x).output, "forward")


@every_layer
@given(program=programs(reject=True, flush=True), seed=seeds)
def test_flushing_early_equals_flushing_late(geometry, program, seed):
    """In fp32, where the two round differently."""
    layer = geometry.build(torch.float32)
    stream = geometry.input(BATCH, max(program.longest, 40), seed, torch.float32)
    late = Program(program.window, program.step_tokens, tuple(type(a)(a.t, a.kept) for a in program.actions))
    exact, plain = geometry.trace(layer, stream.double()).output, geometry.trace(layer, stream).output
    for version in (program, late):
        outputs, _ = run(layer, stream, version)
        for row, got in enumerate(outputs):
            n = len(got)
            if n:  # a token whose norm is small errs more, in plain fp32 as well
                allowed = max(e32(plain, exact), e32(plain[row, :n], exact[row, :n]))
                assert_e32(got, exact[row, :n], allowed, f"row {row}")
