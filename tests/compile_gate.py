"""Compiles every kernel for a GPU that need not be there: python tests/compile_gate.py sm_90 | sm_100 | gfx942

The launchers run on meta tensors under a driver that only names the target, and each launch becomes a warm-up: so what
is compiled is what they would launch, with the arguments that they would pass. Prints one JSON line a kernel. It needs
a process of its own, without TRITON_INTERPRET: some errors of a backend end the process.
"""

import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from replayssm.bench.cases import CASES, Case
from replayssm.cache.stored_state import StoredState
from replayssm.ops import triton_decode, triton_states, triton_store
from replayssm.ops.chunked import CHUNK
from replayssm.ops.records import Records

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
WINDOW, DRAFTED, PROMPT = 16, 4, 8192
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MAMBA2, GDN, KDA = (case.recurrence for case in CASES)
# sizes that are no power of two, a narrow and a wide state, 3 and 12 heads a group, every dtype of a layer
ODD = (
    (Case("mamba2", "odd", 12, 40, 24, 1, MAMBA2), FP64),
    (Case("gdn", "odd", 12, 80, 64, 1, GDN), FP32),
    (Case("kda", "odd", 6, 80, 256, 2, KDA), BF16),
)


# checkpoint and read format: of the published geometries, and of odd ones
FORMATS = ("fp16_sr", "nvfp4"), ("fp32", "lr_if4"), ("int8_sr", "fp8")
ODD_FORMATS = ("nvfp4_sr", "int8"), ("int16_sr", None)


class Driver:
    """As much of a driver as compiling asks for."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class Launches:
    """While it is entered, a launch compiles its kernel, and does no more."""

    def __init__(self) -> None:
        self._kernels: list[tuple[str, Any]] = []

    def __enter__(self) -> "Launches":
        self._run = run = JITFunction.run
        kernels = self._kernels

        def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            kernels.append((kernel.fn.__name__, run(kernel, *args, grid=grid, warmup=True, **options)))

        JITFunction.run = compile_only
        return self

    def __exit__(self, *error: object) -> None:
        JITFunction.run = self._run

    def take(self) -> list[tuple[str, Any]]:
        """Name and compiled kernel of each launch since the last call."""
        taken, self._kernels[:] = list(self._kernels), []
        return taken


class Cached(NamedTuple):
    """Arguments that a step has in common whatever its states are kept in, on meta."""

    q: torch.Tensor
    records: Records
    ring: Records
    u: torch.Tensor | None
    due: torch.Tensor
    counts: torch.Tensor
    named: dict[str, torch.Tensor | None]
    shape: tuple[int, ...]


def arguments(case: Case, batch: int, t: int, dtype: torch.dtype, every_row: bool) -> Cached:
    """Of a step of t new tokens; with ``every_row`` off the call names its rows and their lengths."""
    nheads, headdim, d_state, ngroups = case.nheads, case.headdim, case.d_state, case.ngroups
    wide = FP64 if dtype == FP64 else FP32

    def meta(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(batch, *shape, dtype=dtype, device="meta")

    def records(tokens: int) -> Records:
        return Records(
            k=meta(tokens, ngroups, d_state),
            v=meta(tokens, nheads, headdim),
            g=meta(tokens, nheads, case.recurrence.decay_width(d_state), dtype=wide),
            beta=meta(tokens, nheads, dtype=wide),
        )

    slots = WINDOW + (1 if every_row else DRAFTED)  # of a cache with step_tokens 1, or with room for drafts
    u = meta(slots, nheads, headdim, dtype=wide) if case.recurrence.delta else None
    counts = meta(dtype=torch.int64)
    named = dict(rows=None, length=None) if every_row else dict(rows=counts, length=counts)
    return Cached(
        meta(t, ngroups, d_state), records(t), records(slots), u, meta(dtype=torch.bool), counts, named,
        (batch, nheads, headdim, d_state),
    )  # fmt: skip


def launch(case: Case, batch: int, t: int, dtype: torch.dtype, every_row: bool) -> None:
    """A step, and a flush."""
    q, records, ring, u, due, counts, named, shape = arguments(case, batch, t, dtype, every_row)
    checkpoint = torch.empty(shape, dtype=ring.beta.dtype, device="meta")
    triton_decode.replay(
        q, records, checkpoint, ring, u, due, counts, counts, recurrence=case.recurrence, **named
    )  # fmt: skip
    triton_decode.flush(due, checkpoint, ring, counts, counts, recurrence=case.recurrence)


def in_formats(checkpoint: str, read_format: str | None) -> Callable[..., None]:
    """The launcher of a step where states are kept in formats; some rows flush, and the others read."""
    return functools.partial(launch_stored, checkpoint=checkpoint, read_format=read_format)


def launch_stored(
    case: Case, batch: int, t: int, dtype: torch.dtype, every_row: bool, *, checkpoint: str, read_format: str | None
) -> None:
    """As ``launch``, where states are kept in formats."""
    q, records, ring, u, due, counts, named, shape = arguments(case, batch, t, dtype, every_row)
    states = StoredState(checkpoint, read_format, shape, torch.float32, "meta")
    copies = () if states.copy is None else states.copy.planes
    settings = dict(layer=1, checkpoint=checkpoint, read_format=read_format, recurrence=case.recurrence)
    rest = states.checkpoint.planes, copies, ring, u, due, counts, counts, counts
    triton_store.replay(q, records, *rest, **settings, **named)
    if case is CASES[0]:
        triton_store.store(None, *rest, **settings)  # a flush alone


def launch_scan(case: Case, batch: int, t: int, dtype: torch.dtype, every_row: bool) -> None:
    """The states of a prompt of t tokens; with ``every_row`` off, v as it leaves a convolution and an initial state."""
    heads = case.nheads, case.headdim

    def meta(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
        return torch.empty(batch, *shape, dtype=dtype, device="meta")

    k, v = meta(t, case.ngroups, case.d_state, dtype=dtype), meta(t, *heads, dtype=dtype)
    initial = None if every_row else meta(*heads, case.d_state)
    if not every_row:
        v = meta(*heads, t, dtype=dtype).movedim(3, 1)
    triton_states.chunk_states(k, v, meta(t, case.nheads), meta(t, case.nheads), initial, CHUNK)


def launches(target: str) -> Iterator[tuple[Callable[..., None], Case, int, int, torch.dtype, bool]]:
    """A launcher and its arguments: the published geometries, on sm_90 at several batches, and the odd ones."""
    for case in CASES:
        for batch in (1, 32, 256) if target == "sm_90" else (32,):
            yield launch, case, batch, 1, BF16, True
        if target != "gfx942" or not case.recurrence.delta:  # minutes; the odd ones are of the same kernels
            yield launch, case, 32, DRAFTED, BF16, True
    for case, dtype in ODD:
        for t in (1, DRAFTED):
            yield launch, case, 3, t, dtype, False
    for case, formats in zip(CASES, FORMATS, strict=True):
        yield in_formats(*formats), case, 32, 1, BF16, True
    for (case, _), formats in zip(ODD, ODD_FORMATS, strict=False):
        yield in_formats(*formats), case, 3, DRAFTED, FP32, False
    yield launch_scan, CASES[0], 1, PROMPT, BF16, True
    for t in (PROMPT, PROMPT - 1):
        yield launch_scan, CASES[0], 1, t, BF16, False
    yield launch_scan, ODD[0][0], 3, PROMPT - 1, FP16, False


def resources(kernel: Any) -> dict[str, Any]:
    """Bytes of stack and of shared memory, registers of a thread, and whether products are rounded to TF32; on NVIDIA's
    targets also how many instructions the kernel has.

    Three passes that make up for the rounding may be asked for ("tf32x3"); they multiply in threes, tiles in powers of
    two.
    """
    code = kernel.asm["amdgcn" if "amdgcn" in kernel.asm else "ptx"]
    asked = set(re.findall(r"inputPrecision = (\w+)", kernel.asm["ttir"]))
    products = len(re.findall(r"mma\S*tf32|mfma\S*xf32", code))
    tf32 = "tf32" in asked or (products > 0 and "tf32x3" not in asked) or products % 3 > 0
    found = dict(shared=kernel.metadata.shared, tf32=tf32)
    if "amdgcn" in kernel.asm:
        fields = ("private_segment_fixed_size", "vgpr_count")
        stack, registers = (int(re.search(rf"\.{name}:\s*(\d+)", code)[1]) for name in fields)
        return found | dict(stack=stack, registers=registers)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", said).groups())
    instructions = len(re.findall(r"/\*[0-9a-f]{4,}\*/ .*;", said))
    return found | dict(stack=stack, registers=registers, instructions=instructions)


def main(target: str) -> None:
    """Print what each distinct kernel takes."""
    driver.set_active(Driver(TARGETS[target]))
    if TARGETS[target].backend == "hip":
        torch.version.hip = "for AMD"  # by which launchers know where they are
    seen = set()
    with Launches() as made:
        for launcher, case, batch, t, dtype, every_row in launches(target):
            launcher(case, batch, t, dtype, every_row)
            for name, kernel in made.take():
                if kernel.hash not in seen:
                    seen.add(kernel.hash)
                    sizes = dict(layer=case.layer, geometry=case.geometry, batch=batch, t=t, dtype=str(dtype))
                    sizes |= getattr(launcher, "keywords", {})
                    print(json.dumps(dict(kernel=name, **sizes, **resources(kernel))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
