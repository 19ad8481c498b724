"""The states between the chunks of a scan without the delta rule: the kernel against the token loop."""

import math

import pytest

pytest.importorskip("triton")
import torch
from budgets import assert_e16, assert_same_bits
from draws import DEVICE, draw, seeds
from hypothesis import given
from hypothesis import strategies as st
from oracles import token_loop
from records import make_records, to, tokens_of
from test_fla_scan import MAMBA2, HalfProducts
from torch import Tensor

from replayssm.ops import chunked
from replayssm.ops.records import Records
from replayssm.ops.triton_states import chunk_states

CHUNK = 64
LIMIT = 2**31 if DEVICE.type == "cuda" else 2**16  # elements; on a GPU what a 32-bit offset reaches
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
sizes = st.integers(1, 35).map(lambda half: 2 * half)


def run(records: Records, initial: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """``chunk_states`` of records as a layer makes them: k and v in 16 bits, v in the strides that it has."""
    pieces = (records.g.squeeze(-1).double() / math.log(2)).split(CHUNK, 1)
    total = torch.cat([piece.cumsum(1) for piece in pieces], 1).float()
    k, v = records.k.to(dtype).contiguous(), records.v.to(dtype)
    return chunk_states(k, v, records.beta.float(), total, None if initial is None else initial.float(), CHUNK)


def laid_out(v: Tensor, order: list[int], spare: int) -> Tensor:
    """``v`` with its axes in another order in memory, and so many NaN behind each row."""
    inverse = [order.index(axis) for axis in range(4)]
    moved = v.permute(order)
    wide = moved.new_full((*moved.shape[:3], moved.shape[3] + spare), math.nan)
    wide[..., : moved.shape[3]] = moved
    return wide[..., : moved.shape[3]].permute(inverse)


def whole(seed: int, *shape: int, most: int) -> Tensor:
    return draw(seed, *shape).mul(most).round().clamp(-most, most)


@given(
    seed=seeds,
    shape=st.tuples(st.integers(1, 2), st.integers(1, 2 * CHUNK + 2), st.integers(1, 2), sizes),
    ngroups=st.integers(1, 2),
    d_state=sizes,
    order=st.permutations(range(4)),
    spare=st.sampled_from([0, 3, 16]),
    begins=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_numbers_that_need_no_rounding_give_the_token_loop_exactly(
    seed: int,
    shape: tuple[int, int, int, int],
    ngroups: int,
    d_state: int,
    order: list[int],
    spare: int,
    begins: bool,
    dtype: torch.dtype,
) -> None:
    """Small whole numbers, halved ten times at most; only the states between chunks are rounded, where they are stored.

    In any size, number of tokens and strides of v.
    """
    batch, t, heads, headdim = shape
    nheads = heads * ngroups
    halved = torch.zeros(batch, t, nheads, 1, dtype=torch.float64, device=DEVICE)
    halved[:, draw(seed, t).argsort()[:10]] = 1
    k, v = whole(seed + 1, batch, t, ngroups, d_state, most=2), whole(seed + 2, batch, t, nheads, headdim, most=3)
    records = Records(k, v, -math.log(2) * halved, beta=1 + whole(seed + 3, batch, t, nheads, most=1))
    initial = whole(seed + 4, batch, nheads, headdim, d_state, most=3)
    _, after = token_loop(tokens_of(k, records), delta=False, state=initial if begins else None)
    exact = torch.cat([initial[:, None] * begins, after], 1).float()
    strided = records._replace(v=laid_out(v.to(dtype), order, spare))
    written, states, final = run(strided, initial if begins else None, dtype)
    assert torch.equal(written, (v * records.beta[..., None]).to(dtype))
    assert torch.equal(states, exact[:, :-1:CHUNK].to(dtype))
    assert torch.equal(final, exact[:, -1])


@every_dtype
@pytest.mark.parametrize("gate", ["random", "none", "twenty", "mixed", "burst"])
def test_random_numbers_are_within_the_budget(dtype: torch.dtype, gate: str) -> None:
    shape = dict(batch=2, t=150, heads=(2, 1), headdim=40, d_state=24, gate=gate)
    _, records = make_records(decay="head", delta=False, **shape)
    records = to(records, torch.float32)
    records = records._replace(k=records.k.to(dtype), v=records.v.to(dtype))
    initial = draw(9, 2, 2, 40, 24, dtype=torch.float32)
    written, states, final = run(records, initial, dtype)
    assert_same_bits(written, (records.v * records.beta[..., None]).to(dtype), "v * beta, rounded once")
    for place in (64, 128, 150):
        part = Records(*(field[:, :place] for field in records))
        _, exact = chunked.scan(part.k.double(), to(part, torch.float64), initial.double(), MAMBA2)
        with HalfProducts(dtype):
            _, plain = chunked.scan(part.k, part, initial, MAMBA2)
        got = final if place == 150 else states[:, place // CHUNK]
        assert_e16(got, plain, exact, f"state before token {place}")
    assert_same_bits(states[:, 0], initial.to(dtype), "state before the first token")


@pytest.mark.parametrize("time_innermost", [False, True])
def test_rc27_a_prompt_and_a_batch_beyond_32_bits(time_innermost: bool) -> None:
    """Of rows whose first tokens write nothing, the last chunks are those of a prompt that consists of them alone."""
    nheads, headdim, d_state, batch, last = 4, 64, 16, 2, CHUNK + 3
    t = LIMIT // (nheads * headdim) // CHUNK * CHUNK + last
    assert (t - last) * nheads * headdim >= LIMIT
    k = torch.zeros(batch, t, 1, d_state, dtype=torch.bfloat16, device=DEVICE)
    v = torch.zeros(batch, nheads, headdim, t, dtype=torch.bfloat16, device=DEVICE)
    v = v.movedim(3, 1) if time_innermost else v.view(batch, t, nheads, headdim)
    beta, total = (torch.ones(batch, t, nheads, device=DEVICE) * sign for sign in (1, -1))
    some = draw(1, batch, last, 1, d_state), draw(2, batch, last, nheads, headdim), draw(3, batch, last, nheads)
    for whole_one, piece in zip((k, v, beta), some, strict=True):
        whole_one[:, -last:] = piece.to(whole_one.dtype)
    got = chunk_states(k, v, beta, total, None, CHUNK)
    alone = chunk_states(*(x[:, -last:].contiguous() for x in (k, v, beta, total)), None, CHUNK)
    assert not got[0][:, :-last].any()
    assert_same_bits(got[0][:, -last:], alone[0], "v * beta")
    assert_same_bits(got[1][:, -2:], alone[1], "states")
    assert_same_bits(got[2], alone[2], "final state")
