"""Arguments of a cache: what is out of range or does not exist is refused, the rest brought into one form."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from replayssm.cache.step import Clock, OwnCache, StatefulModule
from replayssm.cache.stored_state import check_formats
from replayssm.checks import expect, expect_int64, expect_integers, expect_positive, expect_shape

Window = int | Literal["auto"]


def check_arguments(
    batch: int,
    window: Window,
    step_tokens: int,
    max_seqlen: int | None,
    checkpoint: str,
    read_format: str | None,
) -> None:
    """Refuse what is out of range or does not exist."""
    where = "ReplayStateCache"
    expect_positive(where, batch=batch, step_tokens=step_tokens)
    if max_seqlen is not None:
        expect_positive(where, max_seqlen=max_seqlen)
    if isinstance(window, str):
        expect(window == "auto", f'{where}: window must be "auto" or an int; got {window!r}. Use "auto".')
    else:
        expect(
            isinstance(window, int) and not isinstance(window, bool) and (window == 0 or window >= step_tokens),
            f'{where}: window must be "auto", 0 or at least step_tokens={step_tokens}; got {window!r}. '
            f"Choose window={step_tokens} or more, or 0 to fold at every step.",
        )
        expect_int64(where, "window", window, "Choose a smaller window.")
    slots = Clock.slots_for(step_tokens if isinstance(window, str) else window, step_tokens)
    expect_int64(where, "window + step_tokens", slots, "Choose smaller ones.")
    check_formats(where, checkpoint, read_format)


def listed(model: nn.Module | Iterable[nn.Module]) -> nn.Module | list[nn.Module]:
    """A module, or layers as a list, which may be gone through more than once."""
    if isinstance(model, nn.Module):
        return model
    layers = list(model) if isinstance(model, Iterable) else [model]
    strangers = sorted({type(layer).__name__ for layer in layers if not isinstance(layer, nn.Module)})
    expect(
        not strangers,
        f"ReplayStateCache: model must be a module or a list of modules; got {type(model).__name__} with "
        f"{', '.join(strangers)}. Give the model, or its layers.",
    )
    return layers


def stateful_modules(model: nn.Module | Sequence[nn.Module]) -> Iterator[tuple[str, StatefulModule]]:
    """Names and modules that keep a state, in module order, but for parts with a cache of their own."""
    if isinstance(model, nn.Module):
        found = [(name or type(module).__name__, module) for name, module in _modules(model)]
    else:
        found = [
            (f"{i}.{name}" if name else str(i), module)
            for i, layer in enumerate(model)
            for name, module in _modules(layer)
        ]
    seen: set[int] = set()
    for name, module in found:
        if issubclass(type(module), StatefulModule):  # of the class: a wrapper forwards attributes to what it wraps
            assert isinstance(module, StatefulModule)
            expect(
                id(module) not in seen,
                f"ReplayStateCache: model must name each layer once; got {name} twice. Give each layer its own module.",
            )
            seen.add(id(module))
            yield name, module


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As ``named_modules``, without what lies in an ``OwnCache`` inside the model."""
    apart: set[nn.Module] = set()
    for part in model.modules():
        if part is not model and isinstance(part, OwnCache):
            apart.update(part.modules())
    return ((name, module) for name, module in model.named_modules() if module not in apart)


def device_of(model: nn.Module | Sequence[nn.Module]) -> torch.device:
    """Where the counters live: the device of the first parameter, the CPU for a model without any."""
    layers = [model] if isinstance(model, nn.Module) else model
    first = next((parameter for layer in layers for parameter in layer.parameters()), None)
    return torch.device("cpu") if first is None else first.device


def listed_rows(where: str, name: str, rows: int | Sequence[int]) -> Tensor:
    """Rows that are no tensor as one, on the CPU; integers of numpy are rows too."""
    listed = list(rows) if isinstance(rows, Iterable) else [rows]
    try:
        return torch.tensor(listed, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{where}: {name} must be an int, a list or an int tensor of cache rows; got {rows!r:.80}. Give such rows."
        ) from error


def seeds_of(seed: int | Tensor, count: int, device: torch.device) -> Tensor:
    """(count,) int64 random streams; an int starts a run of consecutive ones, behind 2**63 - 1 from -(2**63)."""
    if isinstance(seed, Tensor):
        expect_integers("ReplayStateCache", "seed", seed)
        expect_shape("ReplayStateCache", "seed", seed, (count,), "Give one seed a row, or an int.")
        return seed.to(device=device, dtype=torch.int64, copy=True)
    expect_int64("ReplayStateCache", "seed", seed, "Give an int, or an int tensor of one seed a row.")
    return torch.arange(count, device=device) + seed
