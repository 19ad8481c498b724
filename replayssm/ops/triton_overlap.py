"""Two launches side by side: the second begins once every program of the first has begun.

CUDA calls it programmatic dependent launch. The first is launched as usual, so all that came before it has ended by
then; what it writes itself the second must not read. Whatever comes after the second waits for both.
"""

import triton
import triton.language as tl
from triton import knobs
from triton.language.target_info import cuda_capability_geq
from triton.runtime.jit import constexpr_function


@constexpr_function
def overlaps() -> bool:
    """Whether the target has it; elsewhere the second launch waits."""
    return not knobs.runtime.interpret and cuda_capability_geq(9)


def beside() -> dict[str, bool]:
    """Options of the second launch."""
    return {"launch_pdl": True} if overlaps() else {}


@triton.jit
def let_next_begin() -> None:
    """In every program of the first launch."""
    if overlaps():
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def end_after_last() -> None:
    """At the end of every program of the second launch."""
    if overlaps():  # noqa: SIM102 - known when it is compiled
        if tl.program_id(0) == 0:  # one that waits is enough
            tl.extra.cuda.gdc_wait()
