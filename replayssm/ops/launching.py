"""What launchers of kernels share: strides, limits, and the dtype of sums."""

import torch
import triton.language as tl
from torch import Tensor


def by_token(x: Tensor) -> Tensor:
    """(rows, t, ...) whose heads and features are dense, and in which one stride leads from token to token; a view of x
    where there is one."""
    dense = x[0, 0].is_contiguous()
    if dense and x.shape[1] == 1:  # the stride of an axis of one means nothing: it gets that from row to row
        return x.as_strided(x.shape, (x.stride(0), x.stride(0), *x.stride()[2:]))
    dense = dense and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if dense else x.contiguous()


def strides(axis: int, *tensors: Tensor) -> tuple[int, ...]:
    """Of each of the tensors along an axis."""
    return tuple(x.stride(axis) for x in tensors)


def registers(most: int | None) -> dict[str, int]:
    """A limit of registers a thread; what is not NVIDIA's has no such option."""
    return {} if most is None or torch.version.hip else {"maxnreg": most}


def wide(dtype: torch.dtype) -> tl.dtype:
    """The dtype that everything is summed in."""
    return tl.float64 if dtype == torch.float64 else tl.float32
