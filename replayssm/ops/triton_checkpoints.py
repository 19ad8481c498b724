"""How a checkpoint is stored, in kernels: the planes of ``cache.checkpoint``, bit for bit.

A ``load_`` function gives the tile of a head from its planes, a ``store_`` function rounds a tile into them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from replayssm.ops.triton_blocks import (
    read_fp8_rows,
    read_int8_blocks,
    read_int16_rows,
    read_nvfp4,
    write_fp8_rows,
    write_int8_blocks,
    write_int16_rows,
    write_nvfp4,
    write_rows,
)
from replayssm.ops.triton_fold import load_rows
from replayssm.ops.triton_rounding import state_words, to_bf16, to_fp16

# Axes: P headdim, N d_state. A tile of the state is (ABREAST, deep, outer, LANES), as in triton_fold: all rows of a
# head, zeros behind P and N; p (ABREAST, deep) are the
# indices of its rows, n (ABREAST, 1, outer, LANES) those of its keys. Planes are pointers at those of the row and
# head. A stream of random words is (seed, position, layer, head).


@triton.jit
def _words(stream, tile, p, P: tl.constexpr, N: tl.constexpr):
    seed, position, layer, head = stream
    words = state_words(seed, position, layer, head, p, P, N, tile.shape[2] * tile.shape[3])
    return tl.reshape(words, tile.shape)


@triton.jit
def load_exact(planes, p, n, P: tl.constexpr, N: tl.constexpr):
    return load_rows(planes[0], p, n, P, N)


@triton.jit
def load_float16(planes, p, n, P: tl.constexpr, N: tl.constexpr):
    return load_rows(planes[0], p, n, P, N).to(tl.float32)


@triton.jit
def store_fp16(tile, stream, planes, p, P: tl.constexpr, N: tl.constexpr):
    write_rows(to_fp16(tile.to(tl.float32), _words(stream, tile, p, P, N)), planes[0], p, P, N)


@triton.jit
def store_bf16(tile, stream, planes, p, P: tl.constexpr, N: tl.constexpr):
    write_rows(to_bf16(tile.to(tl.float32), _words(stream, tile, p, P, N)), planes[0], p, P, N)


@triton.jit
def load_int16(planes, p, n, P: tl.constexpr, N: tl.constexpr):
    return read_int16_rows(planes, p, n, P, N)


@triton.jit
def store_int16(tile, stream, planes, p, P: tl.constexpr, N: tl.constexpr):
    write_int16_rows(tile.to(tl.float32), _words(stream, tile, p, P, N), planes, p, P, N)


@triton.jit
def load_fp8(planes, p, n, P: tl.constexpr, N: tl.constexpr):
    return read_fp8_rows(planes, p, n, P, N)


@triton.jit
def store_fp8(tile, stream, planes, p, P: tl.constexpr, N: tl.constexpr):
    write_fp8_rows(tile.to(tl.float32), _words(stream, tile, p, P, N), planes, p, P, N)


@triton.jit
def load_int8(planes, p, n, P: tl.constexpr, N: tl.constexpr):
    return read_int8_blocks(planes, p, n, P, N)


@triton.jit
def store_int8(tile, stream, planes, p, P: tl.constexpr, N: tl.constexpr):
    write_int8_blocks(tile.to(tl.float32), _words(stream, tile, p, P, N), planes, p, P, N)


@triton.jit
def load_nvfp4(planes, p, n, P: tl.constexpr, N: tl.constexpr):
    return read_nvfp4(planes, p, n, P, N)


@triton.jit
def store_nvfp4(tile, stream, planes, p, P: tl.constexpr, N: tl.constexpr):
    write_nvfp4(tile.to(tl.float32), _words(stream, tile, p, P, N), planes, p, P, N)


class CheckpointFunctions(NamedTuple):
    """What a kernel needs of a checkpoint format.

    Attributes:
        load: planes -> tile.
        store: tile -> planes; None where a fold leaves it as it is stored.
    """

    load: Any
    store: Any


EXACT = "fp32"
FORMATS = {
    EXACT: CheckpointFunctions(load_exact, None),
    "fp16_sr": CheckpointFunctions(load_float16, store_fp16),
    "bf16_sr": CheckpointFunctions(load_float16, store_bf16),
    "int16_sr": CheckpointFunctions(load_int16, store_int16),
    "int8_sr": CheckpointFunctions(load_int8, store_int8),
    "fp8_sr": CheckpointFunctions(load_fp8, store_fp8),
    "nvfp4_sr": CheckpointFunctions(load_nvfp4, store_nvfp4),
}
