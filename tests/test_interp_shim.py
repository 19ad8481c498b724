"""The repairs of Triton's interpreter, each against torch."""

import pytest

pytest.importorskip("triton")
import torch
import triton
import triton.language as tl
from budgets import assert_same_bits
from draws import draw, on_the_host

pytestmark = on_the_host
NARROW = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
BLOCK = 65536


@triton.jit
def copy_kernel(source, target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


@triton.jit
def count_kernel(bound, target):
    count = 0
    for _ in range(tl.load(bound)):
        count += 1
    tl.store(target, count)


@triton.jit
def sum_kernel(a, b, target):
    tl.store(target, tl.load(a) + tl.load(b))


@triton.jit
def dot_kernel(a, b, target, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)
    start = tl.load(target + at)
    tl.store(target + at, tl.dot(tl.load(a + at), tl.load(b + at), start, input_precision="ieee"))


@triton.jit
def fma_kernel(a, b, c, target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.fma(tl.load(a + at), tl.load(b + at), tl.load(c + at)))


def copied(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    target = torch.empty(BLOCK, dtype=dtype)
    copy_kernel[(1,)](source, target, BLOCK)
    return target


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a dtype, 8-bit ones 256 times over."""
    if dtype.itemsize == 2:
        return torch.arange(-32768, 32768, dtype=torch.int16).view(dtype)
    return torch.arange(BLOCK).remainder(256).to(torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_narrow_number_widens_as_in_torch(dtype):
    every = patterns(dtype)
    exact = every.float()
    got = copied(every, torch.float32)
    assert torch.equal(got.isnan(), exact.isnan())
    assert_same_bits(got[~exact.isnan()], exact[~exact.isnan()], "widened")


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrowing_rounds_to_nearest_as_in_torch(dtype):
    """Every number of the dtype and its neighbours halfway to the next, with numbers of every size among them."""
    near = patterns(dtype).float()
    bits = draw(1, BLOCK).mul(2.0**30).to(torch.int32)
    halfway = 0.5 * (near + near.roll(-1))
    for source in (near, halfway, bits.view(torch.float32), draw(2, BLOCK, dtype=torch.float32)):
        got, expected = copied(source, dtype), source.to(dtype)
        numbers = ~expected.float().isnan()
        assert torch.equal(got.float().isnan(), ~numbers)
        assert_same_bits(got[numbers].view(torch.uint8), expected[numbers].view(torch.uint8), "narrowed")


@pytest.mark.parametrize("bound", [0, 1, 7])
def test_a_loop_runs_to_a_bound_that_was_loaded(bound):
    target = torch.full((1,), -1)
    count_kernel[(1,)](torch.tensor([bound]), target)
    assert target.item() == bound


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_that_32_bits_do_not_hold_is_an_error_and_one_of_64_is_none(sign):
    """The interpreter's own check, at the two limits."""
    small, large = (torch.tensor([sign * number], dtype=torch.int32) for number in (1, 2**31 - 1))
    target = torch.zeros(1, dtype=torch.int64)
    sum_kernel[(1,)](large, large - large, target)
    assert target.item() == large.item()
    sum_kernel[(1,)](large.long(), small, target)
    assert target.item() == sign * 2**31
    with pytest.raises(Exception, match="overflow"):
        sum_kernel[(1,)](large, small * 2, target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_product_of_matrices_takes_16_bit_numbers_and_sums_in_fp32(dtype):
    a, b = (draw(seed, 16, 16).mul(8).round().to(dtype) for seed in (3, 4))  # small integers: every sum is exact
    target = torch.full((16, 16), 0.5)
    dot_kernel[(1,)](a, b, target, 16)
    assert_same_bits(target, a.float() @ b.float() + 0.5)


def test_a_fused_multiply_add_is_rounded_once():
    """It gives the exact remainder of a product, and the sum of any three numbers as fp64 has it."""
    a, b, c = (draw(seed, 256, dtype=torch.float32) for seed in (5, 6, 7))
    for other in (-a * b, c):
        target = torch.empty(256)
        fma_kernel[(1,)](a, b, other, target, 256)
        assert_same_bits(target, (a.double() * b.double() + other.double()).float())
