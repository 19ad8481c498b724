"""scan through flash-linear-attention's chunk kernels (the extra ``fla``): a GPU, bf16 or fp16, forward and backward.

``ops/scan.py`` decides whether a call may come here. The kernels of the delta rule take keys stored once a group, and
all of them a state with its value features first, our (batch, nheads, headdim, d_state), so that nothing is repeated
or transposed on the way. Products take operands of the activations' dtype and sum in fp32; the state is fp32.
"""

from fla.ops.common.chunk_o import chunk_fwd_o
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda
from fla.ops.simple_gla import chunk_simple_gla
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2
from fla.utils import custom_device_ctx
from torch import Tensor

from replayssm.ops.chunked import CHUNK
from replayssm.ops.records import Records, Recurrence
from replayssm.ops.triton_states import chunk_states


def scan(
    q: Tensor, records: Records, state: Tensor | None, recurrence: Recurrence, *, grad: bool
) -> tuple[Tensor, Tensor]:
    """Run a whole sequence through the recurrence; see ``chunked.scan``.

    Args:
        q: (batch, t, ngroups, d_state), the read keys.
        records: t tokens, oldest first; k and v in the dtype of q.
        state: (batch, nheads, headdim, d_state) fp32 before the first token, left as it was; None is zeros.
        recurrence: any but a decay per channel without the delta rule.
        grad: a backward pass may follow.

    Returns:
        Outputs (batch, t, nheads, headdim) in the dtype of v, in which the kernels store them, and the final state
        (batch, nheads, headdim, d_state), fp32.
    """
    k, v, g, beta = records
    shared = dict(scale=1.0, initial_state=state, output_final_state=True, state_v_first=True)
    if recurrence.decay == "channel":
        return chunk_kda(q, k, v, g, beta, **shared)
    g = g.squeeze(-1)
    if recurrence.delta:
        return chunk_gated_delta_rule(q, k, v, g, beta, **shared)
    if grad:
        written = (v * beta.unsqueeze(-1)).to(v.dtype)
        return chunk_simple_gla(_per_head(q, v), _per_head(k, v), written, g, **shared)
    return _scan_without_correction(q, k, v, g, beta, state)


def _scan_without_correction(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``chunk_simple_gla`` without a backward pass, its first half by a kernel of ours.

    That half makes the states. Unlike the other one, which reads the outputs, it takes keys for every head only, and no
    beta: with 16 heads a group, writing k and v anew would be most of the bytes that a scan moves.
    """
    with custom_device_ctx(v.device.index):
        k = k.contiguous()
        total = chunk_local_cumsum(g.contiguous(), chunk_size=CHUNK, scale=RCP_LN2)
        initial = None if state is None else state.contiguous()
        written, states, final = chunk_states(k, v, beta.contiguous(), total, initial, CHUNK)
        y = chunk_fwd_o(
            q=q.contiguous(),
            k=k,
            v=written,
            h=states,
            g=total,
            scale=1.0,
            state_v_first=True,
            chunk_size=CHUNK,
        )
    return y, final


def _per_head(keys: Tensor, v: Tensor) -> Tensor:
    """(batch, t, ngroups, d_state) -> (batch, t, nheads, d_state): head h gets group h // (nheads // ngroups)."""
    repeats = v.shape[2] // keys.shape[2]
    return keys.unsqueeze(3).expand(-1, -1, -1, repeats, -1).flatten(2, 3)
