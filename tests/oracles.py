"""Independent token loops, written from docs/math.md; nothing here uses the code under test.

A layer is read through its parameters alone. Every function computes in the dtype of ``x``: fp64 gives the exact
answer, fp32 what plain PyTorch would make of the same input (the yardstick of E32). All loops are differentiable.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Tokens(NamedTuple):
    """What the recurrence sees of a token, with keys and queries repeated for every head."""

    q: Tensor  # (batch, t, nheads, d_state)
    k: Tensor  # (batch, t, nheads, d_state)
    v: Tensor  # (batch, t, nheads, headdim)
    g: Tensor  # (batch, t, nheads, 1 | d_state)
    beta: Tensor  # (batch, t, nheads)


class Trace(NamedTuple):
    output: Tensor  # (batch, t, d_model)
    states: Tensor  # (batch, t, nheads, headdim, d_state): the state after each token


def rec(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, delta: bool, state: Tensor | None = None):
    """One head, one sequence: (t, N), (t, N), (t, P), (t, 1 | N), (t,) -> outputs (t, P), last state (P, N)."""
    state = v.new_zeros(v.shape[1], k.shape[1]) if state is None else state
    outputs = []
    for s in range(len(k)):
        state = state * g[s].exp()
        written = beta[s] * ((v[s] - state @ k[s]) if delta else v[s])
        state = state + torch.outer(written, k[s])
        outputs.append(state @ q[s])
    return torch.stack(outputs), state


def token_loop(tokens: Tokens, *, delta: bool, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``rec`` for a batch of sequences and heads: outputs (batch, t, nheads, headdim) and every state."""
    q, k, v, g, beta = tokens
    batch, t, nheads, headdim = v.shape
    if state is None:
        state = v.new_zeros(batch, nheads, headdim, k.shape[-1])
    outputs, states = [], []
    for s in range(t):
        state = state * g[:, s].exp()[:, :, None, :]
        target = v[:, s]
        if delta:
            target = target - (state @ k[:, s][..., None])[..., 0]
        state = state + (beta[:, s][..., None] * target)[..., None] * k[:, s][:, :, None, :]
        outputs.append((state @ q[:, s][..., None])[..., 0])
        states.append(state)
    return torch.stack(outputs, 1), torch.stack(states, 1)


def repeat_heads(x: Tensor, nheads: int) -> Tensor:
    """(batch, t, ngroups, n) -> (batch, t, nheads, n): head h reads group h // (nheads / ngroups)."""
    per_group = nheads // x.shape[2]
    return torch.stack([x[:, :, h // per_group] for h in range(nheads)], 2)


def softplus(x: Tensor) -> Tensor:
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def linear(x: Tensor, module: nn.Linear) -> Tensor:
    y = x @ module.weight.to(x.dtype).T
    return y if module.bias is None else y + module.bias.to(x.dtype)


def short_conv(x: Tensor, module: nn.Module) -> Tensor:
    """Depthwise causal convolution over zeros before the first token, then SiLU; the last tap meets the newest."""
    weight = module.weight.to(x.dtype)
    width = weight.shape[-1]
    y = torch.zeros_like(x)
    for back in range(min(width, x.shape[1])):
        delayed = torch.cat([torch.zeros_like(x[:, :back]), x[:, : x.shape[1] - back]], 1)
        y = y + delayed * weight[:, 0, width - 1 - back]
    if module.bias is not None:
        y = y + module.bias.to(x.dtype)
    return silu(y)


def mamba2(
    layer: nn.Module,
    x: Tensor,
    nheads: int,
    headdim: int,
    d_state: int,
    *,
    scanned: Tensor | bool = True,
    ngroups: int = 1,
    d_conv: int = 4,
    bias: bool = False,
    out_bias: bool | None = None,
    conv_bias: bool = True,
    norm: str | None = "gate_first",
    norm_groups: int | None = None,
    norm_eps: float = 1e-5,
    dt_limits: tuple[float, float] = (0.0, math.inf),
    in_multiplier: float = 1.0,
    segment_multipliers: tuple[float, ...] | None = None,
) -> tuple[Tokens, Trace]:
    """``scanned`` (batch, t): the tokens whose dt is clamped, because they went through a scan."""
    inner, keys = nheads * headdim, ngroups * d_state
    sizes = [inner, inner, keys, keys, nheads]
    parts = linear(x * in_multiplier, layer.in_proj).split(sizes, -1)
    if segment_multipliers is not None:
        parts = [part * multiplier for part, multiplier in zip(parts, segment_multipliers, strict=True)]
    z, dt = parts[0], parts[4]
    value, b, c = short_conv(torch.cat(parts[1:4], -1), layer.conv1d).split([inner, keys, keys], -1)
    dt = softplus(dt + layer.dt_bias.to(x.dtype))
    clamped = dt.clamp(*dt_limits)
    dt = clamped if scanned is True else dt if scanned is False else torch.where(scanned[..., None], clamped, dt)
    value = value.unflatten(-1, (nheads, headdim))
    tokens = Tokens(
        q=repeat_heads(c.unflatten(-1, (ngroups, d_state)), nheads),
        k=repeat_heads(b.unflatten(-1, (ngroups, d_state)), nheads),
        v=value,
        g=(dt * -torch.exp(layer.A_log.to(x.dtype)))[..., None],
        beta=dt,
    )
    y, states = token_loop(tokens, delta=False)
    y = (y + layer.D.to(x.dtype)[:, None] * value).flatten(-2)
    groups = ngroups if norm_groups is None else norm_groups
    if norm == "gate_first":
        y = grouped_norm(y * silu(z), groups, layer.norm.weight, norm_eps)
    elif norm == "norm_first":
        y = grouped_norm(y, groups, layer.norm.weight, norm_eps) * silu(z)
    else:
        y = y * silu(z)
    return tokens, Trace(linear(y, layer.out_proj), states)


def grouped_norm(y: Tensor, groups: int, weight: Tensor, eps: float) -> Tensor:
    weight = weight.to(y.dtype).unflatten(-1, (groups, -1))
    return rms_norm(y.unflatten(-1, (groups, -1)), weight, eps).flatten(-2)


def gated_deltanet(
    layer: nn.Module,
    x: Tensor,
    nheads: int,
    headdim: int,
    d_state: int,
    *,
    ngroups: int | None = None,
    d_conv: int = 4,
    conv_bias: bool = False,
    neg_eigval: bool = False,
    gate_activation: str = "silu",
    norm_eps: float = 1e-6,
) -> tuple[Tokens, Trace]:
    groups = nheads if ngroups is None else ngroups
    qkv = short_conv(linear(x, layer.in_proj_qkv), layer.conv1d)
    q, k, v = qkv.split([groups * d_state, groups * d_state, nheads * headdim], -1)
    a = linear(x, layer.in_proj_a) + layer.dt_bias.to(x.dtype)
    tokens = Tokens(
        q=repeat_heads(unit(q.unflatten(-1, (groups, d_state))) * d_state**-0.5, nheads),
        k=repeat_heads(unit(k.unflatten(-1, (groups, d_state))), nheads),
        v=v.unflatten(-1, (nheads, headdim)),
        g=(-torch.exp(layer.A_log.to(x.dtype)) * softplus(a))[..., None],
        beta=torch.sigmoid(linear(x, layer.in_proj_b)) * (2 if neg_eigval else 1),
    )
    y, states = token_loop(tokens, delta=True)
    z = linear(x, layer.in_proj_z).unflatten(-1, (nheads, headdim))
    gate = silu(z) if gate_activation == "silu" else torch.sigmoid(z)
    y = rms_norm(y, layer.norm.weight.to(x.dtype), norm_eps) * gate
    return tokens, Trace(linear(y.flatten(-2), layer.out_proj), states)


def kda(
    layer: nn.Module,
    x: Tensor,
    nheads: int,
    headdim: int,
    d_state: int,
    *,
    d_conv: int = 4,
    conv_bias: bool = False,
    lower_bound: float | None = None,
    neg_eigval: bool = False,
    gate_rank: int | None = None,
    output_gate_rank: int | None = None,
    output_gate_bias: bool = False,
    norm_eps: float = 1e-5,
) -> tuple[Tokens, Trace]:
    q = short_conv(linear(x, layer.q_proj), layer.q_conv1d).unflatten(-1, (nheads, d_state))
    k = short_conv(linear(x, layer.k_proj), layer.k_conv1d).unflatten(-1, (nheads, d_state))
    v = short_conv(linear(x, layer.v_proj), layer.v_conv1d).unflatten(-1, (nheads, headdim))
    raw = linear(x, layer.f_proj) if gate_rank is None else linear(linear(x, layer.f_a_proj), layer.f_b_proj)
    raw = (raw + layer.dt_bias.to(x.dtype)).unflatten(-1, (nheads, d_state))
    rate = torch.exp(layer.A_log.to(x.dtype)).reshape(nheads, 1)
    tokens = Tokens(
        q=unit(q) * d_state**-0.5,
        k=unit(k),
        v=v,
        g=-rate * softplus(raw) if lower_bound is None else lower_bound * torch.sigmoid(rate * raw),
        beta=torch.sigmoid(linear(x, layer.b_proj)) * (2 if neg_eigval else 1),
    )
    y, states = token_loop(tokens, delta=True)
    z = linear(x, layer.g_proj) if output_gate_rank is None else linear(linear(x, layer.g_a_proj), layer.g_b_proj)
    gate = torch.sigmoid(z.unflatten(-1, (nheads, headdim)))
    y = rms_norm(y, layer.o_norm.weight.to(x.dtype), norm_eps) * gate
    return tokens, Trace(linear(y.flatten(-2), layer.o_proj), states)


def retention(layer: nn.Module, x: Tensor, nheads: int, headdim: int, d_state: int) -> tuple[Tokens, Trace]:
    """The recurrence of arXiv 2307.08621 with decay 1 - 2^(-5 - head)."""
    qkv = linear(x, layer.qkv_proj).unflatten(-1, (nheads, 2 * d_state + headdim))
    q, k, v = qkv.split([d_state, d_state, headdim], -1)
    decay = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(nheads)], dtype=torch.float64, device=x.device)
    tokens = Tokens(
        q=q * d_state**-0.5,
        k=k,
        v=v,
        g=decay.log().to(x.dtype)[:, None].expand(*v.shape[:-1], 1),
        beta=v.new_ones(v.shape[:-1]),
    )
    y, states = token_loop(tokens, delta=False)
    return tokens, Trace(linear(y.flatten(-2), layer.out_proj), states)


@torch.no_grad()
def redraw(layer: nn.Module, seed: int) -> None:
    """Give every parameter a value that its default initialisation would not: ones and zeros hide faults."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(layer.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "A_log":
            value = 0.5 * noise
        elif "norm" in name:
            value = 1 + 0.5 * noise
        elif "conv1d" in name and leaf == "weight":
            value = noise * parameter.shape[-1] ** -0.5
        elif parameter.dim() == 2:
            value = 1.5 * noise * parameter.shape[1] ** -0.5
        else:
            value = noise
        parameter.copy_(value)
