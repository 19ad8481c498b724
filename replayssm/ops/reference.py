"""The math, one token at a time: read this first. No options beyond the math, no opinion on dtypes.

    S <- S e^g;  u = beta (v - S k)  [delta]  or  beta v;  S <- S + u k^T;  y = S q

Sources: Mamba-2, arXiv 2405.21060 (q=C, k=B, v=x, g=dt*A, beta=dt); Gated DeltaNet, arXiv 2412.06464, eq. 10;
Kimi Delta Attention, arXiv 2510.26692, eq. 1 (g per key channel).
"""

import torch
from torch import Tensor

from replayssm.ops.records import Records


def scan_ref(q: Tensor, records: Records, state: Tensor, *, delta: bool) -> tuple[Tensor, Tensor]:
    """Run ``records`` through the recurrence and read each token's output from the state after its own update.

    Args:
        q: (batch, t, ngroups, d_state), the read keys.
        records: t tokens, oldest first.
        state: (batch, nheads, headdim, d_state), the state before the first token; it is left as it was.
        delta: write ``v`` minus what the state already returns for ``k`` (GDN, KDA).

    Returns:
        Outputs (batch, t, nheads, headdim) and the final state, both in the state's dtype.
    """
    heads_per_group = records.v.shape[2] // records.k.shape[2]
    outputs = []
    for query, k, v, g, beta in zip(q.unbind(1), *(field.unbind(1) for field in records), strict=True):
        k = k.repeat_interleave(heads_per_group, dim=1)  # head h reads group h // heads_per_group
        query = query.repeat_interleave(heads_per_group, dim=1)
        state = state * g.exp().unsqueeze(-2)
        if delta:
            v = v - torch.einsum("bhpn,bhn->bhp", state, k)
        state = state + torch.einsum("bhp,bhn->bhpn", beta.unsqueeze(-1) * v, k)
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, query))
    return torch.stack(outputs, dim=1), state


def flush_ref(records: Records, checkpoint: Tensor, *, delta: bool) -> Tensor:
    """Apply ``records`` to ``checkpoint`` in order: the state that a flush stores.

    Args:
        records: the committed tokens of one window, oldest first.
        checkpoint: (batch, nheads, headdim, d_state), the state before the window; it is left as it was.
        delta: as in ``scan_ref``.

    Returns:
        (batch, nheads, headdim, d_state), the state after the window.
    """
    return scan_ref(records.k, records, checkpoint, delta=delta)[1]


def replay_ref(q: Tensor, records: Records, checkpoint: Tensor, *, delta: bool) -> Tensor:
    """Outputs of the newest tokens, from the checkpoint and every record since.

    Args:
        q: (batch, t, ngroups, d_state), the read keys of the t newest tokens.
        records: the live records, oldest first; the last t belong to the new tokens.
        checkpoint: (batch, nheads, headdim, d_state), the state before the first record.
        delta: as in ``scan_ref``.

    Returns:
        (batch, t, nheads, headdim), outputs of the new tokens.
    """
    committed = records.k.shape[1] - q.shape[1]
    state = checkpoint
    if committed:
        state = flush_ref(Records(*(field[:, :committed] for field in records)), checkpoint, delta=delta)
    return scan_ref(q, Records(*(field[:, committed:] for field in records)), state, delta=delta)[0]


def replay_tree_ref(
    q: Tensor, records: Records, parents: list[list[int]], checkpoint: Tensor, *, delta: bool
) -> Tensor:
    """Outputs of the nodes of a draft tree, each from the state behind its own parent.

    Args:
        q: (batch, t, ngroups, d_state), the read keys of the t nodes.
        records: the live records, oldest first; the last t belong to the nodes.
        parents: for each row the column of each node's parent, -1 for the last committed token.
        checkpoint: (batch, nheads, headdim, d_state), the state before the first record.
        delta: as in ``scan_ref``.

    Returns:
        (batch, t, nheads, headdim).
    """
    committed = records.k.shape[1] - q.shape[1]
    state = checkpoint
    if committed:
        state = flush_ref(Records(*(field[:, :committed] for field in records)), checkpoint, delta=delta)
    outputs, behind = [], [state]  # behind[1 + j]: the state after node j
    for j in range(q.shape[1]):
        state = torch.stack([behind[1 + line[j]][row] for row, line in enumerate(parents)])
        node = Records(*(field[:, committed + j : committed + j + 1] for field in records))
        y, state = scan_ref(q[:, j : j + 1], node, state, delta=delta)
        outputs.append(y)
        behind.append(state)
    return torch.cat(outputs, dim=1)
