"""The decode kernels by themselves: geometries, layouts, rows that are off, what is dead, and bits."""

import pytest

pytest.importorskip("triton")
import torch
from budgets import assert_e32, assert_e64, assert_same_bits, e32
from draws import DEVICE, draw, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import token_loop
from pools import Pool, Shape, Stream
from records import GATES, KEYS, tokens_of
from torch import Tensor

from replayssm.ops import triton_decode
from replayssm.ops.records import Records, Recurrence
from replayssm.ops.tiling import Tiling, choose_tiling

RECURRENCES = [Recurrence(decay, delta) for decay in ("head", "channel") for delta in (False, True)]
few = settings(max_examples=max(settings.default.max_examples // 3, 8))  # the interpreter takes a while
every_recurrence = pytest.mark.parametrize("recurrence", RECURRENCES, ids=lambda r: f"{r.decay}-{r.delta}")


def a_shape(recurrence: Recurrence, window: int = 5, step_tokens: int = 3) -> Shape:
    return Shape(recurrence, (2, 1), 5, 7, window, step_tokens)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Heads and sizes of the published layers and odd ones; any window that holds a step, or 0."""
    step_tokens = draw(st.sampled_from([1, 1, 2, 5]))
    window = draw(st.sampled_from([0, step_tokens, 16, 64]) | st.integers(step_tokens, 64))
    nheads, ngroups = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 2), (6, 2), (3, 3), (12, 1)]))
    largest = 2 if nheads < 4 else 0  # a program for every 8 rows of a state when it is folded
    headdim = draw(st.sampled_from([64, 80, 128] if largest else [1, 5, 33]) | st.sampled_from([1, 3, 17]))
    d_state = draw(st.sampled_from([64, 128, 256]) | st.sampled_from([1, 7, 40]))
    return Shape(draw(st.sampled_from(RECURRENCES)), (nheads, ngroups), headdim, d_state, window, step_tokens)


def begin(shape: Shape, batch: int, seed: int, gate: str = "random", keys: str = "random") -> tuple[Stream, Pool]:
    """Rows that have taken 0 .. as many tokens as fit, and stand at places of their own in their rings."""
    most = max(shape.window, shape.step_tokens)
    pending = [(seed + 5 * row) % (most + 1) if row else most for row in range(batch)]
    stream = Stream(shape, batch, most + 4 * shape.step_tokens, seed, gate, keys)
    return stream, Pool.of(shape, stream, [(seed + 3 * row) % 97 for row in range(batch)], pending)


def advance(stream: Stream, pool: Pool, t: int, **how: object) -> tuple[Tensor, Tensor]:
    """A step of every row: its outputs, and the exact ones."""
    taken, rows = pool.taken(), list(range(len(pool.start)))
    q, records = stream.at(rows, taken, t)
    exact = torch.stack([stream.y[row, first : first + t] for row, first in zip(rows, taken, strict=True)])
    return pool.step(q, records, **how), exact


@few
@given(
    shape=shapes(),
    batch=st.integers(1, 2),
    seed=seeds,
    gate=st.sampled_from(GATES),
    keys=st.sampled_from(KEYS),
    data=st.data(),
)
def test_steps_of_any_geometry_equal_the_token_loop(shape, batch, seed, gate, keys, data):
    stream, pool = begin(shape, batch, seed, gate, keys)
    for t in data.draw(st.lists(st.integers(1, shape.step_tokens), min_size=1, max_size=3)):
        y, exact = advance(stream, pool, t)
        assert_e64(y, exact, f"{t} tokens")
    pool.flush([True] * batch)
    expected = torch.stack([stream.states[row, n] for row, n in enumerate(pool.taken())])
    assert_e64(pool.checkpoint, expected, "state")


@every_recurrence
def test_steps_of_several_tokens_fold_every_kind_of_record(recurrence):
    stream, pool = begin(a_shape(recurrence), 2, 3)
    for _ in range(3):
        y, exact = advance(stream, pool, 3)
        assert_e64(y, exact)
    expected = torch.stack([stream.states[row, n - 3] for row, n in enumerate(pool.taken())])
    assert_e64(pool.checkpoint, expected, "state")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_recurrence
def test_records_of_fewer_bits_are_summed_in_fp32(recurrence, dtype):
    shape = Shape(recurrence, (1, 1), 8, 64, 6, 1)
    narrow = Stream(shape, 2, 20, 3)
    narrow.q, narrow.state = narrow.q.to(dtype), narrow.state.float()
    k, v, g, beta = narrow.records
    narrow.records = Records(k.to(dtype), v.to(dtype), g.float(), beta.float())
    wide = Records(*(x.double() for x in narrow.records))
    exact, _ = token_loop(tokens_of(narrow.q.double(), wide), delta=recurrence.delta, state=narrow.state.double())
    single = Records(*(x.float() for x in narrow.records))
    plain, _ = token_loop(tokens_of(narrow.q.float(), single), delta=recurrence.delta, state=narrow.state)
    pool = Pool.of(shape, narrow, [3, 11], [0, 0])
    outputs = [pool.step(*narrow.at([0, 1], pool.taken(), 1)) for _ in range(20)]
    assert outputs[0].dtype == torch.float32
    assert_e32(torch.cat(outputs, 1), exact, e32(plain, exact))


@every_recurrence
@given(seed=seeds, t=st.integers(1, 3), last=st.integers(0, 1), value=st.sampled_from([torch.nan, torch.inf]))
@settings(max_examples=6)
def test_rows_that_are_off_and_dead_memory_keep_their_bits(recurrence, seed, t, last, value):
    """A call of three rows in another order, one off: what it does not own stays, NaN in its inputs is not seen."""
    shape = a_shape(recurrence)
    stream, pool = begin(shape, 4, seed)
    before, taken = pool.copy(), pool.taken()
    rows, n = [3, -1, 1], t - last  # without lengths, every row that is on brings t tokens
    q, records = stream.at([3, 0, 1], [taken[row] for row in (3, 0, 1)], t)
    for x in (q, *records):
        x[1] = value
        x[2, n:] = value
    y = pool.step(q, records, rows=rows, length=[t, 0, n] if last else None)
    assert_e64(y[0], stream.y[3, taken[3] : taken[3] + t], "a row that is on")
    if n:
        assert_e64(y[2, :n], stream.y[1, taken[1] : taken[1] + n], "a row of fewer tokens")
    new = {3: t, 1: n}
    for name, tensor in pool.tensors().items():
        for row in range(4):
            was = before.tensors()[name][row]
            if name == "checkpoint":
                if pool.flushed[row] == before.flushed[row]:
                    assert_same_bits(tensor[row], was, f"checkpoint of row {row}")
                continue
            written = {(int(before.seqlen[row]) + s) % shape.slots for s in range(new.get(row, 0))}
            others = [slot for slot in range(shape.slots) if slot not in written]
            assert_same_bits(tensor[row, others], was[others], f"{name} of row {row}")


@every_recurrence
@pytest.mark.parametrize("t", [1, 3])
def test_pools_carved_out_of_one_buffer_give_the_same_bits_and_their_gaps_stay(recurrence, t):
    buffer = torch.full((20000,), torch.nan, dtype=torch.float64, device=DEVICE)
    used = torch.zeros_like(buffer, dtype=torch.bool)
    free = [5]

    def carve(*shape: int, dtype: torch.dtype) -> Tensor:
        """Rows some numbers apart, at an odd place of the buffer."""
        size = torch.Size(shape[1:]).numel()
        strides = torch.empty(shape[1:], device="meta").stride()
        first, stride = free[0], size + 11
        free[0] += shape[0] * stride + 3
        assert free[0] <= len(buffer)
        used.as_strided(shape, (stride, *strides), first).fill_(True)
        return buffer.as_strided(shape, (stride, *strides), first)

    shape = a_shape(recurrence)
    stream, pool = begin(shape, 3, 7)
    carved = Pool.of(shape, stream, pool.start, pool.taken(), carve)
    for _ in range(3):
        y, _ = advance(stream, pool, t)
        same, exact = advance(stream, carved, t)
        assert_same_bits(same, y, "outputs")
        assert_e64(y, exact)
    for name, tensor in pool.tensors().items():
        assert_same_bits(carved.tensors()[name].contiguous(), tensor, name)
    assert used.any()
    assert buffer[~used].isnan().all()


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same numbers, laid out in memory in other ways."""
    larger = draw(9, x.shape[0] + 1, x.shape[1] + 2, *x.shape[2:], dtype=x.dtype)
    larger[1:, 1:-1] = x
    by_time = torch.empty(x.shape[1], x.shape[0], *x.shape[2:], dtype=x.dtype, device=DEVICE)
    by_time.copy_(x.transpose(0, 1))
    wider = draw(9, *x.shape, 2, dtype=x.dtype)
    wider[..., 0] = x
    return {
        "a slice": larger[1:, 1:-1],
        "time first": by_time.transpose(0, 1),
        "features apart": wider[..., 0],
        "heads last": x.transpose(2, -1).contiguous().transpose(2, -1),
    }


@every_recurrence
@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("layout", ["a slice", "time first", "features apart", "heads last"])
def test_new_tokens_may_lie_anyhow(recurrence, t, layout):
    shape = a_shape(recurrence)
    stream, pool = begin(shape, 3, 4)
    twin = pool.copy()
    q, records = stream.at([0, 1, 2], pool.taken(), t)
    y = pool.step(q, records)
    assert_same_bits(twin.step(layouts(q)[layout], Records(*(layouts(x)[layout] for x in records))), y, "outputs")
    for name, tensor in pool.tensors().items():
        assert_same_bits(twin.tensors()[name], tensor, name)


@every_recurrence
@pytest.mark.parametrize("t", [1, 3])
def test_a_row_has_the_same_bits_at_another_place_and_among_others(recurrence, t):
    """Alone, and in a call of other order among twice as many rows of a cache."""
    shape = a_shape(recurrence)
    stream, pool = begin(shape, 6, 5)
    alone = begin(shape, 6, 5)[1]
    y, _ = advance(stream, pool, t)
    taken, order = alone.taken(), [4, 0, 3]
    several = alone.copy().step(*stream.at(order, [taken[row] for row in order], t), rows=order)
    for place, row in enumerate(order):
        assert_same_bits(several[place], y[row], f"row {row} at place {place}")
        single = alone.step(*stream.at([row], [taken[row]], t), rows=[row])
        assert_same_bits(single[0], y[row], f"row {row} alone")
        for name, tensor in pool.tensors().items():
            assert_same_bits(alone.tensors()[name][row], tensor[row], f"{name} of row {row}")


@every_recurrence
def test_every_tiling_that_may_be_chosen_is_right(recurrence):
    """Of shapes from one row to a thousand; each is run on a small batch of its own shape."""
    chosen = {}
    for batch in (1, 8, 64, 1024):
        for headdim, d_state in ((5, 7), (64, 128), (128, 128)):
            tiling = choose_tiling(batch, 32, headdim, d_state, recurrence)
            chosen[headdim, d_state, tiling] = None
    for headdim, d_state, tiling in chosen:
        shape = Shape(recurrence, (1, 1), headdim, d_state, 4, 2)
        for t in (1, 2):
            stream, pool = begin(shape, 2, 6)
            for _ in range(2):
                y, exact = advance(stream, pool, t, tiling=tiling)
                assert_e64(y, exact, f"{t} tokens, {tiling}")
            pool.flush([True, False], tiling)
            assert_e64(pool.checkpoint[0], stream.states[0, pool.taken()[0]], f"state, {tiling}")


@pytest.mark.parametrize(("headdim", "flushers", "few", "block_b"), [(3, 3, 2, 2), (9, 4, 1, 4)])
def test_few_programs_share_the_rows_that_are_due_wherever_these_stand(headdim, flushers, few, block_b, monkeypatch):
    """Each program folds several pieces, and looks for their rows in several parts of the call."""
    monkeypatch.setattr(triton_decode, "FEW", few)
    monkeypatch.setattr(triton_decode, "BLOCK_B", block_b)
    shape = Shape(Recurrence("head", delta=True), (2, 1), headdim, 5, 3, 1)
    pending, rows = [2, 0, 3, 1, 0, 3], [5, 1, -1, 3, 2, 0]  # the first and the fifth of the call are due
    stream = Stream(shape, len(pending), 4, 8)
    pool = Pool.of(shape, stream, [0, 4, 1, 9, 6, 3], pending)
    q, records = stream.at([abs(row) for row in rows], [pending[abs(row)] for row in rows], 1)
    y = pool.step(q, records, rows=rows, tiling=Tiling(8, 8, 4, 4, None, flushers))
    for place, row in enumerate(rows):
        if row >= 0:
            assert_e64(y[place, 0], stream.y[row, pending[row]], f"output of row {row}")
    folded = torch.stack([stream.states[row, n if n == shape.window else 0] for row, n in enumerate(pending)])
    assert_e64(pool.checkpoint, folded, "state")
