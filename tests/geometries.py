"""The layers under test: small odd sizes and every constructor option, each with the oracle that knows it.

A geometry is plain data; ``build`` makes the layer with every parameter re-drawn, ``trace`` runs the fp64 token loop
of ``oracles.py`` over the same parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import oracles
import torch
from backends import interpreted
from draws import DEVICE, draw
from hypothesis import strategies as st
from retention import ReplayRetention
from torch import Tensor, nn

import replayssm

LAYERS: dict[str, type[replayssm.ReplayLayer]] = {
    "mamba2": replayssm.ReplayMamba2,
    "gated_deltanet": replayssm.ReplayGatedDeltaNet,
    "kda": replayssm.ReplayKDA,
    "retention": ReplayRetention,
}
ORACLES: dict[str, Callable[..., tuple[oracles.Tokens, oracles.Trace]]] = {
    "mamba2": oracles.mamba2,
    "gated_deltanet": oracles.gated_deltanet,
    "kda": oracles.kda,
    "retention": oracles.retention,
}


@dataclass(frozen=True)
class Geometry:
    """One way to build a layer; ``options`` are the constructor's own keyword arguments.

    Where kernels are interpreted, a program a head, a layer with ``interpreted_heads`` has so many, in one key group.
    """

    kind: str
    d_model: int
    nheads: int
    headdim: int
    d_state: int
    options: dict[str, object] = field(default_factory=dict)
    interpreted_heads: int | None = None

    def __repr__(self) -> str:
        changed = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.kind}({self.d_model},{self.nheads},{self.headdim},{self.d_state},{changed})"

    @property
    def delta(self) -> bool:
        return LAYERS[self.kind].recurrence.delta

    def but(self, **options: object) -> "Geometry":
        heads = None if {"ngroups", "norm_groups"} & options.keys() else self.interpreted_heads
        return replace(self, options={**self.options, **options}, interpreted_heads=heads)

    def build(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        settings = {**self._options, "device": DEVICE, "dtype": dtype}
        nheads, headdim, d_state = self._sizes
        if self.kind == "kda":
            layer = replayssm.ReplayKDA(self.d_model, nheads, headdim, d_state=d_state, **settings)
        else:
            layer = LAYERS[self.kind](self.d_model, *self._sizes, **settings)
        oracles.redraw(layer, seed)
        return layer

    def tokens(self, layer: nn.Module, x: Tensor) -> oracles.Tokens:
        """What the recurrence sees of x, in the dtype of x."""
        return self._oracle(layer, x)[0]

    def trace(self, layer: nn.Module, x: Tensor, scanned: Tensor | bool | None = None) -> oracles.Trace:
        """The token loop over x, in the dtype of x; scanned (Mamba-2 only): the tokens whose dt is clamped."""
        if scanned is not None:
            return ORACLES[self.kind](layer, x, *self._sizes, **self._options, scanned=scanned)[1]
        return self._oracle(layer, x)[1]

    def input(self, batch: int, t: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
        return draw(seed, batch, t, self.d_model, dtype=dtype)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        few = self.interpreted_heads is not None and interpreted()
        return self.interpreted_heads if few else self.nheads, self.headdim, self.d_state

    @property
    def _options(self) -> dict[str, object]:
        few = self.interpreted_heads is not None and interpreted()
        return {**self.options, "ngroups": 1} if few and "ngroups" in self.options else self.options

    def _oracle(self, layer: nn.Module, x: Tensor) -> tuple[oracles.Tokens, oracles.Trace]:
        return ORACLES[self.kind](layer, x, *self._sizes, **self._options)


# The layers of the cases: few, odd sizes.
M = Geometry("mamba2", 24, 6, 5, 7, {"ngroups": 2}, interpreted_heads=2)
G = Geometry("gated_deltanet", 24, 6, 5, 7, {"ngroups": 2}, interpreted_heads=2)
K = Geometry("kda", 24, 3, 5, 7, {"lower_bound": -5.0}, interpreted_heads=1)
R = Geometry("retention", 24, 3, 5, 7, interpreted_heads=1)
CASES = [M, G, K]

# One geometry for every constructor option that changes the maths, and sizes that are no multiples of anything.
VARIANTS = [
    M,
    M.but(ngroups=3, d_conv=2, conv_bias=False, bias=True),
    M.but(norm="norm_first", norm_groups=6, norm_eps=1e-2),
    M.but(norm=None, bias=True, out_bias=False, d_conv=3),
    M.but(in_multiplier=1.5, segment_multipliers=(0.5, 2.0, 0.25, 3.0, 0.7), out_bias=True),
    M.but(ngroups=1, norm_groups=2, d_conv=5),
    Geometry("mamba2", 40, 3, 40, 24, {"ngroups": 1, "norm_eps": 1e-2}),
    Geometry("mamba2", 7, 1, 1, 1),
    Geometry("mamba2", 24, 12, 2, 3, {"ngroups": 4}),
    G,
    G.but(ngroups=None, d_conv=2, conv_bias=True, norm_eps=1e-2),
    G.but(ngroups=3, neg_eigval=True, gate_activation="sigmoid"),
    Geometry("gated_deltanet", 40, 3, 40, 24, {"ngroups": 1, "d_conv": 5}),
    Geometry("gated_deltanet", 7, 1, 1, 1),
    K,
    K.but(lower_bound=None, gate_rank=2, output_gate_rank=4, d_conv=2),
    K.but(lower_bound=-1.5, output_gate_rank=3, output_gate_bias=True, conv_bias=True),
    K.but(lower_bound=None, neg_eigval=True, output_gate_bias=True, norm_eps=1e-2),
    Geometry("kda", 40, 3, 24, 24, {"gate_rank": 5, "d_conv": 5}),
    Geometry("kda", 7, 1, 1, 1, {"lower_bound": -5.0}),
    R,
    Geometry("retention", 7, 1, 1, 1),
]

geometries = st.sampled_from([*CASES, R, *VARIANTS])


def windows(step_tokens: int) -> st.SearchStrategy[int]:
    """Every legal window from 0 to 33."""
    return st.sampled_from([0, *range(step_tokens, 34)])


def decode_in_pieces(
    layer: nn.Module, x: Tensor, pieces: list[int], window: int, step_tokens: int | None = None
) -> tuple[Tensor, replayssm.ReplayStateCache]:
    """The outputs of x, fed piece by piece through a fresh cache and all committed; and the cache."""
    if step_tokens is None:
        step_tokens = min(max(pieces), max(window, 1))
    cache = replayssm.ReplayStateCache([layer], x.shape[0], window=window, step_tokens=step_tokens)
    outputs = []
    with torch.no_grad():
        for piece in x.split(pieces, 1):
            outputs.append(layer(piece, cache[0]))
            cache.commit()
    return torch.cat(outputs, 1), cache
