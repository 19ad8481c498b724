"""lr_if4 for kernels: the 4-bit part as nvfp4's, the terms by their products; see ``cache.formats.lr_if4``."""

import triton
import triton.language as tl

from replayssm.ops.triton_codes import SHRUNK, as_codes, as_fp16, from_e4m3, from_if4


@triton.jit
def _terms(
    us, vs, factors, p, x, P: tl.constexpr, N: tl.constexpr, KEYS: tl.constexpr, TERMS: tl.constexpr
):  # fmt: skip
    """What the terms of one head hold for x (t, KEYS): (ROWS, t)."""
    n = tl.arange(0, KEYS)
    found = tl.zeros((p.shape[0], x.shape[0]), tl.float32)
    for term in tl.static_range(TERMS):
        u = from_e4m3(tl.load(us + term * P + p, mask=p < P, other=0)) * tl.load(factors + 1 + term)
        v = from_e4m3(tl.load(vs + term * N + n, mask=n < N, other=0)) * tl.load(factors + 1 + TERMS + term)
        found += u[:, None] * tl.sum(x.to(tl.float32) * v, axis=1)
    return found


@triton.jit
def held(
    planes, strides, row, head, first_p, x,
    P: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """See the package."""
    BLOCKS: tl.constexpr = (N + 31) // 32
    TERMS: tl.constexpr = 1 if P <= 80 else 2
    p = first_p + tl.arange(0, ROWS)
    word, block = tl.arange(0, KEYS // 8), tl.arange(0, KEYS // 32 if KEYS >= 32 else 1)
    codes = (planes[0] + row * strides[0] + head * (P * BLOCKS * 16)).to(tl.pointer_type(tl.uint32), bitcast=True)
    words = tl.load(codes + p[:, None] * (4 * BLOCKS) + word, mask=(p[:, None] < P) & (word < 4 * BLOCKS), other=0)
    scale = planes[1] + row * strides[1] + (head * P + p[:, None]) * BLOCKS + block
    scales = tl.load(scale, mask=(p[:, None] < P) & (block < BLOCKS), other=0)
    tile = from_if4(words, scales, ROWS, KEYS, 4 if KEYS >= 32 else KEYS // 8)
    us, vs = planes[2] + row * strides[2] + head * (TERMS * P), planes[3] + row * strides[3] + head * (TERMS * N)
    factors = planes[4] + row * strides[4] + head * (1 + 2 * TERMS)
    peak = tl.load(factors) * SHRUNK
    x16, scale_x = as_fp16(x)
    found = tl.dot(tile, as_codes(tl.trans(x16), KEYS, x.shape[0]), input_precision="ieee") * (scale_x * peak)
    found += _terms(us, vs, factors, p, x, P, N, KEYS, TERMS)
    return found
