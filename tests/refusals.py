"""A refusal is the right exception, a text with a remedy, and a cache that is bit for bit as it was."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from budgets import assert_same_bits
from torch import Tensor

import replayssm

# <Class.method>: <argument> must be <rule>; got <value>. <What to do.> Perhaps with the module's name behind the first.
WHERE = r"^([A-Z]\w+|generate|longest_accepted)(\.\w+)*( \([^)]*\)| '[^']*')?: "
TEMPLATE = re.compile(WHERE + r".+ must .+; got .+\.\s+\S.+", re.DOTALL)


def snapshot(cache: replayssm.ReplayStateCache) -> dict[str, Tensor]:
    """A copy of everything that a refused call must not touch."""
    return {
        **{name: tensor.clone() for name, tensor in cache.tensors().items()},
        "seqlen": cache.seqlen.clone(),
        "flushed": cache.flushed.clone(),
    }


def assert_unchanged(cache: replayssm.ReplayStateCache, before: dict[str, Tensor]) -> None:
    after = snapshot(cache)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert_same_bits(after[name], tensor, name)


@contextmanager
def refused(error: type[Exception], *words: str, cache: replayssm.ReplayStateCache | None = None) -> Iterator[None]:
    """The block must raise ``error`` in the library's form, name every one of ``words``, and leave the cache alone."""
    before = None if cache is None else snapshot(cache)
    with pytest.raises(error) as raised, torch.no_grad():
        yield
    text = str(raised.value)
    assert type(raised.value) is error, f"raised {type(raised.value).__name__}: {text}"
    for word in words:
        assert word in text, f"the message does not say {word!r}: {text}"
    assert re.match(WHERE, text), f"the message does not say where: {text}"
    if error is ValueError:
        assert TEMPLATE.match(text), f"not in the form 'Where: argument must be rule; got value. Remedy.': {text}"
    if cache is not None:
        assert_unchanged(cache, before)
