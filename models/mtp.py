"""The head for further tokens of published checkpoints: a decoder layer of its own, with attention over all before."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from replayssm.cache.state_cache import ReplayStateCache
from replayssm.checks import refuse_grad
from replayssm.drafters.pairs import CachedHead
from replayssm.models.block import Block, new_block, new_norm


class MTPDecoder(CachedHead):
    """From a token's hidden state and the embedding of the token after it to that token's hidden state.

    As in DeepSeek-V3 (arXiv 2412.19437, section 2.2), with the embedding and the head of the model and names as in
    Qwen3-Next. It is called over a cache of its own: ``ReplayStateCache(model.mtp, ...)``.

    Args:
        config: of the ``HybridLM``; its "mtp" describes the blocks as "layers" does those of the model.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        d_model = config["d_model"]
        self.pre_fc_norm_embedding = new_norm(config, device, dtype)
        self.pre_fc_norm_hidden = new_norm(config, device, dtype)
        self.fc = nn.Linear(2 * d_model, d_model, False, device, dtype)
        self.layers = nn.ModuleList(
            new_block(f"mtp[{i}]", config, entry, device, dtype) for i, entry in enumerate(config["mtp"])
        )
        self.norm = new_norm(config, device, dtype)

    def reset_parameters(self) -> None:
        """Draw every parameter anew, in place."""
        for part in (self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.fc, *self._blocks(), self.norm):
            part.reset_parameters()

    def forward(
        self,
        hidden: Tensor,
        embedding: Tensor,
        cache: ReplayStateCache | None = None,
        *,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        if cache is not None:
            refuse_grad("MTPDecoder.forward", self, hidden)
        blocks = self._blocks()
        states = [cache.state_of(b.mixer) if cache is not None and b.stateful else None for b in blocks]
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1))
        for block, state in zip(blocks, states, strict=True):
            x = block(x, state, attention_mask=attention_mask)
        return self.norm(x)

    def _blocks(self) -> list[Block]:
        return [cast(Block, block) for block in self.layers]
