"""What launchers of kernels share: strides, limits, and the dtype of sums."""

import torch
import triton.language as tl
from torch import Tensor


def by_token(x: Tensor) -> Tensor:
    """(rows, t, ...) such that heads and features are dense and one stride leads from token to token; x if it is."""
    dense = x[0, 0].is_contiguous() and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    # not contiguous(): it keeps a tensor of one token whose strides mean nothing
    return x if dense else x.clone(memory_format=torch.contiguous_format)


def strides(axis: int, *tensors: Tensor) -> tuple[int, ...]:
    """Of each of the tensors along an axis."""
    return tuple(x.stride(axis) for x in tensors)


def registers(most: int | None) -> dict[str, int]:
    """A limit of registers a thread; what is not NVIDIA's has no such option."""
    return {} if most is None or torch.version.hip else {"maxnreg": most}


def wide(dtype: torch.dtype) -> tl.dtype:
    """The dtype that everything is summed in."""
    return tl.float64 if dtype == torch.float64 else tl.float32
