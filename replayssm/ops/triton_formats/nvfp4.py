"""nvfp4 for kernels: codes become fp16 two at a time, and tensor cores multiply them; see ``cache.formats.nvfp4``."""

import triton
import triton.language as tl

from replayssm.ops.triton_codes import SHRUNK, as_codes, as_fp16, from_e2m1


@triton.jit
def held(
    planes, strides, row, head, first_p, x_q, x_k,
    P: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """See the package."""
    BLOCKS: tl.constexpr = (N + 15) // 16
    p = first_p + tl.arange(0, ROWS)[:, None]
    word, block = tl.arange(0, KEYS // 8), tl.arange(0, KEYS // 16)
    codes = (planes[0] + row * strides[0] + head * (P * BLOCKS * 8)).to(tl.pointer_type(tl.uint32), bitcast=True)
    words = tl.load(codes + p * (2 * BLOCKS) + word, mask=(p < P) & (word < 2 * BLOCKS), other=0)
    scale = planes[1] + row * strides[1] + (head * P + p) * BLOCKS + block
    scales = tl.load(scale, mask=(p < P) & (block < BLOCKS), other=0)
    tile = from_e2m1(words, scales, ROWS, KEYS, 2)
    peak = tl.load(planes[2] + row * strides[2] + head) * SHRUNK
    q, scale_q = as_fp16(x_q)
    state_q = tl.dot(tile, as_codes(tl.trans(q), KEYS, x_q.shape[0])) * (scale_q * peak)
    state_k = state_q
    if DELTA:
        k, scale_k = as_fp16(x_k)
        state_k = tl.dot(tile, as_codes(tl.trans(k), KEYS, x_k.shape[0])) * (scale_k * peak)
    return state_q, state_k
