"""The error template of the library, in one place: where, which rule with this call's numbers, what came, the remedy.

Checks look at shapes, dtypes and devices. A tensor's values are read only where that costs nothing: see ``readable``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def expect(condition: bool, message: str) -> None:
    """Raise ``ValueError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def expect_tensor(where: str, name: str, value: object) -> None:
    """Check that an argument is a tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{where}: {name} must be a tensor; got {type(value).__name__}. Make one of it with torch.tensor(...)."
        )


def expect_shape(where: str, name: str, tensor: Tensor, shape: Sequence[int | str], advice: str) -> None:
    """Check the shape of a tensor; a string in ``shape`` names a free axis, an int fixes one.

    Raises:
        ValueError: in the form ``where: name must be (batch=2, t, 8); got (2, 5, 9). advice``.
    """
    expect_tensor(where, name, tensor)
    fits = tensor.ndim == len(shape) and all(
        isinstance(want, str) or want == got for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        rule = "(" + ", ".join(str(axis) for axis in shape) + ("," if len(shape) == 1 else "") + ")"
        raise ValueError(f"{where}: {name} must be {rule}; got {tuple(tensor.shape)}. {advice}")


def expect_integers(where: str, name: str, tensor: Tensor) -> None:
    """Check that a tensor holds integers (bool is not one)."""
    expect_tensor(where, name, tensor)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{where}: {name} must hold integers; got {tensor.dtype}. Convert it with .long().")


def expect_device(where: str, name: str, tensor: Tensor, device: torch.device) -> None:
    """Check that a tensor is where the others are."""
    expect_tensor(where, name, tensor)
    if tensor.device != device:
        raise ValueError(f"{where}: {name} must be on {device}; got {tensor.device}. Move it there first.")


def expect_choice(where: str, name: str, value: object, choices: Sequence[object]) -> None:
    """Check that an option is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{where}: {name} must be one of {_listed(choices)}; got {value!r}. Choose one of these.")


def expect_exists(
    where: str, name: str, value: object, existing: Sequence[object], advice: str = "Choose one of these."
) -> None:
    """Raise ``NotImplementedError`` with the list of what exists, unless ``value`` is in it."""
    if value not in existing:
        raise NotImplementedError(f"{where}: {name} must be one of {_listed(existing)}; got {value!r}. {advice}")


def _listed(choices: Sequence[object]) -> str:
    return ", ".join(repr(choice) for choice in choices)


def expect_positive(where: str, **sizes: int) -> None:
    """Check that every size is an int of at least 1 that a tensor can have."""
    for name, size in sizes.items():
        expect_int64(where, name, size, "Give a positive size.")
        if size < 1:
            raise ValueError(f"{where}: {name} must be an int of at least 1; got {size!r}. Give a positive size.")


def expect_int64(where: str, name: str, value: object, advice: str) -> None:
    """Check that an argument is an int that a tensor can hold (bool is not one)."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise ValueError(f"{where}: {name} must be an int of 64 bits; got {value!r}. {advice}")


def readable(tensor: Tensor) -> bool:
    """Whether the values of ``tensor`` can be looked at for free: on the CPU, and not while a graph is being traced."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def refuse_grad(where: str, module: nn.Module, x: Tensor) -> None:
    """Refuse a step with a cache while autograd records: the state is updated in place, so gradients would be lost.

    Raises:
        RuntimeError: gradients are enabled, and ``x`` or a parameter of ``module`` requires them.
    """
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in module.parameters())):
        raise RuntimeError(
            f"{where}: a step with a cache is inference and must run without gradients; got gradients enabled. "
            "Wrap it in torch.no_grad(), or call the layer without a state to train."
        )
