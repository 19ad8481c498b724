"""What the bench measures: a geometry a row, and what others published."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm import ReplayGatedDeltaNet, ReplayKDA, ReplayLayer, ReplayMamba2, ReplayStateCache
from replayssm.cache.auto_window import LayerBytes, choose
from replayssm.ops.records import Records, Recurrence

BATCHES = (1, 8, 32, 128, 256, 512)


@dataclass(frozen=True)
class Case:
    """One layer of a published model; nheads, headdim, d_state, ngroups as everywhere."""

    layer: str
    geometry: str
    nheads: int
    headdim: int
    d_state: int
    ngroups: int
    recurrence: Recurrence

    @property
    def state_bytes(self) -> int:
        """Of the fp32 state of one sequence."""
        return 4 * self.nheads * self.headdim * self.d_state

    def build(self, dtype: torch.dtype) -> ReplayLayer:
        """The layer, with activations in ``dtype``, on meta."""
        d_model = self.nheads * self.headdim  # any: the projections are not counted
        sizes = self.nheads, self.headdim
        if self.layer == "mamba2":
            return ReplayMamba2(d_model, *sizes, self.d_state, ngroups=self.ngroups, device="meta", dtype=dtype)
        if self.layer == "gdn":
            return ReplayGatedDeltaNet(d_model, *sizes, self.d_state, ngroups=self.ngroups, device="meta", dtype=dtype)
        return ReplayKDA(d_model, *sizes, d_state=self.d_state, device="meta", dtype=dtype)

    def layer_bytes(self, dtype: torch.dtype, checkpoint: str = "fp32", read_format: str | None = None) -> LayerBytes:
        """What ``plan`` counts with: the sizes that a cache of the layer has, its states in these formats."""
        layer = self.build(dtype)
        cache = ReplayStateCache(
            layer, 1, window=0, checkpoint=checkpoint, read_format=read_format, backend="torch", device="meta"
        )
        return LayerBytes.of(cache[0])

    def window(self, dtype: torch.dtype, checkpoint: str = "fp32", read_format: str | None = None) -> int:
        """Tokens: what ``window="auto"`` takes where there are many rows."""
        return choose("triton", 2**20, 1, [self.layer_bytes(dtype, checkpoint, read_format)])

    def draw(
        self, batch: int, t: int, *, dtype: torch.dtype, device: torch.device | str, seed: int
    ) -> tuple[Tensor, Records]:
        """Random read keys (batch, t, ngroups, d_state) and records of t tokens, in the range of trained layers.

        Args:
            dtype: of q, k and v; g and beta are fp32.
        """
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(batch, t, *shape, generator=generator, device=device)

        q, k = normal(self.ngroups, self.d_state), normal(self.ngroups, self.d_state)
        v = normal(self.nheads, self.headdim)
        if self.recurrence.delta:
            q, k = F.normalize(q, dim=-1) * self.d_state**-0.5, F.normalize(k, dim=-1)
            beta = normal(self.nheads).sigmoid()
            g = -F.softplus(normal(self.nheads, self.recurrence.decay_width(self.d_state)) - 3)
        else:
            beta = F.softplus(normal(self.nheads) - 4)
            rate = torch.linspace(1, 16, self.nheads, device=device)
            g = -(beta * rate).unsqueeze(-1)
        return q.to(dtype), Records(k.to(dtype), v.to(dtype), g, beta)


CASES = (
    Case("mamba2", "nemotron-3-super", 128, 64, 128, 8, Recurrence(decay="head", delta=False)),
    Case("gdn", "qwen3.5-4b", 32, 128, 128, 16, Recurrence(decay="head", delta=True)),
    Case("kda", "kimi-linear", 32, 128, 128, 32, Recurrence(decay="channel", delta=True)),
)


class Published(NamedTuple):
    """The best public kernels for one case and batch, each at the best of its launch configurations."""

    conventional_us: float
    speedup: float | None  # of the best public replay kernel over it; None where no fp32 one was found


# layer -> batch; fp32 state, window 16. Measured on one H200 with torch 2.11, triton 3.6; batch 1 with the state from
# memory. Mamba-2: an engine's Triton step, and FlashInfer's ReplaySSM kernel. GDN: FlashInfer's step, and the ReplaySSM
# authors' kernel. KDA: the step of flash-linear-attention.
PUBLISHED = {
    "mamba2": {
        1: Published(5.1, 0.98),
        32: Published(72.6, 1.62),
        128: Published(280.9, 1.76),
        256: Published(557.7, 1.80),
        512: Published(1109.0, 1.82),
    },
    "gdn": {
        1: Published(4.2, None),
        32: Published(35.9, 1.23),
        128: Published(133.1, 1.54),
        256: Published(262.2, 1.60),
        512: Published(519.4, 1.62),
    },
    "kda": {32: Published(43.7, None), 256: Published(301.8, None)},
}


class PublishedVerify(NamedTuple):
    """Cost of a step of several tokens, all kept, in conventional steps of one token: the best of ``PUBLISHED``."""

    replay: float
    native: float  # with a state written behind each token


# layer -> tokens a step; batch 256, as above. Mamba-2: FlashInfer's ReplaySSM kernel. GDN: that of its authors.
PUBLISHED_VERIFY = {
    "mamba2": {4: PublishedVerify(0.65, 2.70), 8: PublishedVerify(0.84, 4.99)},
    "gdn": {4: PublishedVerify(0.92, 2.78), 8: PublishedVerify(1.37, 5.05)},
    "kda": {},
}
PUBLISHED_VERIFY_BATCH = 256
