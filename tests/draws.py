"""Where the tests run and where their numbers come from."""

import os

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

# The device under test: the CPU, also where a GPU is present, unless the variable names another.
DEVICE = torch.device(os.environ.get("REPLAYSSM_TEST_DEVICE", "cpu"))

on_the_host = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="values are looked at on a CPU only: a GPU clamps and flags them, or trusts the caller"
)
same_bits_everywhere = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="matrix libraries of a GPU choose the order of sums by batch size"
)
seeds = st.integers(0, 2**31)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that do not depend on the device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)
