"""The case that the memory checkers run launches every kernel."""

import importlib
import pkgutil

import pytest

pytest.importorskip("triton")
import gpu_small_case
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from replayssm import ops


def kernels() -> set[str]:
    """The names of all kernels of the package."""
    found = set()
    for module in pkgutil.walk_packages(ops.__path__, "replayssm.ops."):
        if module.name.rpartition(".")[2] != "fla_scan":  # the only import of fla
            names = vars(importlib.import_module(module.name)).items()
            found |= {name for name, value in names if isinstance(value, (JITFunction, InterpretedFunction))}
    return {name for name in found if name.endswith("_kernel")}


@pytest.mark.nightly
def test_the_small_case_launches_every_kernel(monkeypatch):
    launched = set()
    for kind in (JITFunction, InterpretedFunction):
        get = kind.__getitem__
        monkeypatch.setattr(
            kind, "__getitem__", lambda kernel, grid, get=get: (launched.add(kernel.fn.__name__), get(kernel, grid))[1]
        )
    gpu_small_case.main()
    assert launched >= kernels()
    assert len(kernels()) >= 7
