"""scan, replay and flush: the reference against the token loop, the chunked form against both."""

import pytest
import torch
from budgets import assert_e32, assert_e64, assert_gradient, assert_same_bits, e32, rms
from draws import draw, same_bits_everywhere, seeds
from hypothesis import given
from hypothesis import strategies as st
from oracles import rec, token_loop
from records import GATES, KEYS, make_records, to, tokens_of

from replayssm.ops.chunked import flush, replay, scan
from replayssm.ops.records import Records, Recurrence
from replayssm.ops.reference import flush_ref, replay_ref, scan_ref

RECURRENCES = [Recurrence(decay, delta) for decay in ("head", "channel") for delta in (False, True)]
HEADS = [(1, 1), (3, 1), (6, 2), (4, 4)]


def label(recurrence: Recurrence) -> str:
    return f"{recurrence.decay}-{'delta' if recurrence.delta else 'plain'}"


every_recurrence = pytest.mark.parametrize("recurrence", RECURRENCES, ids=label)
both_precisions = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])


def sizes(longest: int) -> st.SearchStrategy[dict[str, object]]:
    """Sizes of 1 included: for fp64, whose budget needs no luck of the draw."""
    return st.fixed_dictionaries(
        {
            "batch": st.integers(1, 3),
            "t": st.integers(1, longest),
            "heads": st.sampled_from(HEADS),
            "headdim": st.sampled_from([1, 5, 8, 40]),
            "d_state": st.sampled_from([1, 7, 16, 24]),
            "gate": st.sampled_from(GATES),
            "keys": st.sampled_from(KEYS),
            "seed": seeds,
        }
    )


def wider(size: dict[str, object]) -> dict[str, object]:
    """At least 5 features a head: the fp32 error of one or two numbers is no yardstick."""
    return {**size, "headdim": max(size["headdim"], 5), "d_state": max(size["d_state"], 7)}


def make(recurrence, dtype=torch.float64, **size):
    """Queries, records and a state to start from."""
    q, records = make_records(decay=recurrence.decay, delta=recurrence.delta, **size)
    batch, _, nheads, headdim = records.v.shape
    return q.to(dtype), to(records, dtype), draw(9, batch, nheads, headdim, q.shape[-1], dtype=dtype)


def loop(q, records, state, recurrence, dtype=torch.float64):
    """Outputs and every state of the token loop in ``dtype``, over the same numbers."""
    return token_loop(tokens_of(q.to(dtype), to(records, dtype)), delta=recurrence.delta, state=state.to(dtype))


def assert_result(y, last, q, records, state, recurrence):
    """Outputs (of the newest tokens, where there are fewer) and state, within E64 or E32 as their dtype asks."""
    exact, states = loop(q, records, state, recurrence)
    newest = exact[:, -y.shape[1] :]
    if y.dtype == torch.float64:
        assert_e64(y, newest)
        assert_e64(last, states[:, -1], "state")
    else:  # the last token of a run may err more than the average one, in plain fp32 as well
        plain, plain_states = loop(q, records, state, recurrence, torch.float32)
        assert_e32(y, newest, max(e32(plain, exact), e32(plain[:, -y.shape[1] :], newest)))
        allowed = max(e32(plain_states, states), e32(plain_states[:, -1], states[:, -1]))
        assert_e32(last, states[:, -1], allowed, "state")


def test_the_batched_token_loop_is_the_loop_of_one_head():
    q, records, state = make(RECURRENCES[-1], batch=2, t=9, heads=(4, 2))
    tokens = tokens_of(q, records)
    y, states = token_loop(tokens, delta=True, state=state)
    for b in range(2):
        for h in range(4):
            expected, last = rec(*(field[b, :, h] for field in tokens), delta=True, state=state[b, h])
            assert_e64(y[b, :, h], expected)
            assert_e64(states[b, -1, h], last)


@every_recurrence
@given(size=sizes(30))
def test_reference_equals_the_token_loop(recurrence, size):
    q, records, state = make(recurrence, **size)
    delta, newest = recurrence.delta, 1 + size["seed"] % size["t"]
    assert_result(*scan_ref(q, records, state, delta=delta), q, records, state, recurrence)
    y, last = replay_ref(q[:, -newest:], records, state, delta=delta), flush_ref(records, state, delta=delta)
    assert_result(y, last, q, records, state, recurrence)


@both_precisions
@every_recurrence
@given(size=sizes(200))
def test_chunked_scan_equals_the_token_loop(recurrence, dtype, size):
    q, records, state = make(recurrence, dtype, **(wider(size) if dtype == torch.float32 else size))
    y, last = scan(q, records, state, recurrence)
    assert y.dtype == last.dtype == dtype
    assert_result(y, last, q, records, state, recurrence)


@both_precisions
@every_recurrence
@given(size=sizes(45), newest=st.integers(1, 6))
def test_chunked_replay_and_flush_equal_the_token_loop(recurrence, dtype, size, newest):
    q, records, state = make(recurrence, dtype, **(wider(size) if dtype == torch.float32 else size))
    before = [x.clone() for x in (q, *records, state)]
    y, last = replay(q[:, -newest:], records, state, recurrence), flush(records, state, recurrence)
    assert y.dtype == last.dtype == dtype
    assert_result(y, last, q, records, state, recurrence)
    for x, copy in zip((q, *records, state), before, strict=True):
        assert_same_bits(x, copy, "an input")


@every_recurrence
def test_scan_without_a_state_starts_from_zeros(recurrence):
    q, records, state = make(recurrence, batch=2, t=70)
    assert_result(*scan(q, records, None, recurrence), q, records, torch.zeros_like(state), recurrence)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@every_recurrence
def test_low_precision_inputs_are_computed_in_fp32(recurrence, dtype):
    """The layers hand over k, v and q in the activation dtype, g and beta in fp32."""
    q, records, state = make(recurrence, torch.float32, batch=2, t=90, heads=(6, 2), d_state=24)
    q, records = q.to(dtype), records._replace(k=records.k.to(dtype), v=records.v.to(dtype))
    for y, last in (
        scan(q, records, state, recurrence),
        (replay(q[:, -3:], records, state, recurrence), flush(records, state, recurrence)),
    ):
        assert y.dtype == last.dtype == torch.float32
        assert_result(y, last, q, records, state, recurrence)


@pytest.mark.parametrize("gate", ["random", "tiny", "one"])
@every_recurrence
def test_gradcheck_through_scan(recurrence, gate):
    q, records, state = make(recurrence, t=5, headdim=2, d_state=3, gate=gate)

    def run(q, k, v, g, beta, state):
        return scan(q, Records(k, v, g, beta), state, recurrence)

    assert torch.autograd.gradcheck(run, [x.clone().requires_grad_() for x in (q, *records, state)])


@every_recurrence
@given(size=sizes(150))
def test_gradients_of_scan_equal_those_of_the_token_loop(recurrence, size):
    values = make(recurrence, **{**size, "headdim": min(size["headdim"], 5)})
    gradients = []
    for run in (scan, lambda *args: (loop(*args)[0], loop(*args)[1][:, -1])):
        q, *records, state = (x.clone().requires_grad_() for x in (values[0], *values[1], values[2]))
        y, last = run(q, Records(*records), state, recurrence)
        ((y * draw(20, *y.shape)).sum() + (last * draw(21, *last.shape)).sum()).backward()
        gradients.append([x.grad for x in (q, *records, state)])
    among = rms(torch.cat([gradient.flatten() for gradient in gradients[1]]))
    for name, got, exact in zip(("q", "k", "v", "g", "beta", "state"), *gradients, strict=True):
        assert_gradient(got, exact, name, among)


@same_bits_everywhere
@every_recurrence
@given(size=sizes(20), rotation=st.integers(1, 2), row=st.integers(0, 2))
def test_a_row_does_not_depend_on_its_batch(recurrence, size, rotation, row):
    """Bit for bit the same at another place; alone too, but with one head: some CPUs multiply one matrix otherwise."""
    q, records, state = make(recurrence, torch.float32, **{**wider(size), "batch": 3})
    newest = 1 + size["seed"] % size["t"]

    def run(rows):
        some = Records(*(field[rows] for field in records))
        return {
            "scan": scan(q[rows], some, state[rows], recurrence)[0],
            "replay": replay(q[rows, -newest:], some, state[rows], recurrence),
            "flush": flush(some, state[rows], recurrence),
        }

    together = run([0, 1, 2])
    order = [(i + rotation) % 3 for i in range(3)]
    for name, got in run(order).items():
        assert_same_bits(got, together[name][order], f"{name} in another order")
    if size["heads"] != (1, 1):
        for name, got in run([row]).items():
            assert_same_bits(got[0], together[name][row], f"{name} alone")
