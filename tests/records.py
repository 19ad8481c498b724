"""Random records for the tests of the ops and of the recurrence: keys, gates and strengths of every difficult kind."""

import torch
from draws import DEVICE, draw
from oracles import Tokens, repeat_heads
from torch import Tensor

from replayssm.ops.records import Records

GATES = ("random", "none", "tiny", "one", "twenty", "hundred", "mixed", "alternating", "burst")
KEYS = ("random", "equal", "axis", "zero")


def make_gate(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Log decays (batch, t, nheads, 1 | d_state) of one kind, fp64."""
    constants = {"none": 0.0, "tiny": -1e-8, "one": -1.0, "twenty": -20.0, "hundred": -100.0}
    if kind in constants:
        return torch.full(shape, constants[kind], dtype=torch.float64, device=DEVICE)
    noise = draw(seed, *shape)
    if kind == "random":
        return -torch.nn.functional.softplus(2 * noise - 1)
    if kind == "mixed":  # 0 or -100, drawn for each channel of each token
        return -100.0 * (noise < 0).double()
    time = torch.arange(shape[1], device=DEVICE).reshape(1, -1, 1, 1)
    if kind == "alternating":
        return torch.where(time % 2 == 0, 0.0, -100.0).expand(shape).double()
    # burst: a long sum of strong decays, then weak ones whose differences must not drown in it
    return torch.where(time % 40 < 25, -30.0, -1e-3 * noise.abs())


def make_keys(kind: str, shape: tuple[int, ...], seed: int, delta: bool) -> Tensor:
    """Keys (batch, t, ngroups, d_state); of length 1 for the delta rule, which diverges on longer ones."""
    if kind == "zero":
        return torch.zeros(shape, dtype=torch.float64, device=DEVICE)
    if kind == "axis":
        chosen = draw(seed, *shape).argmax(-1, keepdim=True)
        return torch.zeros(shape, dtype=torch.float64, device=DEVICE).scatter(-1, chosen, 1.0)
    noise = draw(seed, *shape)
    if kind == "equal":
        noise = noise[:, :1].expand(shape).contiguous()
    return torch.nn.functional.normalize(noise, dim=-1) if delta else noise * shape[-1] ** -0.5


def make_records(
    *,
    decay: str,
    delta: bool,
    batch: int = 1,
    t: int,
    heads: tuple[int, int] = (2, 1),
    headdim: int = 5,
    d_state: int = 7,
    gate: str = "random",
    keys: str = "random",
    seed: int = 0,
) -> tuple[Tensor, Records]:
    """Queries and records of t tokens, fp64; ``heads`` is (nheads, ngroups)."""
    nheads, ngroups = heads
    k = make_keys(keys, (batch, t, ngroups, d_state), seed, delta)
    v = draw(seed + 1, batch, t, nheads, headdim)
    g = make_gate(gate, (batch, t, nheads, 1 if decay == "head" else d_state), seed + 2)
    beta = torch.sigmoid(draw(seed + 3, batch, t, nheads)) * (1.9 if delta else 1.0)
    q = draw(seed + 4, batch, t, ngroups, d_state)
    return q, Records(k, v, g, beta)


def to(records: Records, dtype: torch.dtype) -> Records:
    return Records(*(field.to(dtype) for field in records))


def between(records: Records, first: int, last: int) -> Records:
    return Records(*(field[:, first:last] for field in records))


def tokens_of(q: Tensor, records: Records) -> Tokens:
    """The same, as the token loop takes it."""
    nheads = records.v.shape[2]
    return Tokens(repeat_heads(q, nheads), repeat_heads(records.k, nheads), records.v, records.g, records.beta)
