"""Every tolerance of the test suite, computed from the numbers at hand; nothing else in the tests holds one.

E64: an fp64 result may miss the fp64 token loop by 1e-12 of the output's RMS, at every element.
E32: a result may miss the fp64 token loop by 8 times what the same loop misses when it runs in fp32.
E16: a result of 16-bit kernels may miss the fp64 result by 2 times what plain PyTorch misses whose matrix products take
     16-bit operands.
Draws: the chi-square of counts may be as large as it is once in three million runs of right code.
Formats: what fewer bits cost on given numbers was measured once, by code of another author; the ranges are around that.
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
# Relative RMS error, in percent, on normal numbers (64, 64, 128): lowest and highest. Least squares of the grid, not
# the code, decide about these; lr_if4 finds nothing to take out of noise.
FORMAT_ERROR = {
    "bf16": (0.155, 0.175),
    "fp8": (2.4, 2.75),
    "int8": (0.48, 0.60),
    "nvfp4": (9.0, 10.1),
    "lr_if4": (8.2, 9.4),
    "fp16_sr": (0.0275, 0.0330),
    "bf16_sr": (0.220, 0.262),
    "int16_sr": (0.0033, 0.0045),
    "int8_sr": (0.71, 0.90),
    "fp8_sr": (3.2, 4.1),
    "nvfp4_sr": (12.7, 15.0),
}
STOCHASTIC = (1.33, 1.50)  # its error over that of rounding to the nearest; sqrt(2) where a step is uniform
LR_IF4 = 0.02  # of lr_if4's error: how far a kernel's, whose sums run in another order, may be from it
FEW_CODES = 1e-4  # of its codes may be others then
# A fold in another order of sums moves numbers by some 2^-23 of themselves, across the edge between two codes of 16
# bits once in 2^8, of fewer bits less often; codes of the finest format are 2^-15 of the row's largest number apart.
FEW_APART = 0.01
SAME_CODE = 2.0**-17
# On the streams of streams.py, Mamba-2 and Gated DeltaNet: errors of outputs in percent, or ratios of errors, that were
# measured there by that author, and from them what may be.
STREAMS = {
    "late over early, read nvfp4": ((0, 1.4), (0, 1.4)),  # 0.91 to 1.24
    "late over early, stored nvfp4_sr": ((1.2, 9), (1.2, 9)),  # 1.41 to 1.92
    "late over early, stored nvfp4 to the nearest": ((1.4, 9), (1.4, 9)),  # 1.66 to 2.50
    "stored nvfp4_sr over read nvfp4": ((2.5, 99), (2.5, 99)),  # 3.9 to 5.4
    "read lr_if4 over read nvfp4": ((0, 0.35), (0, 0.85)),  # 0.10 to 0.25, 0.57 to 0.72
    "stored fp16_sr": ((0, 0.10), (0, 0.10)),  # 0.035 to 0.062 %
    "stored int16_sr": ((0, 0.02), (0, 0.02)),  # 0.005 to 0.009 %
    "read lr_if4 over read nvfp4, default": ((0, 0.40), (0, 0.65)),  # 0.24, 0.55
    "read lr_if4 over read nvfp4, white": ((0, 0.75), (0, 0.77)),  # 0.66, 0.67
    "read lr_if4 over read nvfp4, worst head": ((0, 1.2), (0, 1.2)),  # 0.83, 0.97
    "read int8 over read fp8": ((0, 0.5), (0, 0.5)),  # 0.26 to 0.32, 0.23 to 0.26
    # 16 heads and 16384 tokens, the last 8192 of them
    "far over near, read nvfp4": ((0, 1.3), (0, 1.3)),  # 1.12, 1.01
    "far, read nvfp4": ((0, 4.0), (0, 5.5)),  # 3.05, 4.31 %
    "read nvfp4, stored fp16_sr over fp32": ((0.97, 1.03), (0.97, 1.03)),  # 1.002
    "far over near, stored nvfp4_sr": ((1.5, 9), (1.5, 9)),  # 2.1, 2.0
    "far, stored nvfp4_sr over read nvfp4": ((3, 99), (3, 99)),  # 4.9, 5.5
    "far, stored fp16_sr": ((0, 0.10), (0, 0.10)),  # 0.061, 0.059 %
    "far, stored int16_sr": ((0, 0.02), (0, 0.02)),  # 0.012, 0.009 %
    "window 1, stored fp16 to the nearest, worst head": ((5, 99), (5, 99)),  # 19 %
    "window 1, stored fp16_sr, worst head": ((0, 1.5), (0, 1.5)),  # 0.8 %
}
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


def assert_within(value: float, bounds: tuple[float, float], what: str) -> None:
    """A measured number in the range that it must be in."""
    low, high = bounds
    assert low <= value <= high, f"{what}: {value:.4g} is not between {low:g} and {high:g}"


def assert_on_stream(value: float, what: str, kind: str) -> None:
    """``kind``: "mamba2" or "gated_deltanet"."""
    assert_within(value, STREAMS[what][kind == "gated_deltanet"], f"{what}, {kind}")


def assert_mean_of_draws(draws: Tensor, exact: float, variance: float, what: str) -> None:
    """The mean of independent draws, each of at most this variance."""
    error, allowed = abs(draws.double().mean().item() - exact), SIGMAS * (variance / draws.numel()) ** 0.5
    assert error <= allowed, f"{what}: the mean misses {exact:.6g} by {error:.2e}, allowed {allowed:.2e}"


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
