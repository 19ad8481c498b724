"""Residual blocks, out of which ``HybridLM`` and heads for further tokens are made."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from replayssm.cache.step import ModuleState, StatefulModule
from replayssm.layers.norm import RMSNorm
from replayssm.models.config import MIXERS, Mixer


class Block(nn.Module):
    """One residual block: x + scale * mixer(norm(x)). The mixer gets ``dtype``; None is that of x."""

    def __init__(self, norm: RMSNorm, mixer: Mixer, scale: float = 1.0):
        super().__init__()
        self.norm, self.mixer, self.scale = norm, mixer, scale
        self.stateful = issubclass(type(mixer), StatefulModule)

    def reset_parameters(self) -> None:
        """Draw every parameter anew, in place."""
        self.norm.reset_parameters()
        self.mixer.reset_parameters()

    def forward(
        self,
        x: Tensor,
        state: ModuleState | None = None,
        *,
        dtype: torch.dtype | None = None,
        attention_mask: Tensor | None = None,
        rows: Tensor | None = None,
        parents: Tensor | None = None,
    ) -> Tensor:
        """(batch, t, d_model) -> same; the other arguments as for ``HybridLM``."""
        normed = self.norm(x).to(x.dtype if dtype is None else dtype)
        if not self.stateful:
            y = self.mixer(normed)
        elif state is None:
            y = self.mixer(normed, attention_mask=attention_mask)
        else:
            y = self.mixer(normed, state, attention_mask=attention_mask, rows=rows, parents=parents)
        return x + (y if self.scale == 1 else y * self.scale)


def new_block(
    what: str,
    config: Mapping[str, Any],
    entry: Mapping[str, Any],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Block:
    """The block that an entry of a config's layers describes; ``what`` names it in errors."""
    arguments = {key: value for key, value in entry.items() if key != "type"}
    try:
        mixer = MIXERS[entry["type"]](config["d_model"], **arguments, device=device, dtype=dtype)
    except ValueError as error:
        raise ValueError(f"HybridLM: {what}: {error}") from error
    return Block(new_norm(config, device, dtype), mixer, config.get("residual_scale", 1.0))


def new_norm(config: Mapping[str, Any], device: torch.device | str | None, dtype: torch.dtype | None) -> RMSNorm:
    """A norm of the residual stream."""
    plus_one = config.get("norm_plus_one", False)
    return RMSNorm(config["d_model"], eps=config["norm_eps"], plus_one=plus_one, device=device, dtype=dtype)
