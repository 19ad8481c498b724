"""Read copies, from what is stored: a launch behind the one that folds and stores.

What is stored is still in the cache next to the processors. No read format then has a say in which thread holds what of
a state that is folded, and with that in the order of the sums over it: a compiler lays a tile out for all that is done
with it.
"""

import importlib
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from replayssm.ops.launching import outer_strides, padded
from replayssm.ops.tiling import whole_heads
from replayssm.ops.triton_blocks import of_head
from replayssm.ops.triton_checkpoints import FORMATS
from replayssm.ops.triton_decode import ABREAST, BLOCK_B, LANES
from replayssm.ops.triton_fold import nth_to_flush, tile_keys, tile_rows
from replayssm.ops.triton_overlap import let_next_begin

# Axes: H value heads, P headdim, N d_state. Tiles of the state: see triton_fold.


@triton.jit(do_not_specialize=["batch"])
def quantize_kernel(
    planes, copies, rows, flushing, seqlen, flushed, batch, plane_strides, copy_strides,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BLOCK_B: tl.constexpr,
    ROWS: tl.constexpr, ABREAST: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr,
    LOAD: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    # The programs share the rows of the call that have stored a state, a head at a time.
    let_next_begin()
    item = tl.program_id(0)
    called, _ = nth_to_flush(item // H, flushing, rows, batch, BLOCK_B)
    while called >= 0:
        row = called.to(tl.int64)
        if rows is not None:
            row = tl.load(rows + row).to(tl.int64)
        head = item % H
        if tl.load(seqlen + row) > tl.load(flushed + row):
            p = tile_rows(0, ROWS, ABREAST)
            held = of_head(planes, plane_strides, row, head)
            tile = LOAD(held, p, tile_keys(ABREAST, BLOCK_N, LANES), P, N).to(tl.float32)
            QUANTIZE(tile, of_head(copies, copy_strides, row, head), p, P, N)
        item += tl.num_programs(0)
        called, _ = nth_to_flush(item // H, flushing, rows, batch, BLOCK_B)


def copy(
    planes: Sequence[Tensor],
    copies: Sequence[Tensor],
    flushing: Tensor,
    seqlen: Tensor,
    flushed: Tensor,
    rows: Tensor | None,
    checkpoint: str,
    read_format: str,
    shape: tuple[int, int, int],
) -> None:
    """Copy the states of rows that flush and had something to fold; arguments as for ``triton_store.store``.

    Args:
        shape: of a state, (nheads, headdim, d_state).
    """
    nheads, headdim, d_state = shape
    batch = len(flushing) if rows is None else len(rows)
    quantize = importlib.import_module(f"replayssm.ops.triton_formats.{read_format}").quantize
    cut = whole_heads(headdim, d_state)
    quantize_kernel[(min(batch * nheads, cut.programs),)](
        tuple(planes), tuple(copies), rows, flushing, seqlen, flushed, batch,
        outer_strides(planes), outer_strides(copies), nheads, headdim, d_state,
        min(BLOCK_B, padded(batch)), cut.rows, ABREAST, cut.keys, LANES,
        FORMATS[checkpoint].load, quantize, num_warps=cut.warps,
    )  # fmt: skip
