"""scan, replay and flush as matrix products in plain PyTorch: any device, any length, autograd through ``scan``.

All three are the same few lines over one chunk of tokens (a window of records is a chunk): solve for the write vectors
``u``, read the outputs, fold the writes into the state. A draft tree is the end of a chunk, in which only its ancestors
come before a node. A decay is always the exponential of a sum of log decays between two tokens, formed from those
tokens alone: never positive, so nothing overflows, and never the difference of two long sums, so nothing cancels.
Products and sums run in fp32, or in fp64 when an input or the state is fp64; also under autocast.

Inside a chunk every tensor is (batch, group, value head of the group, time, features), so that keys are stored once a
group and broadcast. Formulas: docs/math.md, sections 2 and 3.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.ops.records import Records, Recurrence
from replayssm.trees import Tree

CHUNK = 64  # tokens; a fixed length keeps one compiled graph for every short sequence


def scan(q: Tensor, records: Records, state: Tensor | None, recurrence: Recurrence) -> tuple[Tensor, Tensor]:
    """Run a whole sequence through the recurrence.

    Args:
        q: (batch, t, ngroups, d_state), the read keys, t >= 1.
        records: t tokens, oldest first.
        state: (batch, nheads, headdim, d_state) before the first token, left as it was; None is zeros.
        recurrence: which of the recurrences.

    Returns:
        Outputs (batch, t, nheads, headdim) and the final state (batch, nheads, headdim, d_state), fp32 or fp64.
    """
    dtype = compute_dtype(records.v, records.g, state)
    if state is None:
        batch, _, nheads, headdim = records.v.shape
        state = records.v.new_zeros((batch, nheads, headdim, records.k.shape[-1]), dtype=dtype)
    state = _by_group(state.to(dtype), records.k.shape[2])
    outputs = []
    with _full_precision(q):
        for chunk_q, chunk in _chunks(q, records):
            chunk_q, k, v, g, beta = _chunk_layout(chunk_q, chunk, dtype)
            u, y = _writes_and_outputs(chunk_q, k, v, g, beta, state, recurrence)
            outputs.append(y)
            state = _fold(k, u, g, state)
    y = torch.cat(outputs, dim=3)[:, :, :, : q.shape[1]]
    return _by_time(y), state.flatten(1, 2)


def replay(q: Tensor, records: Records, checkpoint: Tensor, recurrence: Recurrence) -> Tensor:
    """Outputs of the newest tokens, from the checkpoint and every record since; neither is changed.

    The delta rule's write vectors are solved from the raw records and the checkpoint, so nothing derived is kept
    between steps.

    Args:
        q: (batch, t, ngroups, d_state), the read keys of the t newest tokens.
        records: the live records, oldest first; the last t belong to the new tokens. A record with k, v, g, beta of 0
            is as if it were not there.
        checkpoint: (batch, nheads, headdim, d_state), the state before the first record.
        recurrence: which of the recurrences.

    Returns:
        (batch, t, nheads, headdim), fp32 or fp64.

    Cost: the state is read, nothing is written.
    """
    dtype = compute_dtype(records.v, records.g, checkpoint)
    state = _by_group(checkpoint.to(dtype), records.k.shape[2])
    with _full_precision(q):
        q, k, v, g, beta = _chunk_layout(q, records, dtype)
        return _by_time(_writes_and_outputs(q, k, v, g, beta, state, recurrence)[1])


def replay_tree(
    q: Tensor, records: Records, tree: Tree, checkpoint: Tensor, recurrence: Recurrence
) -> tuple[Tensor, Tensor]:
    """Outputs and write vectors of the nodes of a draft tree: of each, as if its ancestors alone came before it.

    Args:
        q: (batch, t, ngroups, d_state), the read keys of the t nodes.
        records: the live records, oldest first; the last t belong to the nodes. A record with k, v, g, beta of 0 is as
            if it were not there.
        tree: of these rows.
        checkpoint: (batch, nheads, headdim, d_state), the state before the first record.
        recurrence: which of the recurrences.

    Returns:
        Outputs and u of the nodes, both (batch, t, nheads, headdim), fp32 or fp64.

    Cost: the state is read, nothing is written.
    """
    dtype = compute_dtype(records.v, records.g, checkpoint)
    state = _by_group(checkpoint.to(dtype), records.k.shape[2])
    with _full_precision(q):
        q, k, v, g, beta = _chunk_layout(q, records, dtype)
        u, y = _writes_and_outputs(q, k, v, g, beta, state, recurrence, tree)
    return _by_time(y), _by_time(u[..., -tree.t :, :])


def flush(records: Records, checkpoint: Tensor, recurrence: Recurrence) -> Tensor:
    """The state after ``records``, oldest first, from the state before them; neither is changed.

    Args:
        records: the committed tokens since the checkpoint. A record with k, v, g, beta of 0 is as if it were not there.
        checkpoint: (batch, nheads, headdim, d_state), the state before the first record.
        recurrence: which of the recurrences.

    Returns:
        (batch, nheads, headdim, d_state), fp32 or fp64.

    Cost: the state is read once; the caller writes the result.
    """
    dtype = compute_dtype(records.v, records.g, checkpoint)
    state = _by_group(checkpoint.to(dtype), records.k.shape[2])
    with _full_precision(checkpoint):
        k, v, g, beta = _chunk_layout(None, records, dtype)
        u = beta * v
        if recurrence.delta:
            (over_k,) = _decayed_grams((k,), k, g, recurrence)
            u = _corrected_writes(over_k, k, v, g.cumsum(-2), beta, state)
        return _fold(k, u, g, state).flatten(1, 2)


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 if any of the tensors is, else fp32."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


def _writes_and_outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    recurrence: Recurrence,
    tree: Tree | None = None,
) -> tuple[Tensor, Tensor]:
    """The write vectors u of a chunk and the outputs of its last q.shape[-2] tokens, given the state before it."""
    xs = (k, q) if recurrence.delta else (q,)
    if tree is None:
        elapsed, grams = g.cumsum(-2), _decayed_grams(xs, k, g, recurrence)
    else:
        elapsed, grams = _decayed_tree_grams(xs, k, g, recurrence, tree)
    u = _corrected_writes(grams[0], k, v, elapsed, beta, state) if recurrence.delta else beta * v
    elapsed = elapsed[..., -q.shape[-2] :, :]
    return u, (q * elapsed.exp()) @ state.mT + grams[-1] @ u  # what the state holds for q, and what the chunk wrote


def _corrected_writes(over_k: Tensor, k: Tensor, v: Tensor, elapsed: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """u_s = beta_s (v_s - e^(g_s) S_(s-1) k_s) for every token of a chunk at once, (batch, group, head, time, headdim).

    (I + A) U = R, with A[s, i] = beta_s <k_s e^(G_s - G_i), k_i> below the diagonal and
    R[s] = beta_s (v_s - S (e^(G_s) k_s)), where G_s is ``elapsed``: the log decays from the first token up to s.
    """
    from_state = (k * elapsed.exp()) @ state.mT
    # only what stands below the diagonal of the first argument is read: the solve takes the diagonal as ones
    return torch.linalg.solve_triangular(beta * over_k, beta * (v - from_state), upper=False, unitriangular=True)


def _fold(k: Tensor, u: Tensor, g: Tensor, state: Tensor) -> Tensor:
    """The state after a chunk: every write decayed by what follows it."""
    return state * g.sum(-2, keepdim=True).exp() + u.mT @ (k * _sum_after(g).exp())


def _decayed_grams(xs: tuple[Tensor, ...], k: Tensor, g: Tensor, recurrence: Recurrence) -> list[Tensor]:
    """For each x: <x_s e^(G_s - G_i), k_i> for i <= s, zero for i > s.

    Args:
        xs: each stands for the last x.shape[-2] tokens of the chunk.

    Returns:
        One (batch, group, head, x.shape[-2], time) for each x.
    """
    if recurrence.decay == "head":
        decay = _pairwise_decay(g)
        return [(x @ k.mT) * decay[..., -x.shape[-2] :, :] for x in xs]
    return _channel_grams(xs, k, g)


def _decayed_tree_grams(
    xs: tuple[Tensor, ...], k: Tensor, g: Tensor, recurrence: Recurrence, tree: Tree
) -> tuple[Tensor, list[Tensor]]:
    """The log decays from the first token up to each, and for each x: ``_decayed_grams``, zero unless i comes before s.

    Between a committed token and a node the decay factors at the end of the committed ones; both exponents are <= 0.
    """
    nodes = tree.t
    old_k, new_k = k.split([k.shape[-2] - nodes, nodes], -2)
    old_g, new_g = g.split([g.shape[-2] - nodes, nodes], -2)
    from_root, between = _path_sums(new_g, tree)
    before, remaining, after = tree.before[:, None, None], between.exp(), _sum_after(old_g)
    grams = []
    for x in xs:
        new_x = x[..., -nodes:, :]
        if recurrence.decay == "head":
            among = (new_x @ new_k.mT) * remaining.squeeze(-1)
            to_old = (new_x @ old_k.mT) * (from_root + after.mT).exp()
        else:
            among = (new_x.unsqueeze(-2) * new_k.unsqueeze(-3) * remaining).sum(-1)
            to_old = (new_x * from_root.exp()) @ (old_k * after.exp()).mT
        gram = torch.cat([to_old, torch.where(before, among, 0)], -1)
        if x.shape[-2] > nodes:
            (old,) = _decayed_grams((x[..., :-nodes, :],), old_k, old_g, recurrence)
            gram = torch.cat([F.pad(old, (0, nodes)), gram], -2)
        grams.append(gram)
    return torch.cat([old_g.cumsum(-2), old_g.sum(-2, keepdim=True) + from_root], -2), grams


def _path_sums(g: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """Sums of log decays along the paths of a tree, each formed from the nodes on its path alone.

    Args:
        g: (batch, group, head, t, width) of the nodes.

    Returns:
        From the root to each node, both included, (batch, group, head, t, width); and from each node [s] back to each
        of its ancestors [i], s included and i not, (batch, group, head, t, t, width). Where i is no ancestor stands
        some other such sum.
    """
    t, width = g.shape[-2:]

    def pick(x: Tensor, index: Tensor) -> Tensor:
        """x[..., s, index[s, j], :] at [s, j]."""
        index = index.clamp(min=0)[:, None, None, :, :, None]
        return x.gather(-2, index.expand(*g.shape[:3], t, t, width))

    along = pick(g.unsqueeze(-3).expand(*g.shape[:3], t, t, width), tree.ancestors)
    back = torch.where((tree.ancestors >= 0)[:, None, None, :, :, None], along, 0).cumsum(-2)
    distance = tree.depth.unsqueeze(2) - tree.depth.unsqueeze(1)
    return back[..., -1, :], pick(F.pad(back, (0, 0, 1, 0))[..., :t, :], distance)


def _pairwise_decay(g: Tensor) -> Tensor:
    """e^(g_(i+1) + ... + g_s) for i <= s, zero for i > s: (..., time, 1) -> (..., time, time)."""
    time = g.shape[-2]
    after = torch.ones(time, time, dtype=torch.bool, device=g.device).tril(-1)
    total = torch.where(after, g, 0).cumsum(-2)
    # masked before the exponential: the gradient of exp(-inf) is zero, that of a masked overflow is NaN
    return torch.where(after.logical_or(torch.eye(time, dtype=torch.bool, device=g.device)), total, -torch.inf).exp()


def _channel_grams(xs: tuple[Tensor, ...], k: Tensor, g: Tensor) -> list[Tensor]:
    """``_decayed_grams`` for a decay per channel, which cannot be taken out of the inner product.

    Blocks of 1, 2, 4, ... tokens are joined in pairs. Between the halves of a pair the decay factors at the border,
    e^(G_s - G_i) = e^(G_s - G_border) e^(G_border - G_i), and both exponents are <= 0: a product of matrices a level.
    """
    time = k.shape[-2]
    size = 1 << (int(time) - 1).bit_length()  # torch.jit.trace takes sizes as tensors, which have no bit_length
    x = torch.stack([F.pad(x, (0, 0, time - x.shape[-2], size - time)) for x in xs])
    k, g = F.pad(k, (0, 0, 0, size - time)), F.pad(g, (0, 0, 0, size - time))
    gram = (x * k).sum(-1)[..., None, None].expand(*x.shape[:3], g.shape[2], size, 1, 1)  # (..., blocks, block, block)
    block = 1
    while block < size:
        (_, x_late), (k_early, _), (g_early, g_late) = (
            field.unflatten(-2, (-1, 2, block)).unbind(-3) for field in (x, k, g)
        )
        keys = (k_early * _sum_after(g_early).exp()).mT
        # not one broadcast product: for a batch of one head it would sum in another order
        corner = torch.stack([late @ keys for late in x_late * g_late.cumsum(-2).exp()])
        early, late = gram.unflatten(-3, (-1, 2)).unbind(-3)
        gram = torch.cat([torch.cat([early, torch.zeros_like(corner)], -1), torch.cat([corner, late], -1)], -2)
        block *= 2
    return [whole.squeeze(-3)[..., time - x.shape[-2] : time, :time] for whole, x in zip(gram, xs, strict=True)]


def _sum_after(g: Tensor) -> Tensor:
    """g_(i+1) + ... + g_last for each token i, along the time axis -2."""
    return F.pad(g[..., 1:, :].flip(-2).cumsum(-2).flip(-2), (0, 0, 0, 1))


def _chunks(q: Tensor, records: Records) -> Iterator[tuple[Tensor, Records]]:
    """Pieces of CHUNK tokens; the last one is filled up with records of zeros, which change nothing."""
    for q_piece, *fields in zip(*(x.split(CHUNK, dim=1) for x in (q, *records)), strict=True):
        missing = CHUNK - q_piece.shape[1]
        filled = [F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing)) for x in (q_piece, *fields)]
        yield filled[0], Records(*filled[1:])


def _chunk_layout(q: Tensor | None, records: Records, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q where given, then k, v, g, beta, as (batch, group, head, time, features) in the compute dtype.

    Contiguous, because a matrix product may sum in another order for other strides, and the strides of a batch of one
    differ from those of a larger one.
    """
    keys = (records.k,) if q is None else (q, records.k)
    values = (records.v, records.g, records.beta.unsqueeze(-1))
    shared = (x.to(dtype).transpose(1, 2).unsqueeze(2).contiguous() for x in keys)
    owned = (_by_group(x.to(dtype).transpose(1, 2).contiguous(), records.k.shape[2]) for x in values)
    return *shared, *owned


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(batch, nheads, ...) -> (batch, group, head, ...): head h belongs to group h // (nheads // ngroups)."""
    return x.unflatten(1, (groups, -1))


def _by_time(y: Tensor) -> Tensor:
    """(batch, group, head, time, headdim) -> (batch, time, nheads, headdim)."""
    return y.flatten(1, 2).transpose(1, 2)


def _full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Autocast switched off: it would run these products in bf16."""
    if x.is_meta:  # has no autocast
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)
