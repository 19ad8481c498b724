"""How many directions the states of a model hold, and what that does to the error of a copy of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from replayssm.cache import formats


def spectra(states: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """One entry a layer.

    The stable rank of a state is the sum of its squared singular values over the largest of them: 1 for a state of one
    write, d_state for one that treats all keys alike. lr_if4 gains by it, nvfp4 does not.

    Args:
        states: layer -> (texts, nheads, headdim, d_state).

    Returns:
        For each layer "stable_rank" (nheads values, means over texts), and "nvfp4" and "lr_if4", relative RMS errors of
        each head's copy, likewise.
    """
    return [
        {
            "layer": name,
            "stable_rank": stable_rank(state).mean(0).tolist(),
            **{copy: read_error(copy, state).mean(0).tolist() for copy in ("nvfp4", "lr_if4")},
        }
        for name, state in states.items()
    ]


def stable_rank(states: Tensor) -> Tensor:
    """(..., headdim, d_state) -> (...)."""
    squares = torch.linalg.svdvals(states.double()).square()
    return squares.sum(-1) / squares[..., 0]


def read_error(read_format: str, states: Tensor) -> Tensor:
    """(..., headdim, d_state) -> (...): what a copy misses, over what there is."""
    chosen = formats.find(read_format)
    planes = chosen.alloc(states)
    chosen.quantize(states, planes)
    missed = chosen.dequantize(planes)[..., : states.shape[-1]] - states
    return missed.square().mean((-1, -2)).sqrt() / states.square().mean((-1, -2)).sqrt()
