"""Tests of decoding run on both backends; through Triton's interpreter, which takes milliseconds a program, with less.

A file whose cases concern decoding says ``pytestmark = both_backends``, or single tests of it are marked so; caches
with backend "auto" then take each of the two in turn.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from draws import DEVICE

from replayssm.ops import decode

both_backends = pytest.mark.usefixtures("decoding_backend")
FEWER = 12  # times fewer examples
_by_device = decode.automatic


def as_marked() -> str:
    """The backend of the test at hand: plain PyTorch in one that is not marked, on a GPU too."""
    return "torch" if decode.automatic is _by_device else decode.automatic(DEVICE)


def interpreted() -> bool:
    """Whether decode kernels run through the interpreter in the test at hand."""
    return DEVICE.type == "cpu" and decode.automatic(DEVICE) == "triton"


def settings_now() -> hypothesis.settings:
    """Hypothesis's settings of a state machine in the test at hand; its examples are many short steps."""
    return _fewer(FEWER // 3) if interpreted() else hypothesis.settings.default


def _fewer(times: int) -> hypothesis.settings:
    return hypothesis.settings(max_examples=max(hypothesis.settings.default.max_examples // times, 2))


def given(
    **strategies: hypothesis.strategies.SearchStrategy[Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``hypothesis.given``, with fewer and smaller examples where kernels are interpreted."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        many = hypothesis.given(**strategies)(test)
        few = _fewer(FEWER)(hypothesis.given(**strategies)(test))

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            (few if interpreted() else many)(**fixtures)

        drawn = inspect.signature(test)
        run.__signature__ = drawn.replace(  # type: ignore[attr-defined]
            parameters=[p for name, p in drawn.parameters.items() if name not in strategies]
        )
        return run

    return decorate
