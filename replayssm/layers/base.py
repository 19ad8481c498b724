"""``ReplayLayer``: a layer is its projections; the recurrence is declared, and ``forward`` is shared and final."""

import os
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol, TypedDict, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from replayssm.cache.layer_state import Geometry, LayerState
from replayssm.cache.packing import Packing, masked
from replayssm.checks import expect, expect_device, expect_exists, expect_positive, expect_shape, refuse_grad
from replayssm.ops.records import Records, Recurrence
from replayssm.ops.scan import BACKENDS, Backend, Call, choose, expect_fla, scan

Layer = TypeVar("Layer", bound="ReplayLayer")


class Placement(TypedDict):
    """Where and in which dtype parameters are made."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class ReplayLayer(nn.Module):
    """Base of every replay layer. A subclass declares ``recurrence`` and writes ``project`` and ``emit``.

    ``layer(x)`` is the training path, with autograd; ``layer(x, state)`` continues the sequences held in ``state``.

    Args:
        nheads: value heads.
        headdim: value features of a head.
        d_state: key features of a head.
        ngroups: key heads; value head h reads key head h // (nheads // ngroups).
        d_model: features of ``x``; None does not check them.
        conv_channels: channels of the short convolution, 0 without one.
        d_conv: its width in tokens.
        scan_backend: what runs whole sequences, in training and in prefill: "torch", "fla" (flash-linear-attention, on
            a GPU) or "auto" (fla where it can take a call); see ``ops/scan.py``.

    Raises:
        ValueError: a size below 1, or nheads is not a multiple of ngroups.
        ImportError: scan_backend is "fla" and it is not installed.
    """

    recurrence: ClassVar[Recurrence]

    def __init__(
        self,
        *,
        nheads: int,
        headdim: int,
        d_state: int,
        ngroups: int,
        d_model: int | None = None,
        conv_channels: int = 0,
        d_conv: int = 1,
        scan_backend: Backend = "auto",
    ):
        name = type(self).__name__
        expect_positive(name, nheads=nheads, headdim=headdim, d_state=d_state, ngroups=ngroups, d_conv=d_conv)
        expect(
            nheads % ngroups == 0,
            f"{name}: nheads must be a multiple of ngroups={ngroups}; got {nheads}. Every group serves as many heads.",
        )
        expect_exists(name, "scan_backend", scan_backend, BACKENDS)
        if scan_backend == "fla":
            expect_fla(name)
        super().__init__()
        self.nheads, self.headdim, self.d_state, self.ngroups = nheads, headdim, d_state, ngroups
        self.d_model, self.conv_channels, self.d_conv = d_model, conv_channels, d_conv
        self.scan_backend: Backend = scan_backend
        self._geometry = Geometry(nheads, headdim, d_state, ngroups, conv_channels, d_conv, self.recurrence)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "forward" in cls.__dict__:
            raise TypeError(f"{cls.__name__}: forward is final in ReplayLayer; write project and emit instead.")

    @classmethod
    def from_pretrained(
        cls: type[Layer],
        name: str | os.PathLike[str],
        *,
        layer: int,
        revision: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Layer:
        """One layer of a checkpoint, in eval mode. Only its tensors are read.

        Args:
            name: a folder, "org/name" of a repository of the Hub, or "tiny"; see ``models.from_pretrained``.
            layer: index of the decoder layer in the checkpoint.
            revision: of a repository.
            device: None is the CPU.
            dtype: None is the config's, else the file's. A_log, dt_bias, D and norm weights keep the precision of the
                file where it is higher.

        Raises:
            ValueError: another kind of layer is there, or the file does not hold what the config says.
            FileNotFoundError, NotImplementedError: see ``models.from_pretrained``.
        """
        from replayssm.models.one_layer import load_layer  # upwards, and here only: families know the names in a file

        return load_layer(cls, name, layer, revision, device, dtype)

    def project(self, x: Tensor, conv_state: LayerState | None, mask: Tensor | None) -> tuple[Tensor, Records, Any]:
        """Turn inputs into read keys and records.

        Args:
            x: (batch, t, d_model), each row's real tokens first, zeros behind them.
            conv_state: goes to ``layers.conv.with_history``; None without a cache or without a convolution.
            mask: (batch, t) bool, real tokens; None if all are. What is returned elsewhere is ignored.

        Returns:
            q (batch, t, ngroups, d_state), records, and whatever ``emit`` needs.
        """
        raise NotImplementedError(f"{type(self).__name__}: project must be written by the subclass.")

    def emit(self, y: Tensor, extra: Any) -> Tensor:
        """(batch, t, nheads, headdim) and the extra of ``project`` -> (batch, t, d_model).

        y is fp32 or fp64; from a scan through fla it is in the dtype of v, in which the kernels store it: widen it
        before sums.
        """
        raise NotImplementedError(f"{type(self).__name__}: emit must be written by the subclass.")

    def limit(self, records: Records) -> Records:
        """Limits that hold in a scan (training, prefill) and not in a step; none by default."""
        return records

    def forward(
        self,
        x: Tensor,
        state: LayerState | None = None,
        *,
        attention_mask: Tensor | None = None,
        rows: Tensor | None = None,
        parents: Tensor | None = None,
    ) -> Tensor:
        """Run the layer over ``x``, alone or as a step on the sequences in ``state``.

        Args:
            x: (batch, t, d_model).
            state: the layer's part of a cache, ``cache[i]`` or ``cache.state_of(layer)``; without it nothing is kept.
            attention_mask: (batch, t), 1 = a token, padding on the left or right; a masked position is as if it were
                not there. None is all tokens.
            rows: (batch,) int, cache row of each row of x, -1 for off; None is all rows in order.
            parents: (t,) or (batch, t) int, the tokens are the nodes of a draft tree: the column of each node's parent,
                -1 for the last committed token. A node follows what is committed and its ancestors, and no other node;
                ``cache.commit`` then names a path. Needs t <= step_tokens and no attention_mask.

        Returns:
            (batch, t, d_model), dtype as the output projection gives it; exact zeros at masked positions and for rows
            that are off.

        Raises:
            ValueError: shapes, dtypes, devices or visible values that do not fit; the cache has not changed then.
            RuntimeError: gradients are enabled in a step with a state, or a second call before commit.
        """
        self._check_input(x, state, rows, parents)
        if state is None:
            return self._forward_whole(x, attention_mask)
        refuse_grad(f"{type(self).__name__}.forward", self, x)
        step = state.open_step(x.shape[1], rows, attention_mask, parents)
        q, records, extra = self.project(step.pack(x), state if self.conv_channels else None, step.valid)
        y = state.scan(q, self.limit(records), self.scan_backend) if step.scan else state.replay(q, records)
        return state.finish_step(self.emit(y, extra))

    def _forward_whole(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        packing = Packing.checked(f"{type(self).__name__}.forward", attention_mask, x)
        q, records, extra = self.project(packing.pack(x), None, packing.valid)
        records = Records(*(masked(field, packing.valid) for field in self.limit(records)))
        y, _ = scan(f"{type(self).__name__}.forward", q, records, None, self.recurrence, self.scan_backend)
        return packing.unpack(self.emit(y, extra))

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
        """The layer's part of a cache for ``batch`` rows; ``max_seqlen`` does not change its size."""
        largest = self._largest_parameter()
        return LayerState(
            batch,
            self._geometry,
            window=window,
            step_tokens=step_tokens,
            checkpoint=checkpoint,
            read_format=read_format,
            dtype=largest.dtype,
            device=largest.device if device is None else device,
        )

    def reset_parameters(self) -> None:
        """Draw all parameters afresh; a subclass with parameters of its own extends this."""
        for child in self.children():
            if isinstance(child, _Resettable):
                child.reset_parameters()

    def scan_runs_on(self, *, grad: bool = False) -> Literal["torch", "fla"]:
        """The backend that a scan of this layer takes, where its parameters are, in their dtype or autocast's.

        Args:
            grad: the scan is followed by a backward pass.

        Raises:
            ImportError, ValueError: ``scan_backend`` is "fla", which cannot take it.
        """
        largest = self._largest_parameter()
        dtype = largest.dtype
        if largest.is_cuda and torch.is_autocast_enabled("cuda") and dtype != torch.float64:
            dtype = torch.get_autocast_dtype("cuda")
        call = Call(largest.device, dtype, self.headdim, self.d_state, self.recurrence, grad)
        return choose(f"{type(self).__name__}.forward", call, self.scan_backend)

    def extra_repr(self) -> str:
        sizes: Mapping[str, int] = {
            name: getattr(self, name) for name in ("nheads", "headdim", "d_state", "ngroups", "d_conv")
        }
        backend = f"auto ({self.scan_runs_on()})" if self.scan_backend == "auto" else self.scan_backend
        return ", ".join(f"{name}={size}" for name, size in sizes.items()) + f", scan_backend={backend}"

    def _largest_parameter(self) -> Tensor:
        """Its dtype is the activations'; A_log and norm weights may be kept in a wider one."""
        largest = torch.empty(0)
        for parameter in self.parameters():
            if parameter.is_floating_point() and parameter.numel() >= largest.numel():
                largest = parameter
        return largest

    def _check_input(self, x: Tensor, state: LayerState | None, rows: Tensor | None, parents: Tensor | None) -> None:
        name = type(self).__name__
        where = f"{name}.forward"
        batch: int | str = "batch"
        if state is not None:
            if not isinstance(state, LayerState) or state.geometry != self._geometry:
                raise ValueError(
                    f"{where}: state must be this layer's part of a cache; got {type(state).__name__} of another "
                    "geometry or kind. Pass cache.state_of(layer)."
                )
            batch = state.clock.batch_of(where, rows)
            expect_device(where, "x", x, state.conv.device)
        elif rows is not None or parents is not None:
            raise ValueError(f"{where}: rows and parents must come with a state; got none. Pass cache.state_of(layer).")
        width: int | str = "d_model" if self.d_model is None else self.d_model
        if state is not None and x.ndim == 3 and x.shape[0] != batch:
            advice = f"The cache has {batch} rows: pass one row for each, or rows=."
        else:
            advice = (
                f"The layer was built with d_model={width}: project x first, or build the layer for these features."
            )
        expect_shape(where, "x", x, (batch, "t", width), advice)
        expect(x.shape[1] >= 1, f"{where}: x must have at least 1 token; got {tuple(x.shape)}. Skip the call instead.")
        largest = self._largest_parameter()
        if state is not None:
            expect(
                state.ring.v.dtype == largest.dtype,
                f"{where}: state must be in the layer's dtype {largest.dtype}; got {state.ring.v.dtype}. Build the "
                "cache after converting the layer.",
            )
        expect(
            x.is_floating_point() and (x.dtype == largest.dtype or torch.is_autocast_enabled(x.device.type)),
            f"{where}: x must have the layer's dtype {largest.dtype}; got {x.dtype}. Convert x, or call under "
            "torch.autocast.",
        )
        if state is not None and x.shape[1] > state.clock.step_tokens:
            self.scan_runs_on()  # a backend that cannot is refused before the step opens
        if state is None and not largest.is_meta:  # offloaded weights are on meta between calls
            expect_device(where, "x", x, largest.device)


@runtime_checkable
class _Resettable(Protocol):
    def reset_parameters(self) -> None: ...
