"""The kernel that folds, answers and stores: in every format its planes are those of plain PyTorch."""

import copy

import pytest

pytest.importorskip("triton")
import torch
from budgets import (
    FEW_APART,
    FEW_CODES,
    LR_IF4,
    SAME_CODE,
    assert_e32,
    assert_e64,
    assert_same_bits,
    e32,
    rms,
)
from draws import DEVICE, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import token_loop
from pools import Shape
from records import tokens_of
from stored_pools import LAYER, StoredPool, a_stream
from test_triton_decode import RECURRENCES, every_recurrence
from torch import Tensor

from replayssm.cache import formats
from replayssm.cache.checkpoint import NAMES
from replayssm.cache.selection import Selection
from replayssm.cache.stored_state import StoredState

READ = formats.names()
few = settings(max_examples=max(settings.default.max_examples // 10, 2))  # the interpreter takes a while
every_checkpoint = pytest.mark.parametrize("checkpoint", NAMES)
# each name of both at least once
paired = pytest.mark.parametrize(("checkpoint", "read_format"), list(zip(NAMES, READ + READ[:2], strict=True)))
BATCH = 3


def begin(
    shape: Shape, checkpoint: str, read_format: str | None, seed: int = 0, dtype: torch.dtype = torch.float32
) -> StoredPool:
    """Rows that stand at places of their own, with some records each."""
    pending = [shape.window, 1, min(shape.window, 2)]
    start = [3 + seed % 5, 2**32 - 1, 40]
    return StoredPool.of(shape, a_stream(shape, BATCH, seed % 7, dtype), start, pending, checkpoint, read_format)


def tokens(pool: StoredPool, rows: list[int], t: int):
    """The next t tokens of some rows."""
    stream = a_stream(pool.pool.shape, BATCH, (pool.pool.start[0] - 3) % 7, pool.pool.ring.v.dtype)
    taken = pool.pool.taken()
    return stream.at(rows, [taken[row] for row in rows], t)


def assert_stored(pool: StoredPool, states: Tensor, rows: list[int], what: str) -> None:
    """The checkpoint of rows is what plain PyTorch makes of the states that were to be stored, the copy what it makes
    of what is stored."""
    expected = copy.deepcopy(pool.stored)
    expected.save(states, Selection(), seed=pool.seed, position=pool.pool.seqlen - 1, layer=LAYER)
    if DEVICE.type == "cpu":
        for plane, right in zip(pool.stored.checkpoint.planes, expected.checkpoint.planes, strict=True):
            assert_same_bits(plane[rows], right[rows], f"checkpoint, {what}")
    else:
        assert_few_apart(pool.states()[rows], expected.checkpoint.load(Selection())[rows], f"checkpoint, {what}")
    if pool.read_format is None:
        return
    expected.checkpoint = pool.stored.checkpoint
    expected.rebuild_copy(Selection())
    if pool.read_format == "lr_if4":
        assert_copies_agree(pool, expected, rows)
    else:
        for plane, right in zip(pool.stored.copy.planes, expected.copy.planes, strict=True):
            assert_same_bits(plane[rows], right[rows], f"copy, {what}")


def assert_few_apart(stored: Tensor, right: Tensor, what: str) -> None:
    """Sums over keys run in another order where a compiled kernel has another format, so now and then a code is the
    next one."""
    apart = (stored - right).abs() > SAME_CODE * right.abs().amax(-1, keepdim=True)
    assert apart.sum() <= 1 + FEW_APART * apart.numel(), f"{what}: {int(apart.sum())} of {apart.numel()} are others"


def assert_copies_agree(pool: StoredPool, expected: StoredState, rows: list[int]) -> None:
    """Of lr_if4: its terms are sums in another order, so a code may be another one, and the error is the same.

    A number of a factor that is another one decides about a row or a column.
    """
    states = pool.states()[rows]
    errors = [rms(stored.copy.load()[rows] - states) for stored in (pool.stored, expected)]
    assert abs(errors[0] - errors[1]) <= LR_IF4 * errors[1]
    codes, others = (stored.copy.planes[0][rows] for stored in (pool.stored, expected))
    assert (codes != others).sum() <= FEW_CODES * codes.numel() + max(states.shape[-2:])


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    heads = draw(st.sampled_from([(1, 1), (3, 1), (2, 2)]))
    # of a single row lr_if4's term is all there is, and the rest is noise
    headdim, d_state = draw(st.sampled_from([(40, 24), (5, 7), (3, 33), (16, 80), (84, 16)]))
    return Shape(draw(st.sampled_from(RECURRENCES)), heads, headdim, d_state, draw(st.sampled_from([3, 4])), 3)


@paired
@given(shape=shapes(), other=st.sampled_from([None, *READ]), seed=seeds, t=st.integers(0, 3), wide=st.booleans())
@few
def test_planes_are_those_of_plain_pytorch(checkpoint, read_format, other, shape, seed, t, wide):
    """And a copy does not change the outputs; rows that are not due stay."""
    read_format = other if seed % 2 else read_format
    pool = begin(shape, checkpoint, read_format, seed, torch.float64 if wide else torch.float32)
    exact, bare, before = pool.exact(), pool.without_copy(), pool.copy()
    due = [True, seed % 2 == 0, True]
    new = tokens(pool, [0, 1, 2], t) if t else None
    outputs = [each.step(due, new) for each in (pool, bare)]
    exact.step(due, new if checkpoint == "fp32" else None)  # of which steps of several tokens may fold in another way
    rows = [row for row in range(BATCH) if due[row]]
    assert_stored(pool, exact.states(), rows, f"{checkpoint} read as {read_format}")
    if t:
        assert_same_bits(outputs[0], outputs[1], "outputs")
        assert outputs[0][rows].isfinite().all()
    for name, tensor in pool.tensors().items():
        for row in set(range(BATCH)) - set(rows):
            assert_same_bits(tensor[row], before.tensors()[name][row], f"{name} of a row that is not due")


@every_recurrence
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_states_and_outputs_are_those_of_the_token_loop(recurrence, dtype):
    shape = Shape(recurrence, (2, 1), 12, 40, 4, 3)
    pool = begin(shape, "int16_sr", "nvfp4", 1, dtype)
    exact, states, pending = pool.exact(), pool.states(), pool.pool.taken()
    y = pool.step([True] * BATCH, tokens(pool, [0, 1, 2], 3))  # before the states are rounded
    exact.step([True] * BATCH)
    stream = a_stream(shape, BATCH, (pool.pool.start[0] - 3) % 7, dtype)
    for of in (torch.float64, torch.float32):
        wide = type(stream.records)(*(x.to(of) for x in stream.records))
        found, after = token_loop(tokens_of(stream.q.to(of), wide), delta=recurrence.delta, state=states.to(of))
        answers = torch.stack([found[row, n : n + 3] for row, n in enumerate(pending)])
        folded = torch.stack([after[row, n - 1] for row, n in enumerate(pending)])
        if of == torch.float64:
            right, right_state = answers, folded
    if dtype == torch.float64:
        assert_e64(y, right)
        assert_e64(exact.states(), right_state, "state")
    else:
        assert_e32(y, right, e32(answers, right))
        assert_e32(exact.states(), right_state, e32(folded, right_state), "state")


@every_recurrence
@pytest.mark.parametrize("t", [1, 3])
def test_a_copy_changes_no_bit_of_an_exact_checkpoint(recurrence, t):
    """Nor of what a row that flushes answers."""
    shape = Shape(recurrence, (3, 1), 5, 40, 4, 3)
    pool = begin(shape, "fp32", "int8", 2)
    plain, before = pool.exact().pool, pool.pool.taken()
    plain.checkpoint = pool.states().clone()
    new = tokens(pool, [0, 1, 2], t)
    due = [count + t > shape.window for count in before]
    assert any(due)
    y, expected = pool.step(due, new), plain.step(*new)
    assert_same_bits(pool.states(), plain.checkpoint, "checkpoint")
    assert_stored(pool, plain.checkpoint, [row for row in range(BATCH) if due[row]], "the copy")
    assert_same_bits(y[due], expected[due], "outputs")


@paired
@given(seed=seeds, order=st.permutations([0, 1, 2, -1]), data=st.data())
@few
def test_a_row_is_stored_alike_wherever_it_stands(checkpoint, read_format, seed, order, data):
    """In a call of another order, with a row that is off, fewer tokens and programs; NaN in what is not its own."""
    shape = Shape(data.draw(st.sampled_from(RECURRENCES)), (2, 1), 5, 7, 3, 2)
    pool = begin(shape, checkpoint, read_format, seed)
    length = [data.draw(st.integers(0, 2)) if row >= 0 else 0 for row in order]
    q, records = tokens(pool, [max(row, 0) for row in order], 2)
    for x in (q, *records):
        for place, n in enumerate(length):
            x[place, n:] = torch.nan
    several = pool.copy()
    y = several.step([True] * BATCH, (q, records), rows=list(order), length=length)
    for place, row in enumerate(order):
        n = length[place]
        if row < 0:
            assert y[place].isnan().all()
            continue
        alone = pool.copy()
        own = q[place : place + 1], type(records)(*(x[place : place + 1] for x in records))
        single = alone.step([True] * BATCH, own, rows=[row], length=[n])
        assert_same_bits(y[place, :n], single[0, :n], f"outputs of row {row}")
        assert y[place, n:].isnan().all()
        for name, tensor in several.tensors().items():
            assert_same_bits(alone.tensors()[name][row], tensor[row], f"{name} of row {row}")


@every_checkpoint
def test_a_row_without_records_keeps_its_bits_and_answers_from_them(checkpoint):
    """It is due all the same with window 0; to round it again would draw again."""
    shape = Shape(RECURRENCES[1], (1, 1), 5, 7, 3, 1)
    pool = StoredPool.of(shape, a_stream(shape, 1, 3, torch.float32), [9], [0], checkpoint, "int8")
    before = pool.copy()
    new = a_stream(shape, 1, 3, torch.float32).at([0], [0], 1)
    plain, right = (
        token_loop(
            tokens_of(new[0].to(of), type(new[1])(*(x.to(of) for x in new[1]))), delta=True, state=pool.states().to(of)
        )[0]
        for of in (torch.float32, torch.float64)
    )
    assert_e32(pool.step([True], new), right, e32(plain, right))
    for name, tensor in pool.stored.tensors().items():
        assert_same_bits(tensor, before.stored.tensors()[name], name)


@paired
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_head(checkpoint, read_format, value):
    shape = Shape(RECURRENCES[0], (2, 1), 5, 40, 3, 1)
    pool = begin(shape, checkpoint, read_format)
    sound = pool.copy()
    pool.pool.ring.v[1, :, 0, 2] = value
    for each in (pool, sound):
        each.step([True, True, False])
    lost = pool.states().isfinite().logical_not()
    assert lost[1, 0, 2].any()
    assert pool.stored.copy.load()[1, 0].isfinite().logical_not().any()
    for name, tensor in pool.stored.tensors().items():
        assert_same_bits(tensor[[0, 2]], sound.stored.tensors()[name][[0, 2]], f"{name} of other rows")
        assert_same_bits(tensor[1, 1], sound.stored.tensors()[name][1, 1], f"{name} of the other head")


@every_recurrence
def test_zeros_stay_zeros(recurrence):
    shape = Shape(recurrence, (1, 1), 5, 24, 3, 1)
    for checkpoint, read_format in (("nvfp4_sr", "lr_if4"), ("int8_sr", "nvfp4"), ("fp8_sr", "int8")):
        pool = begin(shape, checkpoint, read_format)
        pool.pool.ring.v.zero_()
        for plane in pool.stored.tensors().values():
            plane.zero_()
        pool.step([True] * BATCH)
        assert not pool.states().any()
        assert not pool.stored.copy.load().any()


def test_copies_of_the_same_states_are_the_same():
    """lr_if4 again, whose sums could run in any order; and on heads of usual size few of its codes are others."""
    shape = Shape(RECURRENCES[0], (2, 1), 64, 128, 3, 1)
    pool = begin(shape, "fp16_sr", "lr_if4")
    twin, exact = pool.copy(), pool.exact()
    for each in (pool, twin, exact):
        each.step([True] * BATCH)
    for name, tensor in pool.stored.tensors().items():
        assert_same_bits(twin.stored.tensors()[name], tensor, name)
    expected = StoredState("fp16_sr", "lr_if4", tuple(exact.states().shape), torch.float32, DEVICE)
    expected.save(exact.states(), Selection(), seed=pool.seed, position=pool.pool.seqlen - 1, layer=LAYER)
    codes, others = (stored.copy.planes[0] for stored in (pool.stored, expected))
    assert (codes != others).sum() <= FEW_CODES * codes.numel()
