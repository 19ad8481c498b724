"""Scan without the delta rule: the states between chunks, from keys stored once a group."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# A sequence of 128 heads of 64 makes 256 programs, two on each processor of an H200: one computes while one waits.
BLOCK_P, BLOCK_N, NUM_WARPS, NUM_STAGES = 32, 128, 4, 3

# Axes: T tokens, C tokens of a chunk, H heads, G key groups, P headdim, N d_state.
# One program owns (row of the batch, head, BLOCK_P rows and BLOCK_N keys of the state) and walks the chunks.


@triton.jit
def _chunk(
    v, beta, total, first, row, t, p, T, row_stride, t_stride,
    H: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Of the chunk that begins with token first, zeros from T on: v (p, t), beta, decays, and the decay of them all.

    v points at rows p of the state, in any strides: a layer's convolution leaves time innermost.
    """
    live = first + t < T
    token = row * T + first
    begin = row * row_stride + tl.cast(first, tl.int64) * t_stride
    values = tl.load(v + begin + t * t_stride, mask=live & (p[:, None] < P), other=0.0)
    strength = tl.load(beta + token * H + t * H, mask=live, other=0.0)
    decays = tl.load(total + token * H + t * H, mask=live, other=0.0)
    last = tl.load(total + (token + tl.minimum(T - first, C) - 1) * H, mask=first < T, other=0.0)
    return values, strength, decays, last


@triton.jit
def states_kernel(
    written, states, final, k, v, beta, total, initial, T, row_stride, t_stride, head_stride, p_stride,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    P_TILES: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    n_tile = tl.program_id(0) // P_TILES % N_TILES
    row_head = (tl.program_id(0) // (P_TILES * N_TILES)).to(tl.int64)
    row, head = row_head // H, row_head % H
    p = tl.program_id(0) % P_TILES * BLOCK_P + tl.arange(0, BLOCK_P)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.arange(0, C)
    at_tile = p[:, None] * N + n
    in_tile = (p[:, None] < P) & (n < N)
    v, beta, total = v + head * head_stride + p[:, None].to(tl.int64) * p_stride, beta + head, total + head
    tile = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    if initial is not None:
        tile = tl.load(initial + row_head * P * N + at_tile, mask=in_tile, other=0.0)
    values, strength, decays, last = _chunk(v, beta, total, 0, row, t, p, T, row_stride, t_stride, H, P, C)
    for first in range(0, T, C):
        # the next chunk's are on their way while this one is applied, also where no asynchronous copy can take them
        chunk = _chunk(v, beta, total, first + C, row, t, p, T, row_stride, t_stride, H, P, C)
        live, token = first + t < T, row * T + first
        at_state = ((row * tl.cdiv(T, C) + first // C) * H + head) * P * N
        tl.store(states + at_state + at_tile, tile.to(states.dtype.element_ty), mask=in_tile)
        at_keys = (token * G + head // (H // G)) * N
        keys = tl.load(k + at_keys + t[:, None] * (G * N) + n, mask=live[:, None] & (n < N), other=0.0)
        writes = (values.to(tl.float32) * strength.to(tl.float32)).to(keys.dtype)
        mine = live & (p[:, None] < P) & (n_tile == 0)
        tl.store(written + (token * H + head) * P + t * (H * P) + p[:, None], writes, mask=mine)
        writes = (writes.to(tl.float32) * tl.exp2(last - decays)).to(keys.dtype)
        tile = tl.dot(writes, keys, tile * tl.exp2(last), input_precision="ieee")
        values, strength, decays, last = chunk
    tl.store(final + row_head * P * N + at_tile, tile, mask=in_tile)


def chunk_states(
    k: Tensor, v: Tensor, beta: Tensor, total: Tensor, initial: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What a scan in chunks needs for its outputs (arXiv 2405.21060, section 6): writes, and states between chunks.

    Args:
        k: (batch, t, ngroups, d_state) bf16 or fp16, contiguous.
        v: (batch, t, nheads, headdim) in the dtype of k and any strides.
        beta: (batch, t, nheads), contiguous.
        total: (batch, t, nheads) fp32, contiguous: log decays to base 2, summed from the start of each chunk.
        initial: (batch, nheads, headdim, d_state) fp32, contiguous, before the first token; None is zeros.
        chunk: tokens, a power of two from 16 on; the last chunk may have fewer.

    Returns:
        v * beta (batch, t, nheads, headdim) and the state before each chunk (batch, chunks, nheads, headdim, d_state),
        contiguous in the dtype of k; the final state (batch, nheads, headdim, d_state), fp32.
    """
    batch, t, ngroups, d_state = k.shape
    nheads, headdim = v.shape[2:]
    written = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    states = k.new_empty(batch, triton.cdiv(t, chunk), nheads, headdim, d_state)
    final = torch.empty(batch, nheads, headdim, d_state, dtype=torch.float32, device=v.device)
    block_p = max(16, min(BLOCK_P, triton.next_power_of_2(headdim)))  # tensor cores take 16 at least
    block_n = max(16, min(BLOCK_N, triton.next_power_of_2(d_state)))
    states_kernel[(batch * nheads * triton.cdiv(headdim, block_p) * triton.cdiv(d_state, block_n),)](
        written, states, final, k, v, beta, total, initial, t, *v.stride(),
        nheads, ngroups, headdim, d_state, chunk, block_p, block_n, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return written, states, final
