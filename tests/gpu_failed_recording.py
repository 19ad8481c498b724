"""A model that reads values cannot be recorded, and says how to go on: python tests/gpu_failed_recording.py"""

import pytest
import torch
from drafting import Bigram
from draws import draw
from torch import Tensor, nn

from replayssm import ReplayStateCache, generate


class Reads(nn.Module):
    """A model whose forward looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Bigram(draw(1, 5, 5))

    def forward(self, ids: Tensor, cache: ReplayStateCache, **options: object) -> Tensor:
        assert ids.max().item() < 5
        return self.inner(ids, cache, **options)


def main() -> None:
    """Fail to record, then generate without a recording."""
    with pytest.raises(RuntimeError, match="cuda_graphs=False"):
        generate(Reads(), [[1]], max_new_tokens=20)
    torch.cuda.synchronize()
    tokens = generate(Reads(), [[1]], max_new_tokens=20, cuda_graphs=False)
    assert torch.equal(tokens, generate(Bigram(draw(1, 5, 5)), [[1]], max_new_tokens=20))


if __name__ == "__main__":
    main()
