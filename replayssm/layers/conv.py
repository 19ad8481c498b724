"""The short causal convolution: depthwise, then SiLU. Its history comes in front of its input."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replayssm.cache.layer_state import LayerState


class ShortConv(nn.Conv1d):
    """A depthwise causal convolution over time and the SiLU that every family puts behind it.

    Parameters are those of ``nn.Conv1d``: weight (channels, 1, d_conv), bias (channels).
    """

    def __init__(
        self,
        channels: int,
        d_conv: int,
        *,
        bias: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(channels, channels, d_conv, groups=channels, bias=bias, device=device, dtype=dtype)

    def forward(self, window: Tensor) -> Tensor:
        """What ``with_history`` gives -> (batch, t, channels)."""
        stride = 1
        if window.ndim == 4:  # a window for each node of a tree: laid one after another, they take the sums of a chain
            stride, window = window.shape[2], window.flatten(1, 2)
        y = F.conv1d(window.transpose(1, 2), self.weight, self.bias, stride=stride, groups=self.groups)
        return F.silu(y.transpose(1, 2))


def with_history(x: Tensor, conv_state: LayerState | None, d_conv: int) -> Tensor:
    """Put the last d_conv - 1 inputs before ``x`` (batch, t, channels): the cached ones, or zeros without a cache.

    Returns:
        (batch, d_conv - 1 + t, channels), history first; in a step with a draft tree (batch, t, d_conv, channels).
    """
    if conv_state is not None:
        return conv_state.extend_conv(x)
    return F.pad(x, (0, 0, d_conv - 1, 0))
