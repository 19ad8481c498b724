"""The case that the memory checkers run launches every kernel."""

import pytest

pytest.importorskip("triton")
import gpu_small_case
import kernels
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


@pytest.mark.nightly
def test_the_small_case_launches_every_kernel(monkeypatch):
    launched = set()

    def noting(launch):
        def noted(kernel, grid):
            launched.add(kernel.fn.__name__)
            return launch(kernel, grid)

        return noted

    for kind in (JITFunction, InterpretedFunction):
        monkeypatch.setattr(kind, "__getitem__", noting(kind.__getitem__))
    gpu_small_case.main()
    assert launched >= kernels.names() > set()
