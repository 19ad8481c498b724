"""What launchers of kernels share: strides, limits, and the dtype of sums."""

from collections.abc import Sequence
from functools import cache as memoized

import torch
import triton.language as tl
from torch import Tensor


def by_token(x: Tensor) -> Tensor:
    """(rows, t, ...) whose heads and features are dense, and in which one stride leads from token to token, that of
    ``token_strides``; x itself where it is so."""
    return x if _is_by_token(x.shape, x.stride()) else x.contiguous()


def token_strides(*tensors: Tensor) -> tuple[int, ...]:
    """From token to token of what ``by_token`` gives; of one token from row to row: the stride of an axis of one means
    nothing, and to make a view that has the other one takes longer than to ask."""
    return tuple(x.stride(0 if x.shape[1] == 1 else 1) for x in tensors)


@memoized  # of few shapes, those of steps
def _is_by_token(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape[2:]), reversed(strides[2:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return shape[1] == 1 or shape[0] == 1 or strides[0] == shape[1] * strides[1]


def padded(count: int) -> int:
    """The least power of two that is not below ``count``."""
    return 1 << (count - 1).bit_length()


def pieces(count: int, size: int) -> int:
    """How many of ``size`` hold ``count``."""
    return -(-count // size)


def strides(axis: int, *tensors: Tensor) -> tuple[int, ...]:
    """Of each of the tensors along an axis."""
    return tuple(x.stride(axis) for x in tensors)


def outer_strides(planes: Sequence[Tensor]) -> tuple[int, ...]:
    """Those of a row and of a head, plane by plane."""
    return tuple(stride for plane in planes for stride in plane.stride()[:2])


def registers(most: int | None) -> dict[str, int]:
    """A limit of registers a thread; what is not NVIDIA's has no such option."""
    return {} if most is None or torch.version.hip else {"maxnreg": most}


def wide(dtype: torch.dtype) -> tl.dtype:
    """The dtype that everything is summed in."""
    return tl.float64 if dtype == torch.float64 else tl.float32
