"""Records as a language model's layers make them: repeated tokens, slowly changing topics, heads that remember for 1.5
to 20 000 tokens, features with a bias and outliers. And the recurrence over windows of them, with what is stored or
read replaced by a format.

A window of L steps on the checkpoint S is, for both recurrences, with D what it writes before the state corrects that,
and R the queries, decayed and corrected:

    y = O + R S^T,    S' = G S + (D - W S^T)^T K

so what reading a copy instead of S misses is R (copy - S)^T.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

FLAVOURS = {
    "default": {},
    # no activation, no bias, no outliers: states without structure
    "white": dict(act=False, bias=0.0, sig=0.3, frac=0.0, vocab=4096, noise=1.0),
}
Codec = Callable[[Tensor], Tensor]
Store = Callable[[Tensor, int], Tensor]  # of states and the number of the window


@dataclass(frozen=True)
class Windows:
    """Of a stream: what stands in the formulas above, each (windows, heads, ...); W is None without a delta rule."""

    R: Tensor
    O: Tensor  # noqa: E741 - as in the formula
    D: Tensor
    W: Tensor | None
    K: Tensor
    G: Tensor

    def to(self, dtype: torch.dtype) -> "Windows":
        return Windows(*(None if field is None else field.to(dtype) for field in vars(self).values()))

    def outputs(self, state: Tensor, at: int) -> Tensor:
        return self.O[at] + self.R[at] @ state.mT

    def step(self, state: Tensor, at: int) -> Tensor:
        writes = self.D[at] if self.W is None else self.D[at] - self.W[at] @ state.mT
        return self.G[at][:, None, None] * state + writes.mT @ self.K[at]

    def zeros(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.D.shape[1], self.D.shape[-1], self.K.shape[-1], dtype=dtype)


class Stream(NamedTuple):
    """Which one: "mamba2" has heads of 64 x 128, "gated_deltanet" of 128 x 128."""

    kind: str
    tokens: int
    heads: int
    seed: int
    window: int = 16
    flavour: str = "default"


@functools.lru_cache(maxsize=2)  # hundreds of MB each
def windows_of(stream: Stream) -> Windows:
    """In fp64."""
    records = _records(stream.kind, stream.tokens, stream.heads, stream.seed, **FLAVOURS[stream.flavour])
    return _windows(stream.kind, stream.window, *records)


@functools.lru_cache(maxsize=2)
def exact_outputs(stream: Stream) -> Tensor:
    """(windows, heads, window, headdim) fp64."""
    windows = windows_of(stream)
    state, outputs = windows.zeros(torch.float64), []
    for at in range(len(windows.R)):
        outputs.append(windows.outputs(state, at))
        state = windows.step(state, at)
    return torch.stack(outputs)


def errors_by_position(stream: Stream, store: Store, read: Codec | None, spans: list[tuple[int, int]]) -> list[Tensor]:
    """For each span of tokens, the relative RMS error of the outputs of each head, of steps that do not flush.

    Args:
        store: what the checkpoint of a state is; read: what the copy of a checkpoint is, None for itself.
    """
    exact, windows = exact_outputs(stream), windows_of(stream).to(torch.float32)
    first = min(1, stream.window - 1)  # with window 1 every step flushes
    wanted = [range(low // stream.window, high // stream.window) for low, high in spans]
    sums = torch.zeros(len(spans), 2, stream.heads, dtype=torch.float64)
    state = windows.zeros(torch.float32)
    for at in range(len(windows.R)):
        inside = [number for number, span in enumerate(wanted) if at in span]
        if inside:
            y = windows.outputs(state if read is None else read(state), at).double()
            missed, whole = (x[:, first:].pow(2).sum((-1, -2)) for x in (y - exact[at], exact[at]))
            sums[inside] += torch.stack([missed, whole])
        state = store(windows.step(state, at), at)
    return [(missed / whole).sqrt() for missed, whole in sums]


@functools.cache
def snapshots(kind: str, flavour: str, count: int = 8) -> tuple[Tensor, Windows]:
    """States (count, heads, headdim, d_state) from the second half of a stream, and the windows that read them."""
    windows = windows_of(Stream(kind, 6144, 16, 5, flavour=flavour)).to(torch.float32)
    total = len(windows.R)
    wanted = torch.linspace(total // 2 + 8, total - 1, count).long().tolist()
    state, states = windows.zeros(torch.float32), []
    for at in range(total):
        if at in wanted:
            states.append(state)
        state = windows.step(state, at)
    return torch.stack(states), Windows(*(None if field is None else field[wanted] for field in vars(windows).values()))


def read_errors(kind: str, flavour: str, codec: Codec) -> Tensor:
    """(heads,): the relative RMS error of outputs that read copies of the snapshots."""
    states, windows = snapshots(kind, flavour)
    queries = windows.R[:, :, 1:]
    missed = (queries @ (codec(states) - states).mT).pow(2).sum((-1, -2))
    whole = (windows.O[:, :, 1:] + queries @ states.mT).pow(2).sum((-1, -2))
    return (missed.sum(0) / whole.sum(0)).sqrt()


def _records(
    kind: str,
    tokens: int,
    heads: int,
    seed: int,
    *,
    sig: float = 1.1,
    frac: float = 0.03,
    mult: float = 8.0,
    rho: float = 0.3,
    bias: float = 0.5,
    act: bool = True,
    vocab: int = 512,
    noise: float = 0.5,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """k, q, v, beta and log decays, each (tokens, heads, ...) fp64."""
    g = torch.Generator().manual_seed(seed)
    headdim, d_state = (64, 128) if kind == "mamba2" else (128, 128)
    group = 8 if kind == "mamba2" else 2
    token = _token_stream(tokens, vocab, g)
    memory = torch.logspace(math.log10(1.5), math.log10(20000.0), heads)[torch.randperm(heads, generator=g)]
    decay = torch.exp(torch.empty(heads).uniform_(math.log(0.5), math.log(16.0), generator=g))
    dt0 = (1.0 / (memory * decay)).clamp(1e-5, 2.0)
    decay = 1.0 / (memory * dt0)
    dt = softplus(torch.log(torch.expm1(dt0)) + 0.8 * torch.randn(tokens, heads, generator=g))
    keys, queries = [], []
    for _ in range(heads // group):
        ek = torch.randn(vocab, d_state, generator=g)
        eq = 0.6 * ek + 0.8 * torch.randn(vocab, d_state, generator=g)
        lk = torch.randn(d_state, generator=g)
        lq = rho * lk + math.sqrt(1 - rho * rho) * torch.randn(d_state, generator=g)
        ok = torch.rand(d_state, generator=g) < frac
        oq = torch.where(torch.rand(d_state, generator=g) < max(rho, 0), ok, torch.rand(d_state, generator=g) < frac)
        sk = torch.exp(sig * 0.7 * lk) * torch.where(ok, mult, 1.0)
        sq = torch.exp(sig * 0.7 * lq) * torch.where(oq, mult, 1.0)
        bk, bq = bias * torch.randn(d_state, generator=g), bias * torch.randn(d_state, generator=g)
        keys.append(_features(token, ek, sk, bk, g, noise, act))
        queries.append(_features(token, eq, sq, bq, g, noise, act))
    values = []
    for _ in range(heads):
        ev = torch.randn(vocab, headdim, generator=g)
        scale = torch.exp(sig * torch.randn(headdim, generator=g))
        scale = torch.where(torch.rand(headdim, generator=g) < frac, scale * mult, scale)
        values.append(_features(token, ev, scale, 0.6 * bias * torch.randn(headdim, generator=g), g, noise, act))
    k, q = (torch.stack(each, 1).repeat_interleave(group, 1).double() for each in (keys, queries))
    v, beta = torch.stack(values, 1).double(), dt.double()
    if kind == "gated_deltanet":
        k, q = (x * (x.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (k, q))
        q = q * d_state**-0.5
        beta = torch.sigmoid(torch.randn(tokens, heads, generator=g) * 1.2).double()
    return k, q, v, beta, (-decay * dt).double()


def _token_stream(tokens: int, vocab: int, g: torch.Generator) -> Tensor:
    permutations = torch.stack([torch.randperm(vocab, generator=g) for _ in range(12)])
    rank = torch.multinomial(1.0 / torch.arange(1, vocab + 1), tokens, replacement=True, generator=g)
    topic = torch.cumsum((torch.rand(tokens, generator=g) < 1 / 300).int(), 0) % 12
    return permutations[topic, rank]


def _features(
    token: Tensor, embedding: Tensor, scale: Tensor, bias: Tensor, g: torch.Generator, noise: float, act: bool
) -> Tensor:
    """A short causal convolution of noisy embeddings, then scale, bias and SiLU."""
    tokens = token.shape[0]
    z = embedding[token] + noise * torch.randn(tokens, embedding.shape[1], generator=g)
    padded = torch.cat([z[:1].expand(3, -1), z])
    z = sum(weight * padded[i : i + tokens] for i, weight in enumerate((0.15, 0.2, 0.3, 0.75)))
    return silu(scale * z + bias) if act else scale * z + bias


def _windows(kind: str, window: int, k: Tensor, q: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Windows:
    k, q, v, beta, log_decay = (x.unflatten(0, (-1, window)).transpose(1, 2) for x in (k, q, v, beta, log_decay))
    total = log_decay.cumsum(-1)
    within = (total.unsqueeze(-1) - total.unsqueeze(-2)).exp().tril()
    mixing, decayed_q = within * (q @ k.mT), total.exp().unsqueeze(-1) * q
    tail = k * (total[..., -1:] - total).exp().unsqueeze(-1)
    if kind == "mamba2":
        writes = beta.unsqueeze(-1) * v
        return Windows(decayed_q, mixing @ writes, writes, None, tail, total[..., -1].exp())
    solve = torch.eye(window, dtype=k.dtype) + (beta.unsqueeze(-1) * within * (k @ k.mT)).tril(-1)
    writes = torch.linalg.solve_triangular(solve, beta.unsqueeze(-1) * v, upper=False)
    corrected = torch.linalg.solve_triangular(solve, (beta * total.exp()).unsqueeze(-1) * k, upper=False)
    return Windows(decayed_q - mixing @ corrected, mixing @ writes, writes, corrected, tail, total[..., -1].exp())
