"""``HybridLM``: a language model whose residual blocks are replay layers, attention and MLPs in any order."""

import copy
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from replayssm import ReplayStateCache, hub
from replayssm.checks import expect, expect_integers, expect_shape, readable, refuse_grad
from replayssm.drafters import MTPHead
from replayssm.layers.norm import widened
from replayssm.models.block import Block, new_block, new_norm
from replayssm.models.config import DTYPES, check_config
from replayssm.models.loading import Checkpoint, expect_destination, expect_dtype, expect_fit, fill, stored
from replayssm.models.mtp import MTPDecoder

_OUTPUTS = ("out_proj", "o_proj", "down_proj")  # the projection of each mixer that writes into the residual stream
_HEAD = "lm_head.weight"
_MTP = "mtp."  # keys of the head for drafts, which has a file of its own


class HybridLM(nn.Module):
    """An embedding, residual blocks, a norm and a head.

    Args:
        config: the content of config.json: model_type "replayssm_hybrid", vocab_size, d_model, tie_embeddings,
            norm_eps, and layers, a list of {"type": ..., and the constructor arguments of that type}; types are the
            keys of ``MIXERS``. Optional: tokenizer "bytes"; dtype, the name of the dtype to compute in; norm_plus_one,
            the norms between blocks multiply by 1 + weight; residual_fp32, the sum of the blocks is at least in fp32;
            embed_scale and residual_scale, factors of the embeddings and of what a block adds; logits_divisor;
            mtp, a list as layers of the blocks of a head for further tokens (``MTPDecoder``);
            used_vocab_size, where further rows of the embedding only pad it; source, the checkpoint of another library
            that the model came from (see ``families.py``).
        dtype: of the parameters; None is the config's, else torch's default.

    Attributes:
        not_loaded: keys of the checkpoint that the model came from and has no place for.
        mtp: a head that drafts further tokens from hidden states, for ``generate(..., drafter="mtp")``, or None.

    Raises:
        ValueError: a key is unknown or missing, or a value is out of range. Nothing has been built then.
    """

    def __init__(
        self,
        config: dict[str, Any],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_config(config)
        expect_dtype("HybridLM", dtype)
        self.config = copy.deepcopy(config)
        self.mtp: MTPHead | MTPDecoder | None = None
        self.not_loaded: list[str] = []
        dtype = DTYPES[config["dtype"]] if dtype is None and "dtype" in config else dtype
        d_model = config["d_model"]
        weight = torch.empty(config["vocab_size"], d_model, device=device, dtype=dtype)
        self.embed = nn.Embedding(config["vocab_size"], d_model, _weight=weight)
        self.layers = nn.ModuleList()
        for i, entry in enumerate(config["layers"]):
            self.layers.append(new_block(f"layers[{i}]", config, entry, device, dtype))
        self.norm = new_norm(config, device, dtype)
        self.lm_head = nn.Linear(d_model, config["vocab_size"], bias=False, device=device, dtype=dtype)
        if "mtp" in config:
            self.mtp = MTPDecoder(config, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every parameter anew, in place; also after ``to_empty`` of a model built on meta.

        Each mixer initialises itself. What it adds to the residual stream starts smaller the more blocks there are.
        """
        self._tie()
        for weight in (
            [self.embed.weight] if self.config["tie_embeddings"] else [self.embed.weight, self.lm_head.weight]
        ):
            if not weight.is_meta:  # nothing to draw there; torch would import its compiler for the shapes
                nn.init.normal_(weight, std=0.02)
        self.norm.reset_parameters()
        if isinstance(self.mtp, MTPDecoder):
            self.mtp.reset_parameters()
        for block in self._blocks():
            block.reset_parameters()
            for name, child in block.mixer.named_children():
                if name in _OUTPUTS:
                    with torch.no_grad():
                        child.get_parameter("weight").div_(len(self.layers) ** 0.5)

    def forward(
        self,
        ids: Tensor,
        cache: ReplayStateCache | None = None,
        *,
        attention_mask: Tensor | None = None,
        rows: Tensor | None = None,
        parents: Tensor | None = None,
        logits_to_keep: int = 0,
        return_hidden: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits of the token that follows each position: the training path without a cache, a step with one.

        Args:
            ids: (batch, t) int.
            cache: continue its sequences; ``cache.commit`` closes the step.
            attention_mask: (batch, t), 1 = a token. A masked position is as if it were not there; logits there are
                unspecified.
            rows: (batch,) int, the cache row of each row of ids, -1 for off; None is all rows in order.
            parents: (t,) or (batch, t) int, the tokens are the nodes of a draft tree: the column of each node's parent,
                -1 for the last committed token. A node follows what is committed and its ancestors, and no other node;
                ``cache.commit`` then names a path. Needs t <= step_tokens and no attention_mask.
            logits_to_keep: columns, counted from the right, that get logits; 0 is all.
            return_hidden: also return what the head is given, for ``mtp``.

        Returns:
            (batch, t or logits_to_keep, vocab_size); with ``return_hidden`` also (batch, t, d_model), for all columns.
        """
        self._check_call(ids, cache, rows, parents, logits_to_keep)
        if cache is not None:
            # before one module opens the step that a later one would refuse
            refuse_grad("HybridLM.forward", self, self.embed.weight)
            if not any(block.stateful for block in self._blocks()):
                cache.open_step(ids.shape[1], rows, attention_mask, parents)
        # all states are found before one module opens the step: a cache of another model is refused unchanged
        states = [cache.state_of(b.mixer) if cache is not None and b.stateful else None for b in self._blocks()]
        x = self.embed(ids.long())
        if "embed_scale" in self.config:
            x = x * self.config["embed_scale"]
        dtype = x.dtype
        if self.config.get("residual_fp32", False):
            x = widened(x)
        for block, state in zip(self._blocks(), states, strict=True):
            x = block(x, state, dtype=dtype, attention_mask=attention_mask, rows=rows, parents=parents)
        hidden = self.norm(x if return_hidden else x[:, -logits_to_keep:]).to(dtype)
        logits = self.lm_head(hidden[:, -logits_to_keep:])
        if "logits_divisor" in self.config:
            logits = logits / self.config["logits_divisor"]
        return (logits, hidden) if return_hidden else logits

    def save_pretrained(self, folder: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
        """Write config.json, model.safetensors and, with an ``MTPHead``, mtp.safetensors.

        The config names the dtype the model computes in.

        Args:
            folder: made if it does not exist; an interrupted call leaves what was there.
            dtype: of the file, None for that of each parameter. A_log, dt_bias, D and norm weights keep theirs.

        Raises:
            ValueError: a dtype that no model is loaded from, or a model on meta; nothing has been written then.
        """
        where = "HybridLM.save_pretrained"
        expect_dtype(where, dtype)
        on_meta = [key for key, tensor in self.own_tensors().items() if tensor.is_meta]
        expect(not on_meta, f"{where}: weights must have values; got {', '.join(on_meta[:4])} on meta. Load them.")
        config = {**self.config, "dtype": str(self.embed.weight.dtype).removeprefix("torch.")}
        if not isinstance(self.mtp, MTPDecoder):
            config.pop("mtp", None)
        head = stored(self.mtp.state_dict(), dtype) if isinstance(self.mtp, MTPHead) else None
        hub.write_folder(Path(folder), config, stored(self.own_tensors(), dtype), head)

    def save_mtp(self, file: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
        """Write the head for drafts alone; in the model's folder it is named mtp.safetensors.

        Args:
            dtype: of the file, None for that of each parameter; norm weights keep theirs.
        """
        expect_dtype("HybridLM.save_mtp", dtype)
        if not isinstance(self.mtp, MTPHead):
            raise ValueError(
                f"HybridLM.save_mtp: mtp must be an MTPHead; got {type(self.mtp).__name__}. Give the model one: "
                "model.mtp = MTPHead(...). A checkpoint's own head is saved with the model."
            )
        hub.write_weights(Path(file), stored(self.mtp.state_dict(), dtype))

    def load_mtp(self, file: str | os.PathLike[str]) -> None:
        """Take the head for drafts that ``save_mtp`` wrote, in the model's dtype and where the model is.

        Raises:
            FileNotFoundError, ValueError: the file is missing or corrupt, or does not hold exactly a head for this
                model; every key that does not fit is listed.
        """
        where, path = "HybridLM.load_mtp", Path(file)
        weights = hub.Weights(where, hub.Folder(path.parent), path.name)
        up = weights.entries.get("up_proj.weight")
        weight, size = self.embed.weight, len(up) if up is not None and up.ndim == 2 and len(up) else 1
        head = MTPHead(self.config["d_model"], size, eps=self.config["norm_eps"], device="meta", dtype=weight.dtype)
        advice = "Use the file that was saved for this model, or remove it to decode without a head."
        expect_fit(f"{where}: {path}", head.state_dict(), weights.entries, "an MTP head for this model", advice)
        for key in weights.entries:
            fill(head, key, weights.read(key), weight.device)
        weights.close()
        self.mtp = head.train(self.training)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        revision: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> "HybridLM":
        """The model of a folder or of a repository of the Hub, in eval mode.

        Tensors are read one by one, each straight to its device and dtype.

        Args:
            folder: what ``save_pretrained`` wrote, or a checkpoint of a known family as transformers writes it: a path,
                or "org/name" of a repository. A head for drafts, mtp.safetensors, is loaded too.
            revision: of a repository.
            device: None is the CPU.
            dtype: to compute in; None is the config's, else that of the file's embedding. A_log, dt_bias, D and
                norm weights keep the precision of the file where it is higher.

        Raises:
            FileNotFoundError, ValueError: a file is missing, corrupt or cut short, or does not fit the config; every
                key that does not fit is listed.
            NotImplementedError: a family, or a setting of one, that is not known.
        """
        place = hub.find_folder("HybridLM.from_pretrained", folder, revision)
        return cls.from_place(place, device=device, dtype=dtype)

    @classmethod
    def from_place(
        cls, place: hub.Folder, *, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> "HybridLM":
        """``from_pretrained`` of a folder that has been found."""
        expect_destination("HybridLM.from_pretrained", device, dtype)
        checkpoint = Checkpoint("HybridLM.from_pretrained", place)
        check_config(checkpoint.config)
        if dtype is None and "dtype" not in checkpoint.config:
            dtype = checkpoint.embedding_dtype()
        model = cls(checkpoint.config, device="meta", dtype=dtype)
        own = model.own_tensors()
        links = checkpoint.links(own)
        checkpoint.expect_fit(links, own)
        checkpoint.fill(links, model, "cpu" if device is None else device)
        model._tie()
        model.not_loaded = checkpoint.unused
        head = place.fetch(hub.MTP) if checkpoint.native else None
        if head is not None:
            model.load_mtp(head)
        assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
        return model.eval()

    def own_tensors(self) -> dict[str, Tensor]:
        """The tensors of model.safetensors: a head for drafts only where the config has it, and the tied one once."""
        tensors = self.state_dict()
        if not isinstance(self.mtp, MTPDecoder):
            tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(_MTP)}
        if self.config["tie_embeddings"]:
            del tensors[_HEAD]
        return tensors

    def _blocks(self) -> Iterable[Block]:
        return cast(Iterable[Block], self.layers)

    def _tie(self) -> None:
        if self.config["tie_embeddings"]:
            self.lm_head.weight = self.embed.weight

    def _check_call(
        self, ids: Tensor, cache: ReplayStateCache | None, rows: Tensor | None, parents: Tensor | None, to_keep: int
    ) -> None:
        """Refuse bad arguments before anything changes; the open step checks those that concern the cache."""
        where, weight, vocab_size = "HybridLM.forward", self.embed.weight, self.config["vocab_size"]
        expect_shape(where, "ids", ids, ("batch", "t"), "Give one row of token ids for each sequence.")
        expect_integers(where, "ids", ids)
        expect(
            cache is not None or (rows is None and parents is None),
            f"{where}: rows and parents must be None without a cache; got one of them. Pass the cache they speak of.",
        )
        # in these the text is built on failure only: a traced length has none
        if ids.shape[1] < 1:
            raise ValueError(f"{where}: ids must have at least 1 column; got {ids.shape[1]}. Skip the call instead.")
        if ids.device != weight.device and not weight.is_meta:  # offloaded weights are on meta between calls
            raise ValueError(
                f"{where}: ids must be on the model's device {weight.device}; got {ids.device}. Move them there first."
            )
        if isinstance(to_keep, bool) or not isinstance(to_keep, int) or not 0 <= to_keep <= ids.shape[1]:
            raise ValueError(
                f"{where}: logits_to_keep must be an int between 0 (all) and t={ids.shape[1]}; got {to_keep!r}. Keep "
                "at most the columns of ids."
            )
        if readable(ids) and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise ValueError(
                f"{where}: ids must be between 0 and vocab_size - 1 = {vocab_size - 1}; got {int(ids.min())} to "
                f"{int(ids.max())}. Use the tokenizer of this model, and a legal id for padding."
            )
