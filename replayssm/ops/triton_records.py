"""The ring of records as the kernels see it: what live records hold for a query, and the append of a new one."""

import triton
import triton.language as tl

# Axes: H value heads, G key groups, P headdim, N d_state, R records. A name ending in _ptr points at the row of the
# cache that the program works on. n (BLOCK_N,) and p (BLOCK_P,) are indices.


@triton.jit
def append_shared(
    k, g, beta, k_ptr, g_ptr, beta_ptr, slot, head, n,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, CHANNEL: tl.constexpr,
):  # fmt: skip
    """Write what the programs of a head share into its slot, and what those of a group share."""
    tl.store(beta_ptr + slot * H + head, beta)
    if CHANNEL:
        tl.store(g_ptr + (slot * H + head) * N + n, g, mask=n < N)
    else:
        tl.store(g_ptr + slot * H + head, g)
    if head % (H // G) == 0:
        tl.store(k_ptr + (slot * G + head // (H // G)) * N + n, k, mask=n < N)


@triton.jit
def from_records(
    q, k, ahead, k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr, start_slot, count, head, n, p,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, BLOCK_R: tl.constexpr,
    CHANNEL: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What count live records hold for q and for k (n,), decayed by what follows and by ahead; and the whole decay."""
    for_q = tl.zeros(p.shape, WIDE)
    for_k = tl.zeros(p.shape, WIDE)
    elapsed = ahead  # log decay since the record at hand; newest first
    oldest = start_slot - count
    oldest = tl.where(oldest < 0, oldest + SLOTS, oldest)
    if CHANNEL:
        before = tl.load(g_ptr + (oldest * H + head) * N + n, mask=(count > 0) & (n < N), other=0.0)
    else:
        before = tl.load(g_ptr + oldest * H + head, mask=count > 0, other=0.0)
    for first in range(0, count, BLOCK_R):
        age = first + tl.arange(0, BLOCK_R)
        live = age < count
        slot = start_slot - 1 - age
        slot = tl.where(slot < 0, slot + SLOTS, slot)
        later = tl.where(slot + 1 == SLOTS, 0, slot + 1)
        has_later = (age > 0) & live
        keys = tl.load(
            k_ptr + (slot[:, None] * G + head // (H // G)) * N + n, mask=live[:, None] & (n < N), other=0.0
        ).to(WIDE)  # fmt: skip
        at_p = (slot[:, None] * H + head) * P + p[None, :]
        live_p = live[:, None] & (p[None, :] < P)
        if DELTA:
            writes = tl.load(u_ptr + at_p, mask=live_p, other=0.0)
        else:
            writes = tl.load(v_ptr + at_p, mask=live_p, other=0.0).to(WIDE)
            writes *= tl.load(beta_ptr + slot * H + head, mask=live, other=0.0)[:, None]
        if CHANNEL:
            at_n = (later[:, None] * H + head) * N + n
            g = tl.load(g_ptr + at_n, mask=has_later[:, None] & (n < N), other=0.0)
            keys *= tl.exp(elapsed + tl.cumsum(g, axis=0))
            over_q = tl.sum(keys * q, axis=1)
            over_k = tl.sum(keys * k, axis=1)
        else:
            g = tl.load(g_ptr + later * H + head, mask=has_later, other=0.0)
            weight = tl.exp(elapsed + tl.cumsum(g, axis=0))
            over_q = tl.sum(keys * q, axis=1) * weight
            over_k = tl.sum(keys * k, axis=1) * weight
        elapsed += tl.sum(g, axis=0)
        for_q += tl.sum(writes * over_q[:, None], axis=0)
        if DELTA:
            for_k += tl.sum(writes * over_k[:, None], axis=0)
    return for_q, for_k, elapsed + before
