"""Every tolerance of the test suite, computed from the numbers at hand; nothing else in the tests holds one.

E64: an fp64 result may miss the fp64 token loop by 1e-12 of the output's RMS, at every element.
E32: a result may miss the fp64 token loop by 8 times what the same loop misses when it runs in fp32.
E16: a result of 16-bit kernels may miss the fp64 result by 2 times what plain PyTorch misses whose matrix products take
     16-bit operands.
Draws: the chi-square of counts may be as large as it is once in three million runs of right code.
"""

import torch
from torch import Tensor

REL64 = 1e-12
SLACK_GRADIENT = 10.0  # a gradient collects the rounding of both directions, over longer sums
SLACK16 = 2.0  # kernels also round what they hand from one to the next
SLACK32 = 8.0
SIGMAS = 5.0  # of a normal distribution, the chance of more is 3e-7
SLACK_PART = 4.0  # of the RMS error over a whole run, what a few of its tokens may miss
STOCK_FLOOR = 1e-6  # transformers computes in fp32 inside, whatever the dtype of its weights
TRAFFIC_MODEL = 0.25  # of a measured time: clocks, kernels and machines differ by as much


def worst(x: Tensor) -> float:
    return x.double().abs().max().item() if x.numel() else 0.0


def rms(x: Tensor) -> float:
    largest = worst(x)  # divided out: squares of decayed states underflow
    return largest * (x.double() / largest).pow(2).mean().sqrt().item() if largest else 0.0


def e64(exact: Tensor) -> float:
    """The absolute error that an fp64 result may have at any element."""
    return REL64 * rms(exact) + torch.finfo(torch.float64).tiny


def e32(plain: Tensor, exact: Tensor) -> float:
    """The RMS error that a result may have where plain fp32 PyTorch gives ``plain`` for ``exact``."""
    return SLACK32 * rms(plain.double() - exact.double()) + torch.finfo(torch.float32).eps * rms(exact)


def assert_e16(got: Tensor, plain: Tensor, exact: Tensor, what: str = "output") -> None:
    """``plain``: the same by plain PyTorch whose products take operands of 16 bits, rounded to the dtype of ``got``."""
    assert got.shape == exact.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    assert torch.isfinite(got).all(), f"{what}: {(~torch.isfinite(got)).sum().item()} values are not finite"
    error = rms(got.double() - exact.double())
    allowed = SLACK16 * rms(plain.to(got.dtype).double() - exact.double())
    assert error <= allowed, f"{what}: rms error {error:.2e} is over the budget E16 = {allowed:.2e}"


def assert_e64(got: Tensor, exact: Tensor, what: str = "output") -> None:
    assert got.shape == exact.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    assert torch.isfinite(got).all(), f"{what}: {(~torch.isfinite(got)).sum().item()} values are not finite"
    error, allowed = worst(got.double() - exact.double()), e64(exact)
    assert error <= allowed, f"{what}: error {error:.2e} is over the budget E64 = {allowed:.2e}"


def assert_e32(got: Tensor, exact: Tensor, allowed: float, what: str = "output") -> None:
    """``allowed`` comes from ``e32`` over a whole run: the error of a few numbers is no yardstick."""
    assert got.shape == exact.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    assert torch.isfinite(got).all(), f"{what}: {(~torch.isfinite(got)).sum().item()} values are not finite"
    error = rms(got.double() - exact.double())
    assert error <= allowed, f"{what}: rms error {error:.2e} is over the budget E32 = {allowed:.2e}"


def assert_gradient(got: Tensor | None, exact: Tensor | None, what: str, among: float = 0.0) -> None:
    """Gradients in fp64: 10 times E64.

    ``among`` is the RMS of all gradients of the run: one that is over 100 times smaller carries their rounding.
    """
    assert got is not None, f"there is no gradient of {what}"
    assert exact is not None, f"the oracle has no gradient of {what}"
    assert torch.isfinite(got).all(), f"the gradient of {what} is not finite"
    error, allowed = worst(got.double() - exact.double()), SLACK_GRADIENT * max(e64(exact), REL64 * among / 100)
    assert error <= allowed, f"gradient of {what}: error {error:.2e} is over the budget {allowed:.2e}"


def assert_same_bits(got: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """Bit for bit, NaN included."""
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    differs = got.reshape(-1).view(torch.uint8) != expected.reshape(-1).view(torch.uint8)
    assert not differs.any(), f"{what}: differs by up to {worst((got.double() - expected.double()).nan_to_num()):.2e}"


def assert_e32_part(got: Tensor, exact: Tensor, allowed: float, what: str = "output") -> None:
    """A few tokens of a run over which ``allowed`` was taken."""
    assert_e32(got, exact, SLACK_PART * allowed, what)


def assert_near_stock(got: Tensor, stock: Tensor, what: str = "output") -> None:
    """Agreement with a third party's code that rounds to fp32 inside."""
    error, allowed = worst(got.double() - stock.double()), STOCK_FLOOR * max(1.0, rms(stock))
    assert error <= allowed, f"{what}: differs from transformers by {error:.2e}, allowed {allowed:.2e}"


def assert_predicted(predicted: float, measured: float, what: str) -> None:
    """A time from the traffic model, against one that was taken."""
    allowed = TRAFFIC_MODEL * measured
    assert abs(predicted - measured) <= allowed, f"{what}: predicted {predicted:.1f}, measured {measured:.1f}"


def assert_drawn_from(counts: Tensor, distribution: Tensor, what: str = "draws") -> None:
    """Counts of draws (n, categories), each row from its distribution of the same shape; the chi-square test.

    Its limit is Wilson and Hilferty's: a chi-square divided by its degrees of freedom is the cube of a normal number of
    mean 1 - v and variance v, v = 2 / (9 * degrees).
    """
    counts, distribution = torch.atleast_2d(counts.double()), torch.atleast_2d(distribution.double())
    possible = distribution > 0
    assert (counts[~possible] == 0).all(), f"{what}: something was drawn that cannot be"
    expected = counts.sum(1, keepdim=True) * distribution
    assert (expected[possible] >= 5).all(), f"{what}: too few draws for a chi-square test"
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    degrees = int(possible.sum()) - len(counts)
    v = 2 / (9 * degrees)
    limit = degrees * (1 - v + SIGMAS * v**0.5) ** 3
    assert statistic <= limit, f"{what}: chi-square {statistic:.1f} of {degrees} degrees is over the limit {limit:.1f}"
