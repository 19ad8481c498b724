"""The replay layer inside a mixer of transformers: projections by the mixer's own modules, all else ``ReplayLayer``.

Projections, convolution, gates and norms are called as modules, never read as weights: adapters, quantised leaves and
the hooks that load offloaded weights then act in every call.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replayssm.cache.layer_state import Geometry, LayerState
from replayssm.cache.packing import masked
from replayssm.layers.base import ReplayLayer
from replayssm.layers.conv import with_history
from replayssm.layers.gated_deltanet import ReplayGatedDeltaNet
from replayssm.layers.gates import softplus_gate
from replayssm.layers.kda import ReplayKDA
from replayssm.layers.mamba2 import ReplayMamba2
from replayssm.layers.norm import l2_normalized, widened
from replayssm.ops.records import Records
from replayssm.ops.scan import scan


class Core(ReplayLayer):
    """A mixer as a replay layer, for inputs of one dtype; it keeps nothing of a call.

    Args:
        mixer: a mixer of transformers, whose attributes are named as in its modeling file.
        x: (batch, t, d_model), an input, whose dtype the state's ring takes.
    """

    equals: ClassVar[type[ReplayLayer]]

    def __init__(self, mixer: Any, x: Tensor, *, nheads: int, headdim: int, d_state: int, ngroups: int):
        super().__init__(
            nheads=nheads,
            headdim=headdim,
            d_state=d_state,
            ngroups=ngroups,
            conv_channels=mixer.conv_dim,
            d_conv=mixer.conv_kernel_size,
        )
        self.mixer = mixer
        self._input = x.new_empty(0)

    def serves(self, mixer: nn.Module, x: Tensor) -> bool:
        """Whether it is that of the mixer, for inputs like x."""
        return self.mixer is mixer and self._input.dtype == x.dtype and self._input.device == x.device

    @property
    def geometry(self) -> Geometry:
        """What a state of the mixer depends on."""
        return self._geometry

    def begin(self, x: Tensor, state: LayerState, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run whole sequences with autograd, and leave their records in ``state``, which must be empty, as of a scan.

        Returns:
            (batch, t, d_model), and (batch, nheads, headdim, d_state), the final state without its graph, which the
            caller stores after the commit.
        """
        step = state.open_step(x.shape[1], None, attention_mask)
        step.scan = True  # of any length: no records are left of it
        q, records, extra = self.project(step.pack(x), state, step.valid)
        records = Records(*(masked(field, step.valid) for field in self.limit(records)))
        y, final = scan(state.where, q, records, None, self.recurrence, self.scan_backend)
        return state.finish_step(self.emit(y, extra)), final.detach()

    def convolve(self, x: Tensor, conv_state: LayerState | None) -> Tensor:
        """(batch, t, conv_channels), inputs -> the same after the causal convolution and SiLU."""
        window = with_history(x, conv_state, self.d_conv).transpose(1, 2)
        y = self.mixer.conv1d(window.to(self.mixer.conv1d.weight.dtype))  # pads d_conv - 1 zeros on either side
        first = self.d_conv - 1
        return F.silu(y[..., first : first + x.shape[1]]).transpose(1, 2).to(x.dtype)

    def _largest_parameter(self) -> Tensor:
        """Like the input: weights may be quantised, kept wider than activations, or offloaded between calls."""
        return self._input


class Mamba2Core(Core):
    """Nemotron-H, Mamba-2, Bamba, Granite-4, Zamba2."""

    recurrence = ReplayMamba2.recurrence
    equals = ReplayMamba2

    def __init__(self, mixer: Any, x: Tensor):
        super().__init__(
            mixer,
            x,
            nheads=mixer.num_heads,
            headdim=mixer.head_dim,
            d_state=mixer.ssm_state_size,
            ngroups=mixer.n_groups,
        )

    def project(
        self, x: Tensor, conv_state: LayerState | None, mask: Tensor | None
    ) -> tuple[Tensor, Records, tuple[Tensor, Tensor]]:
        m, keys = self.mixer, self.ngroups * self.d_state
        z, inputs, dt = self.inputs(x).split([m.intermediate_size, m.conv_dim, self.nheads], dim=-1)
        values, B, C = self.convolve(inputs, conv_state).split([m.intermediate_size, keys, keys], dim=-1)
        v = values.unflatten(-1, (self.nheads, self.headdim))
        k, q = (part.unflatten(-1, (self.ngroups, self.d_state)) for part in (B, C))
        dt = F.softplus(widened(dt) + m.dt_bias)
        return q, Records(k, v, self._log_decay(dt), dt), (z, v)

    def limit(self, records: Records) -> Records:
        """Clamp dt to the family's limits."""
        dt = records.beta.clamp(*self.mixer.time_step_limit)
        return records._replace(g=self._log_decay(dt), beta=dt)

    def emit(self, y: Tensor, extra: tuple[Tensor, Tensor]) -> Tensor:
        z, v = extra
        y = (y + widened(self.mixer.D).unsqueeze(-1) * v).flatten(-2)
        return self.mixer.out_proj(self.normalized(y, z).to(z.dtype))

    def inputs(self, x: Tensor) -> Tensor:
        """What in_proj makes of x: z, the convolution's inputs, dt."""
        return self.mixer.in_proj(x)

    def normalized(self, y: Tensor, z: Tensor) -> Tensor:
        """The gated norm."""
        return self.mixer.norm(y, z)

    def _log_decay(self, dt: Tensor) -> Tensor:
        return (dt * -widened(self.mixer.A_log).exp()).unsqueeze(-1)


class FalconH1Core(Mamba2Core):
    """Falcon-H1: scaled inputs, and a norm that may be missing."""

    def inputs(self, x: Tensor) -> Tensor:
        return self.mixer.in_proj(x * self.mixer.ssm_in_multiplier) * self.mixer.mup_vector

    def normalized(self, y: Tensor, z: Tensor) -> Tensor:
        return self.mixer.norm(y, z) if self.mixer.mamba_rms_norm else y * F.silu(widened(z))


class GatedDeltaNetCore(Core):
    """Qwen3.5, dense and MoE, and Lara-Mini."""

    recurrence = ReplayGatedDeltaNet.recurrence
    equals = ReplayGatedDeltaNet

    def __init__(self, mixer: Any, x: Tensor):
        super().__init__(
            mixer,
            x,
            nheads=mixer.num_v_heads,
            headdim=mixer.head_v_dim,
            d_state=mixer.head_k_dim,
            ngroups=mixer.num_k_heads,
        )

    def project(self, x: Tensor, conv_state: LayerState | None, mask: Tensor | None) -> tuple[Tensor, Records, Tensor]:
        m = self.mixer
        qkv, z, b, a = self.inputs(x)
        keys, v = self.convolve(qkv, conv_state).split([2 * m.key_dim, m.value_dim], dim=-1)
        q, k = l2_normalized(keys.unflatten(-1, (2, self.ngroups, self.d_state))).unbind(-3)
        v, z = (part.unflatten(-1, (self.nheads, self.headdim)) for part in (v, z))
        g = softplus_gate(widened(a) + m.dt_bias, m.A_log).unsqueeze(-1)
        return q * self.d_state**-0.5, Records(k, v, g, self.beta(b)), z

    def emit(self, y: Tensor, extra: Tensor) -> Tensor:
        return self.mixer.out_proj(normalized_heads(self.mixer.norm, y, extra))

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v in one, the output gate, and what beta and the decay are made of."""
        m = self.mixer
        return m.in_proj_qkv(x), m.in_proj_z(x), m.in_proj_b(x), m.in_proj_a(x)

    def beta(self, b: Tensor) -> Tensor:
        """(batch, t, nheads), write strengths."""
        return widened(b).sigmoid()


class Qwen3NextCore(GatedDeltaNetCore):
    """Qwen3-Next: the rows of its two input projections are interleaved by key head."""

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        m = self.mixer
        q, k, v, z, b, a = m.fix_query_key_value_ordering(m.in_proj_qkvz(x), m.in_proj_ba(x))
        return torch.cat([part.flatten(2) for part in (q, k, v)], dim=-1), z.flatten(2), b, a


class OlmoHybridCore(GatedDeltaNetCore):
    """OLMo-Hybrid: projections of their own for q, k and v, and beta up to 2."""

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        m = self.mixer
        return torch.cat([m.q_proj(x), m.k_proj(x), m.v_proj(x)], dim=-1), m.g_proj(x), m.b_proj(x), m.a_proj(x)

    def beta(self, b: Tensor) -> Tensor:
        return super().beta(b) * 2 if self.mixer.allow_neg_eigval else super().beta(b)

    def emit(self, y: Tensor, extra: Tensor) -> Tensor:
        return self.mixer.o_proj(normalized_heads(self.mixer.o_norm, y, extra))


class KDACore(Core):
    """Kimi-Linear and GLM-5.3-Flash. The decay gate is a module of theirs, bounded or not."""

    recurrence = ReplayKDA.recurrence
    equals = ReplayKDA

    def __init__(self, mixer: Any, x: Tensor):
        heads, dim = mixer.num_heads, mixer.head_dim
        super().__init__(mixer, x, nheads=heads, headdim=dim, d_state=dim, ngroups=heads)

    def project(self, x: Tensor, conv_state: LayerState | None, mask: Tensor | None) -> tuple[Tensor, Records, Tensor]:
        m = self.mixer
        qkv = self.convolve(torch.cat([m.q_proj(x), m.k_proj(x), m.v_proj(x)], dim=-1), conv_state)
        keys, v = qkv.unflatten(-1, (3, self.nheads, self.headdim)).split([2, 1], dim=-3)
        q, k = l2_normalized(keys).unbind(-3)
        records = Records(k, v.squeeze(-3), widened(m.forget_gate(x)), widened(m.b_proj(x)).sigmoid())
        return q * self.d_state**-0.5, records, self.gate(x).unflatten(-1, (self.nheads, self.headdim))

    def emit(self, y: Tensor, extra: Tensor) -> Tensor:
        return self.mixer.o_proj(normalized_heads(self.mixer.o_norm, y, extra))

    def gate(self, x: Tensor) -> Tensor:
        """(batch, t, nheads * headdim), the output gate."""
        return self.mixer.g_b_proj(self.mixer.g_a_proj(x))


class BailingHybridCore(KDACore):
    """Ling-3.0: a full-rank output gate."""

    def gate(self, x: Tensor) -> Tensor:
        return self.mixer.g_proj(x)


def normalized_heads(norm: Any, y: Tensor, gate: Tensor) -> Tensor:
    """(batch, t, nheads, headdim) twice -> (batch, t, nheads * headdim): the gated norm of a head, on rows of heads.

    In the gate's dtype, and as two axes: fused kernels that may stand in for the norm take nothing else.
    """
    rows = norm(y.to(gate.dtype).reshape(-1, y.shape[-1]), gate.reshape(-1, y.shape[-1]))
    return rows.reshape(*y.shape[:2], -1).to(gate.dtype)
