"""What stands in a transformers cache for a patched mixer: a cache of one replay layer, with counters of its own."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from replayssm.cache.layer_state import Geometry, LayerState
from replayssm.cache.state_cache import ReplayStateCache
from replayssm.checks import expect
from replayssm.hf.cores import Core
from replayssm.hf.lockstep import Lockstep
from replayssm.hf.options import Options


class _Recent(NamedTuple):
    """Inputs of the open step, whose tokens may yet be cropped: (batch, t, d_model), and (batch, t) bool or None."""

    x: Tensor
    mask: Tensor | None

    def followed_by(self, x: Tensor, mask: Tensor | None) -> "_Recent":
        masks = None
        if self.mask is not None or mask is not None:
            masks = torch.cat([_mask_of(*self), _mask_of(x, mask)], dim=1)
        return _Recent(torch.cat([self.x, x], dim=1), masks)

    def split(self, columns: int) -> tuple["_Recent", "_Recent"]:
        """The first columns, and the rest."""
        masks = (None, None) if self.mask is None else (self.mask[:, :columns], self.mask[:, columns:])
        return _Recent(self.x[:, :columns], masks[0]), _Recent(self.x[:, columns:], masks[1])


class ReplayLinearLayer(LinearAttentionCacheLayerMixin):
    """A linear-attention entry of ``Cache.layers``.

    Every forward is committed at once, and none can be taken back, until transformers asks for the past
    (``activate_past_recording``, which assisted generation does). From then on the last ``step_tokens`` tokens stay
    uncommitted, and ``crop`` says how many of them are kept.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, options: Options, layer_idx: int, lockstep: Lockstep):
        super().__init__()
        self.options, self.layer_idx, self.lockstep = options, layer_idx, lockstep
        self.past: object | None = None  # what its counters have seen; see Lockstep
        self.replay: ReplayStateCache | None = None
        self.core: Core | None = None  # of the mixer that came last: to make one takes longer than several launches
        self.recent: _Recent | None = None
        self.verifying = False  # the past is recorded and a crop has come: a forward is a verification or a draft
        self.columns = 0  # positions that have come, padding included, less those that were cropped

    @property
    def is_empty(self) -> bool:
        """No token has come since it was made or reset."""
        return not self.has_previous_state[0]

    def refuses(self, t: int) -> bool:
        """Whether t tokens are more drafts than could be taken back."""
        return self.record_past and self.verifying and t > self.options.step_tokens

    def forward(self, mixer: Any, x: Tensor, mask: Tensor | None) -> Tensor:
        """Continue the sequences with x (batch, t, d_model); ``mask`` (batch, t) bool, or None for tokens only.

        Args:
            mixer: a patched mixer, whose class has a ``core``.

        Raises:
            NotImplementedError: gradients are needed and there is a state to continue from.
            ValueError: another batch size than the state's.
        """
        if self.core is None or not self.core.serves(mixer, x):
            self.core = mixer.core(mixer, x)
        core: Core = self.core
        grad = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in mixer.parameters()))
        if grad and not self.is_empty:
            raise NotImplementedError(
                f"{type(mixer).__name__}: a cache must be fresh where gradients are enabled; got one with tokens. "
                "Continue it under torch.no_grad(), or train without a cache."
            )
        if not self.is_empty and self._replay.batch != x.shape[0]:
            raise ValueError(
                f"{type(mixer).__name__}: hidden_states must be (batch={self._replay.batch}, t, d_model), as "
                f"many rows as the cache has; got {tuple(x.shape)}. Start with a fresh cache, or call "
                "cache.batch_repeat_interleave or cache.batch_select_indices."
            )
        if self.replay is None or self._replay.batch != x.shape[0]:
            self.replay = self._alloc(x.shape[0], core.geometry, x.dtype, x.device)
        if self.record_past and not grad:
            y = self._step_back_and_forward(core, x, mask)
        else:
            self.settle()
            y = self._run(core, x, mask)
        self.has_previous_state[0] = True
        self.columns += x.shape[1]
        return y

    def settle(self) -> None:
        """Commit everything that is outstanding; it can no longer be cropped."""
        if self.recent is not None:
            self._replay.commit()
            self.recent = None

    def _run(self, core: Core, x: Tensor, mask: Tensor | None) -> Tensor:
        """A forward that is kept."""
        cache = self._replay
        self.lockstep.offer(cache.clock, self.past, x.shape[1], mask)
        final = None
        if self.is_empty:
            y, final = core.begin(x, cache[0], mask)
        else:
            y = core(x, cache[0], attention_mask=mask)
        self.past = self.lockstep.kept(cache.clock, self.past)
        cache.commit()
        if final is not None:
            cache[0].checkpoint = final
        return y

    def _step_back_and_forward(self, core: Core, x: Tensor, mask: Tensor | None) -> Tensor:
        """A forward whose last step_tokens tokens may be cropped, together with the ones before that still may be.

        Tokens that came in an earlier forward and are not committed run again, in one step with the new ones.
        """
        new = _Recent(x, mask)
        if self.recent is not None:
            self._replay.commit(0)
            new = self.recent.followed_by(x, mask)
        ahead = max(0, new.x.shape[1] - self.options.step_tokens)
        first, last = new.split(ahead)
        outputs = [self._run(core, first.x, first.mask)] if ahead else []
        self.past = object()  # what will be kept of this step is each layer's own
        outputs.append(core(last.x, self._replay[0], attention_mask=last.mask))
        self.recent = last
        return torch.cat(outputs, dim=1)[:, -x.shape[1] :]

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens and commit the ones before; 0 commits all.

        Raises:
            ValueError: a count above 0.
            RuntimeError: more tokens than are outstanding; nothing has changed then.
        """
        where, remove = type(self).__name__, -tokens_to_remove
        expect(remove >= 0, f"{where}.crop: tokens_to_remove must be at most 0; got {-remove}. Give it as negative.")
        outstanding = 0 if self.recent is None else self.recent.x.shape[1]
        if remove > outstanding:
            raise RuntimeError(
                f"{where}.crop: tokens_to_remove must take back at most the {outstanding} tokens that are not in the "
                f"state yet; got {-remove}. Call cache.activate_past_recording() before the forward, and patch with "
                f"step_tokens above {self.options.step_tokens} for longer drafts."
            )
        self.verifying = self.record_past
        if self.recent is not None:
            step = self._replay.clock.step
            assert step is not None
            self._replay.commit((step.length - remove).clamp(min=0))
            self.recent = None
        self.columns -= remove

    def activate_past_recording(self) -> None:
        """Keep the next tokens uncommitted until a crop."""
        self.record_past = True
        self.verifying = False  # what follows is a prompt, of any length

    def stop_past_recording(self) -> None:
        """Commit everything, and every forward from now on."""
        self.settle()
        self.record_past = self.verifying = False

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        if self.replay is not None:
            self.replay.reset()
        self.recent, self.past, self.verifying, self.columns = None, None, False, 0
        self.has_previous_state[0] = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row beam_idx[i]; beam_idx may have another length than the batch."""
        if self.is_empty:
            return
        self.settle()
        self.past = object()
        old = self._replay
        index = beam_idx.to(old.seqlen.device)
        if len(index) == old.batch:
            old.reorder(index)
            return
        state = old[0]
        self.replay = self._alloc(len(index), state.geometry, state.ring.v.dtype, state.conv.device)
        for name, tensor in self.replay.tensors().items():
            tensor.copy_(old.tensors()[name].index_select(0, index))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times in a row."""
        if not self.is_empty:
            self.reorder_cache(self._rows().repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of ``indices``, in its order; a bool tensor says which."""
        if not self.is_empty:
            self.reorder_cache(self._rows()[indices.to(self._rows().device)])

    def offload(self) -> None:
        """Nothing moves: the state is read in every step, and transformers does not offload stock ones either."""

    def prefetch(self) -> None:
        """See ``offload``."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise self._not_stock()

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        raise self._not_stock()

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        raise self._not_stock()

    def _not_stock(self) -> RuntimeError:
        return RuntimeError(
            f"{type(self).__name__}: the state must be continued by a model patched with replayssm.hf, which made it; "
            "got a call of another mixer. Start with a fresh cache."
        )

    def _alloc(self, batch: int, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> ReplayStateCache:
        cache = ReplayStateCache(_Allocator(geometry, dtype), batch, device=device, **self.options._asdict())
        cache[0].name = f"layer {self.layer_idx}"
        cache[0].index = self.layer_idx  # each layer rounds by random numbers of its own
        return cache

    def _rows(self) -> Tensor:
        return torch.arange(self._replay.batch, device=self._replay.seqlen.device)

    @property
    def _replay(self) -> ReplayStateCache:
        assert self.replay is not None
        return self.replay

    def __getstate__(self) -> dict[str, Any]:
        """What a copy, or a pickle, is made of: the tensors, and what allocates others of their shapes."""
        self.settle()  # an open step cannot be copied
        stored = None
        if self.replay is not None:
            state = self.replay[0]
            stored = state.geometry, state.ring.v.dtype, self.replay.tensors(), self.replay.clock.errors
        return {**self.__dict__, "core": None, "replay": stored}  # a core holds the model

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["replay"] is not None:
            geometry, dtype, tensors, errors = state["replay"]
            # where the tensors are, which torch.load may have moved
            self.replay = self._alloc(len(tensors["counters.seqlen"]), geometry, dtype, errors.device)
            for name, tensor in self._replay.tensors().items():
                tensor.copy_(tensors[name])
            self._replay.clock.errors.copy_(errors)


class ReplayHybridLayer(ReplayLinearLayer, DynamicLayer):
    """The entry of a block that holds a mixer and full attention: keys and values beside the replay layer."""

    def __init__(self, options: Options, layer_idx: int, lockstep: Lockstep):
        DynamicLayer.__init__(self)
        ReplayLinearLayer.__init__(self, options, layer_idx, lockstep)

    lazy_initialization = DynamicLayer.lazy_initialization
    offload = DynamicLayer.offload
    prefetch = DynamicLayer.prefetch

    def crop(self, tokens_to_remove: int) -> None:
        ReplayLinearLayer.crop(self, tokens_to_remove)
        DynamicLayer.crop(self, tokens_to_remove)

    def align(self) -> None:
        """Take back keys and values of tokens that the replay layer has not had."""
        ahead = self.get_seq_length() - self.columns
        if ahead > 0:
            DynamicLayer.crop(self, -ahead)

    def reset(self) -> None:
        ReplayLinearLayer.reset(self)
        self.keys = self.values = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        ReplayLinearLayer.reorder_cache(self, beam_idx)
        DynamicLayer.reorder_cache(self, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        ReplayLinearLayer.reorder_cache(self, self._rows().repeat_interleave(repeats))
        DynamicLayer.batch_repeat_interleave(self, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        ReplayLinearLayer.reorder_cache(self, self._rows()[indices.to(self._rows().device)])
        DynamicLayer.batch_select_indices(self, indices)


class _Allocator(nn.Module):
    """Allocates the state of a mixer without holding it, so that a cache can be copied without its model."""

    def __init__(self, geometry: Geometry, dtype: torch.dtype):
        super().__init__()
        self.geometry, self.dtype = geometry, dtype

    def alloc_state(
        self,
        batch: int,
        *,
        window: int,
        step_tokens: int,
        max_seqlen: int | None,
        checkpoint: str,
        read_format: str | None,
        device: torch.device | str | None,
    ) -> LayerState:
        return LayerState(
            batch,
            self.geometry,
            window=window,
            step_tokens=step_tokens,
            checkpoint=checkpoint,
            read_format=read_format,
            dtype=self.dtype,
            device=device,
        )


def _mask_of(x: Tensor, mask: Tensor | None) -> Tensor:
    return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
