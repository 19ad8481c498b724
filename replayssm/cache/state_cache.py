"""``ReplayStateCache``: all memory that decoding needs, the two counters of every row, and commit."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from replayssm.cache import auto_window
from replayssm.cache.arguments import (
    Window,
    check_arguments,
    device_of,
    listed,
    listed_rows,
    seeds_of,
    stateful_modules,
)
from replayssm.cache.kept import check_kept, count_kept
from replayssm.cache.layer_state import LayerState
from replayssm.cache.ring import keep_path
from replayssm.cache.step import ERRORS, Clock, ModuleState, StatefulModule, Step
from replayssm.cache.stored_state import expect_runnable
from replayssm.checks import expect, expect_integers, expect_shape, readable
from replayssm.ops import decode

RowIndex = int | Sequence[int] | Tensor


class ReplayStateCache:
    """The states of every stateful module of a model, for ``batch`` sequences.

    One model call opens a step, ``commit`` closes it::

        cache = ReplayStateCache(model, batch=4)
        with torch.no_grad():
            logits = model(prompt, cache)
            cache.commit()
            logits = model(next_tokens, cache)
            cache.commit()  # or commit(n): keep n of the new tokens of each row, roll the rest back

    Args:
        model: a module, or a list of layers; every submodule with ``alloc_state`` gets a state.
        batch: rows, one a sequence.
        window: most committed records between flushes; 0 folds at every step (the conventional traffic), any other
            value must be at least ``step_tokens``. "auto" chooses from shapes, 0 where replay does not pay.
        step_tokens: most new tokens a step may bring without becoming a scan.
        max_seqlen: most real tokens a row; needed by full attention.
        checkpoint: how the recurrent state is stored: "fp32" (fp64 in an fp64 layer), or in fewer bits, rounded
            stochastically: "fp16_sr", "bf16_sr", "int16_sr", "int8_sr", "fp8_sr", "nvfp4_sr" (see
            ``cache/checkpoint.py``).
        read_format: what steps read that do not flush: None is the checkpoint itself; "bf16", "fp8", "int8", "nvfp4",
            "lr_if4" a smaller copy of it (see ``cache/formats``), which the recurrence never sees.
        backend: what decoding runs on: "torch", "triton" (kernels, on a GPU) or "auto" (triton on a GPU, else torch).
        seed: int or (batch,) int tensor, the random stream of each sequence; it moves with the row.
        device: where to allocate; None is each module's own device.

    Attributes:
        backend: "torch" or "triton", as chosen where "auto" was asked for.

    Raises:
        ValueError: an argument is out of range, or a row's ring is too large for kernels.
        RuntimeError: backend is "triton" where it cannot run.
        NotImplementedError: a format or backend that does not exist, or a format that the backend or the device cannot
            run; the text lists those that do.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        batch: int,
        *,
        window: Window = 16,
        step_tokens: int = 1,
        max_seqlen: int | None = None,
        checkpoint: str = "fp32",
        read_format: str | None = None,
        backend: str = "auto",
        seed: int | Tensor = 0,
        device: torch.device | str | None = None,
    ):
        check_arguments(batch, window, step_tokens, max_seqlen, checkpoint, read_format)
        model = listed(model)
        modules = dict(stateful_modules(model))
        on_device = torch.device(device) if device is not None else device_of(model)
        self.batch = batch
        self.backend = decode.choose("ReplayStateCache", backend, on_device)
        expect_runnable("ReplayStateCache", checkpoint, read_format, on_device)
        self._states: list[ModuleState] = []
        # found by order and never held: a deep copy of the cache serves the same model
        self._order: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

        def alloc(module: StatefulModule, window: int, device: torch.device | str | None) -> ModuleState:
            return module.alloc_state(
                batch,
                window=window,
                step_tokens=step_tokens,
                max_seqlen=max_seqlen,
                checkpoint=checkpoint,
                read_format=read_format,
                device=device,
            )

        with torch.inference_mode(False):  # a cache made in inference mode may be used outside it
            if isinstance(window, str):
                states = [alloc(module, step_tokens, "meta") for module in modules.values()]
                sizes = [auto_window.LayerBytes.of(state) for state in states if isinstance(state, LayerState)]
                window = auto_window.choose(self.backend, batch, step_tokens, sizes)
            self.clock = Clock(seeds_of(seed, batch, on_device), window, step_tokens, max_seqlen)
            for name, module in modules.items():
                state = alloc(module, window, device)
                state.clock, state.name = self.clock, name
                if isinstance(state, LayerState):
                    state.use(self.backend)
                    state.index = len(self.layers)
                assert isinstance(module, nn.Module)
                self._order[module] = len(self._states)
                self._states.append(state)

    @property
    def seqlen(self) -> Tensor:
        """(batch,) int64 on the device: tokens committed. Read it, do not write it."""
        return self.clock.seqlen

    @property
    def flushed(self) -> Tensor:
        """(batch,) int64 on the device: tokens inside the checkpoint. Read it, do not write it."""
        return self.clock.flushed

    @property
    def seed(self) -> Tensor:
        """(batch,) int64 on the device: the random stream of each row. Give it to ``reset``, do not write it."""
        return self.clock.seed

    @property
    def window(self) -> int:
        """Most committed records between flushes, as chosen where "auto" was asked for."""
        return self.clock.window

    @property
    def step_tokens(self) -> int:
        """Most new tokens of a step that is not a scan."""
        return self.clock.step_tokens

    @property
    def max_seqlen(self) -> int | None:
        """Most real tokens of a row, or None without a limit."""
        return self.clock.max_seqlen

    def __getitem__(self, index: int) -> LayerState:
        """The state of the index-th replay layer, in module order."""
        return self.layers[index]

    @property
    def layers(self) -> list[LayerState]:
        """The states of the replay layers, in module order."""
        return [state for state in self._states if isinstance(state, LayerState)]

    def state_of(self, module: nn.Module) -> ModuleState:
        """The state of a stateful module of the model that the cache was built for."""
        index = self._order.get(module)
        if index is None:
            raise ValueError(
                f"ReplayStateCache.state_of: module must be a stateful module of the model that the cache was built "
                f"for; got another {type(module).__name__}. Build a cache for this model."
            )
        return self._states[index]

    def open_step(
        self,
        t: int,
        rows: Tensor | None = None,
        attention_mask: Tensor | None = None,
        parents: Tensor | None = None,
    ) -> Step:
        """Open a step for a model without stateful modules; others open it by calling their modules."""
        self.clock.refuse_open("ReplayStateCache.open_step")
        return self.clock.open("ReplayStateCache.open_step", t, rows, attention_mask, parents)

    def commit(self, n: int | Tensor | None = None, path: Tensor | None = None) -> None:
        """Close the open step: keep the first n new tokens of each row, roll back the rest by not advancing.

        Args:
            n: None keeps every real token; an int, or (rows of the step,) int tensor, 0 .. real new tokens of the
                row. Entries of rows that are off are ignored (a CPU tensor must hold 0 there). After a step of more
                than step_tokens tokens only None is legal. A count in a device tensor is never read: out of range, it
                is clamped and ``check`` reports it.
            path: (rows of the step, most kept) int, after a step with parents, which needs it unless n is the int 0:
                the columns of the nodes to keep, from the root, each the child of the one before it. The first n of
                each row count, with n=None all of them. On a device a path is cut where it leaves the tree, and
                ``check`` reports it.

        Raises:
            RuntimeError: no step is open, or a module has not been called in it.
            ValueError: n or path can be seen to be wrong; nothing has changed then.
        Cost: with a path, what each module keeps of as many tokens as it has columns is read and written once.
        """
        if self.clock.step is None:
            raise RuntimeError(
                "ReplayStateCache.commit: commit must follow a step; got no open step. Call the model first."
            )
        missing = [state.name for state in self._states if not state.finished]
        if missing:
            raise RuntimeError(
                f"ReplayStateCache.commit: every stateful module must be called in a step and come to its end; got no "
                f"finished call of {', '.join(missing)}. If the step failed half way, only cache.reset() is left."
            )
        check_kept(self.clock, n, path)
        device = self.seqlen.device
        n = n.to(device) if isinstance(n, Tensor) else n
        path = path.to(device).long() if path is not None else None
        kept = count_kept(self.clock, n, path)
        if path is not None:
            nodes = self.clock.step.put(path)
            for rings in [group for state in self._states for group in state.rings()]:
                keep_path(rings, self.seqlen, nodes, kept)
        self.clock.close(kept)
        for state in self._states:
            state.leave_step()

    def reset(self, rows: RowIndex | None = None, seed: int | Tensor | None = None) -> None:
        """Start the given rows afresh, all of them if None; for all rows also after a step that failed.

        Args:
            rows: an int, a list or an int tensor of cache rows.
            seed: random streams of these rows; None keeps the ones they have.
        """
        if rows is not None:
            self.clock.refuse_open("ReplayStateCache.reset (of some rows)")
        index = self._index("reset", "rows", rows)
        if seed is not None:
            self.seed.index_copy_(0, index, seeds_of(seed, len(index), self.seed.device))
        for name, tensor in self.tensors().items():
            if name != "counters.seed":
                tensor.index_fill_(0, index.to(tensor.device), 0)
        if rows is None:
            self.clock.errors.zero_()
            self.clock.step = None
            for state in self._states:
                state.leave_step()

    def flush(self, rows: RowIndex | None = None) -> None:
        """Fold all pending records of the given rows, all rows if None, into their checkpoints now.

        Always legal between steps; it changes nothing but rounding.
        """
        self.clock.refuse_open("ReplayStateCache.flush")
        which = torch.zeros(self.batch, dtype=torch.bool, device=self.seqlen.device)
        which[self._index("flush", "rows", rows)] = True
        which = which.logical_and(self.seqlen > self.flushed)
        for state in self._states:
            state.fold(which)
        self.flushed.copy_(torch.where(which, self.seqlen, self.flushed))

    def reorder(self, index: Tensor) -> None:
        """Row i becomes a copy of row index[i], pending records included; index is (batch,) int, repeats are legal."""
        self.clock.refuse_open("ReplayStateCache.reorder")
        advice = "Give one source row for each row of the cache."
        expect_shape("ReplayStateCache.reorder", "index", index, (self.batch,), advice)
        index = self._index("reorder", "index", index)
        for tensor in self.tensors().values():
            tensor.copy_(tensor.index_select(0, index.to(tensor.device)))

    def copy_rows(self, src: RowIndex, dst: RowIndex) -> None:
        """Copy rows ``src`` over rows ``dst``, pending records included; all sources are read before any is written.

        Raises:
            ValueError: different numbers of rows, a row outside the cache, or a row twice in ``dst``.
        """
        self.clock.refuse_open("ReplayStateCache.copy_rows")
        source, target = self._index("copy_rows", "src", src), self._index("copy_rows", "dst", dst, distinct=True)
        expect(
            len(source) == len(target),
            f"ReplayStateCache.copy_rows: src and dst must name as many rows; got {len(source)} and {len(target)}. "
            "Give one source for each target.",
        )
        for tensor in self.tensors().values():
            on = tensor.device
            tensor.index_copy_(0, target.to(on), tensor.index_select(0, source.to(on)))

    def check(self) -> None:
        """Raise if a value that lay on the device turned out to be wrong, or a stored state is not finite.

        Waits for the device, and reads all checkpoints.

        Raises:
            RuntimeError: names what was wrong. The flags stay set until ``reset()`` of all rows.
        """
        found = [text for text, is_set in zip(ERRORS, self.clock.errors.tolist(), strict=True) if is_set]
        found += [f"{layer.name}: {fault}" for layer in self.layers for fault in layer.stored.faults()]
        if found:
            raise RuntimeError(f"ReplayStateCache.check: {'; '.join(found)}. Correct the caller and reset the cache.")

    def tensors(self) -> dict[str, Tensor]:
        """Everything that belongs to a row: name -> tensor, cache row first."""
        counters = {"counters.seqlen": self.seqlen, "counters.flushed": self.flushed, "counters.seed": self.seed}
        return counters | {f"{s.name}.{name}": x for s in self._states for name, x in s.tensors().items()}

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the cache holds."""
        return sum(self.nbytes_by_part.values())

    @property
    def nbytes_by_part(self) -> dict[str, int]:
        """Bytes by part: checkpoint, copy, ring, conv, kv, counters, as far as the model has them."""
        parts = {"counters": sum(x.nbytes for x in (self.seqlen, self.flushed, self.seed, self.clock.errors))}
        for state in self._states:
            for name, tensor in state.tensors().items():
                part = name.split(".")[0]
                parts[part] = parts.get(part, 0) + tensor.nbytes
        return parts

    @classmethod
    def estimate(
        cls,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, Any],
        batch: int,
        *,
        window: Window = 16,
        step_tokens: int = 1,
        max_seqlen: int | None = None,
        checkpoint: str = "fp32",
        read_format: str | None = None,
        backend: str = "auto",
        seed: int | Tensor = 0,
        device: torch.device | str | None = None,
    ) -> dict[str, int]:
        """Bytes that a cache would hold, by part as in ``nbytes_by_part`` and in "total"; allocates nothing.

        Args:
            model: a module, a list of layers, or a ``HybridLM``'s config. The seed does not change the size.
            device: where the cache would lie, from which backend "auto" follows; None is where the model is.
        """
        if isinstance(model, Mapping):
            from replayssm.models import HybridLM  # a config names layers, which only the models know

            modules: nn.Module | list[nn.Module] = HybridLM(dict(model), device="meta")
        else:
            modules = listed(model)
        if backend == "auto":
            backend = decode.automatic(torch.device(device) if device is not None else device_of(modules))
        cache = cls(
            modules,
            batch,
            window=window,
            step_tokens=step_tokens,
            max_seqlen=max_seqlen,
            checkpoint=checkpoint,
            read_format=read_format,
            backend=backend,
            seed=seed,
            device="meta",
        )
        return cache.nbytes_by_part | {"total": cache.nbytes}

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReplayStateCache":
        self.clock.refuse_open("ReplayStateCache: deepcopy")
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        with torch.inference_mode(False):  # a copy made in inference mode may be used outside it
            for name, value in self.__dict__.items():
                setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    def __getstate__(self) -> None:
        raise TypeError(
            "ReplayStateCache: a cache must not be pickled, or copied by copy.copy: it belongs to the modules of a "
            "live model. Copy it by copy.deepcopy. To keep it, save its tensors(), and copy_ them into those of a "
            "cache that was built with the same arguments."
        )

    def _index(self, method: str, name: str, rows: RowIndex | None, *, distinct: bool = False) -> Tensor:
        """Rows as an int64 tensor on the device, checked where the values can be seen."""
        where, device = f"ReplayStateCache.{method}", self.seqlen.device
        if rows is None:
            return torch.arange(self.batch, device=device)
        index = rows if isinstance(rows, Tensor) else listed_rows(where, name, rows)
        if index.numel() == 0:
            return torch.zeros(0, dtype=torch.int64, device=device)
        expect_integers(where, name, index)
        expect_shape(where, name, index, ("rows",), "Give cache rows.")
        if readable(index):
            expect(
                bool(((index >= 0) & (index < self.batch)).all()),
                f"{where}: {name} must be cache rows 0 .. {self.batch - 1}; got {index.tolist()}. Leave out others.",
            )
            expect(
                not distinct or len(index.unique()) == len(index),
                f"{where}: {name} must name each row once; got {index.tolist()}. Give one source for each target.",
            )
        return index.to(device=device, dtype=torch.int64)
