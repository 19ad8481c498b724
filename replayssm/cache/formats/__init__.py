"""Read formats: smaller copies of the checkpoint that steps read instead of it. One module a format, named as it is.

A module has three functions, over states (..., headdim, d_state) in fp32:

- ``alloc(checkpoint)``: planes of zeros that stand for states of zeros, leading axes as those of ``checkpoint``;
- ``quantize(checkpoint, planes)``: the copy of ``checkpoint``, into planes of that size; a function of it alone, so
  that a copy can be rebuilt at any time, and of each (row, head) by itself;
- ``dequantize(planes)``: the numbers that steps read, fp32; d_state may be filled up to whole blocks.

Kernels get a loader of their own for the same planes, in the order in which ``alloc`` returns them.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from replayssm.checks import expect_exists


class ReadFormat(NamedTuple):
    """The functions of a format's module."""

    alloc: Callable[[Tensor], tuple[Tensor, ...]]
    quantize: Callable[[Tensor, tuple[Tensor, ...]], None]
    dequantize: Callable[[tuple[Tensor, ...]], Tensor]


def names() -> list[str]:
    """The formats that exist: the modules of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def expect_read_format(where: str, name: str | None) -> None:
    """Refuse a read format that does not exist.

    Raises:
        NotImplementedError: the text lists those that do.
    """
    expect_exists(where, "read_format", name, (None, *names()))


def find(name: str) -> ReadFormat:
    """The format of this name, which exists."""
    module = importlib.import_module(f"{__name__}.{name}")
    return ReadFormat(module.alloc, module.quantize, module.dequantize)
