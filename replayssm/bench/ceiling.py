"""How fast this GPU reads memory: a plain streaming sum, measured in the same run as what is compared with it."""

import itertools
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.bench import timing

READ_BYTES = 4 * 2**30  # far above any cache


# One program sums TILES * BLOCK consecutive values of x.
@triton.jit
def sum_kernel(x_ptr, sums_ptr, TILES: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (TILES * BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for tile in tl.static_range(TILES):
        total += tl.load(x_ptr + first + tile * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total))


def sums(x: Tensor, tiles: int, block: int, num_warps: int) -> Tensor:
    """Sums of consecutive pieces of ``tiles * block`` values of ``x`` (values,) fp32, a whole number of pieces."""
    out = x.new_empty(x.numel() // (tiles * block))
    sum_kernel[(out.numel(),)](x, out, TILES=tiles, BLOCK=block, num_warps=num_warps)
    return out


def read_ceiling(device: torch.device) -> float:
    """TB/s of the best launch of a sum over 4 GiB."""
    x = torch.ones(READ_BYTES // 4, device=device)
    arms = []
    for tiles, block, num_warps in itertools.product((1, 4), (1024, 2048, 4096, 8192), (4, 8)):
        arms.append([partial(sums, x, tiles, block, num_warps)])
    times = timing.measure(arms, rounds=timing.ROUGH_ROUNDS)
    return READ_BYTES / min(time.median_us for time in times) / 1e6
