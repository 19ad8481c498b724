"""Rotary positions: the angle between a query and a key tells how far apart they stand."""

import torch
from torch import Tensor


def rotate(x: Tensor, position: Tensor, theta: float, dim: int | None = None) -> Tensor:
    """Turn the channel pairs (i, i + dim / 2) of each head by position * theta^(-2 i / dim) (arXiv 2104.09864).

    Args:
        x: (batch, t, heads, headdim).
        position: (batch or 1, t) int64.
        dim: channels from the first on that take part, even; None is all. The others stay as they are.

    Returns:
        As x. Angles are in fp32 (fp64 for fp64 x) whatever the dtype of x: bf16 cannot hold a position.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    dim = x.shape[-1] if dim is None else dim
    pairs = dim // 2
    frequency = theta ** (torch.arange(pairs, device=x.device, dtype=dtype) / -pairs)
    angle = (position.unsqueeze(-1) * frequency).unsqueeze(2)  # (batch, t, 1, pairs)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :dim].to(dtype).chunk(2, -1)
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
    return torch.cat([turned, x[..., dim:]], -1)
