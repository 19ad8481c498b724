"""Where a scan chooses its backend: plain PyTorch, or flash-linear-attention's chunk kernels (the extra ``fla``).

"torch" runs everywhere and computes in fp32 or fp64. "fla" runs on a GPU in bf16 or fp16, and raises where it cannot
take a call. "auto" takes fla for every call that it can take, and torch for the rest: what is on a CPU, what is wider
than 16 bits (fla multiplies fp32 in TF32), and what is being traced by ``torch.compile``. It warns where only the
backward pass stands in the way.
"""

import re
import warnings
from importlib import metadata
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from replayssm.ops import chunked
from replayssm.ops.records import Records, Recurrence

Backend = Literal["auto", "torch", "fla"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
FLA_RELEASE = (0, 6)  # fla_scan.py calls functions below fla's public ones, which another release may rename
MOST_D_STATE = 256  # fla's delta rule keeps a whole key in one block
HOPPER = 9  # compute capability


class ScanBackendWarning(UserWarning):
    """``scan_backend="auto"`` took plain PyTorch for a call that fla could take but for its backward pass."""


class Call(NamedTuple):
    """What decides about a backend.

    Attributes:
        device: of all tensors.
        dtype: the widest of q, k and v; fp64 if anything is.
        headdim, d_state, recurrence: of the layer.
        grad: a backward pass may follow.
    """

    device: torch.device
    dtype: torch.dtype
    headdim: int
    d_state: int
    recurrence: Recurrence
    grad: bool


class Refusal(NamedTuple):
    """Why fla cannot take a call: what scan_backend="fla" needs, what came, and the remedy besides "torch"."""

    rule: str
    got: str
    remedy: str

    def __str__(self) -> str:
        return f"scan_backend='fla' must {self.rule}; got {self.got}. {self.remedy}, or use scan_backend='torch'."


def scan(
    where: str, q: Tensor, records: Records, state: Tensor | None, recurrence: Recurrence, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Run a whole sequence through the recurrence on the backend that was asked for.

    Args:
        where: names the caller in errors.
        q, records, state, recurrence: as ``chunked.scan`` takes them.
        backend: a layer's ``scan_backend``.

    Returns:
        Outputs (batch, t, nheads, headdim), fp32 or fp64 from torch, in the dtype of v from fla; the final state
        (batch, nheads, headdim, d_state), fp32 or fp64.

    Raises:
        ImportError: backend is "fla" and it is not installed.
        ValueError: backend is "fla" and it cannot take this call.
    """
    tensors = (q, *records) if state is None else (q, *records, state)
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    dtype = torch.promote_types(torch.promote_types(q.dtype, records.k.dtype), records.v.dtype)
    if chunked.compute_dtype(*tensors) == torch.float64:
        dtype = torch.float64
    call = Call(records.v.device, dtype, records.v.shape[-1], records.k.shape[-1], recurrence, grad)
    if choose(where, call, backend) == "torch":
        return chunked.scan(q, records, state, recurrence)
    from replayssm.ops import fla_scan  # imports triton, and takes seconds

    return fla_scan.scan(q, records, state, recurrence, grad=grad)


def choose(where: str, call: Call, backend: Backend) -> Literal["torch", "fla"]:
    """The backend that takes a call.

    Raises:
        ImportError, ValueError: as ``scan``.
    """
    if backend == "torch":
        return "torch"
    if backend == "fla":
        expect_fla(where)
        refusal = refusal_of(call)
        if refusal is not None:
            raise ValueError(f"{where}: {refusal}")
        return "fla"
    if call.device.type != "cuda" or torch.compiler.is_compiling() or not _installed():
        return "torch"
    refusal = refusal_of(call)
    if refusal is None:
        return "fla"
    if call.grad and refusal_of(call._replace(grad=False)) is None:
        warnings.warn(
            f"scan_backend='auto' of {where} takes plain PyTorch where gradients are needed: {refusal}",
            ScanBackendWarning,
            stacklevel=2,
        )
    return "torch"


def expect_fla(where: str) -> None:
    """Raise ImportError unless the release of flash-linear-attention that ``fla_scan`` is written for is installed."""
    if not _installed():
        wanted = ".".join(str(part) for part in FLA_RELEASE)
        raise ImportError(
            f"{where}: scan_backend='fla' must find fla-core {wanted}; got {FLA_VERSION or 'none installed'}. "
            "Run pip install 'replayssm[fla]', or use scan_backend='torch'."
        )


def refusal_of(call: Call) -> Refusal | None:
    """Why an installed flash-linear-attention cannot take a call, or None if it can."""
    if call.device.type != "cuda":
        return Refusal("get tensors on a CUDA device", str(call.device), "Move the layer and its inputs to a GPU")
    if call.dtype not in (torch.bfloat16, torch.float16):
        return Refusal("get q, k and v in bfloat16 or float16", str(call.dtype), "Convert the layer or use autocast")
    if call.recurrence.decay == "channel" and not call.recurrence.delta:
        return Refusal("have a decay per head or the delta rule", str(call.recurrence), "Declare another recurrence")
    if call.recurrence.delta and call.d_state > MOST_D_STATE:
        return Refusal(f"have d_state <= {MOST_D_STATE}", str(call.d_state), "Build the layer with smaller keys")
    if (
        call.headdim % 2 or call.d_state % 2
    ):  # triton reads 16-bit rows of odd length beyond their end (fla's chunk_o.py)
        sizes = f"headdim={call.headdim} and d_state={call.d_state}"
        return Refusal("have an even headdim and d_state", sizes, "Build the layer with even sizes")
    by_head = call.recurrence.decay == "head"
    if call.grad and by_head and _backward_is_wrong(torch.cuda.get_device_capability(call.device), TRITON_VERSION):
        rule = "run on triton below 3.4.0 or from 3.7.1 for a backward pass on Hopper, where others compute it wrongly"
        return Refusal(rule, f"triton {TRITON_VERSION}", "Install such a triton")
    return None


def _installed() -> bool:
    return FLA_VERSION is not None and _release(FLA_VERSION)[:2] == FLA_RELEASE


def _backward_is_wrong(capability: tuple[int, int], triton: str | None) -> bool:
    """Whether this triton miscompiles fla's backward pass for a decay per head, which fla then refuses (its #640)."""
    return capability[0] == HOPPER and triton is not None and (3, 4, 0) <= _release(triton) < (3, 7, 1)


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "3.6.0+git1" -> (3, 6, 0)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


# asked once, without importing either: a look at the disk in every call would cost more than a short scan
FLA_VERSION = _version("fla-core")
TRITON_VERSION = _version("triton")
