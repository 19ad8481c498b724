"""The traffic of decoding, counted rather than measured: bytes of state and records that a step cannot avoid moving.

Conventional decoding reads and writes the whole state for every token. Replay reads it for every token, writes it once
a window, and reads the records of the window so far instead. ``conventional_traffic`` and ``replay_traffic`` count
state and records alone; ``conventional_step`` and ``replay_step`` count all that kernels move for one layer, and
``predicted_us`` makes a time of that.
"""

import re
from typing import NamedTuple

from replayssm import ReplayStateCache
from replayssm.cache.auto_window import LayerBytes
from replayssm.cache.step import Clock


class StateBytes(NamedTuple):
    """What all replay layers of a model keep for one sequence, in bytes."""

    state: int
    record: int  # of one token
    copy: int = 0  # that steps read instead of the state; 0 where they read the state
    narrowed: int = 0  # what the checkpoint's format saves of a state in the dtype of its sums


class Traffic(NamedTuple):
    """Bytes a token and sequence, averaged over a window."""

    read: int
    written: int
    decays: int = 0  # numbers, not bytes: log decays of the records that are folded

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


def state_bytes(cache: ReplayStateCache) -> StateBytes:
    """State and record sizes of the model that ``cache`` serves; zeros for a model without replay layers."""
    layers = [LayerBytes.of(layer) for layer in cache.layers]
    return StateBytes(
        state=sum(layer.state for layer in layers),
        record=sum(layer.record for layer in layers),
        copy=sum(layer.copy for layer in layers),
        narrowed=sum(layer.narrowed for layer in layers),
    )


def conventional_traffic(sizes: StateBytes) -> Traffic:
    """One token at a time without records: the state comes in and goes out, in the dtype of its sums."""
    wide = sizes.state + sizes.narrowed
    return Traffic(read=wide, written=wide)


def replay_traffic(sizes: StateBytes, window: int) -> Traffic:
    """One token a step with a window of ``window`` records.

    The steps of one window find 1, 2, ... window committed records; the last of them folds these into the state and
    starts the next window. It reads the state itself and writes state and copy; the others read the copy, where there
    is one. Every step writes one record. Windows 0 and 1 both fold at every step.
    """
    period = max(window, 1)
    state = (sizes.state + (period - 1) * (sizes.copy or sizes.state)) // period
    return Traffic(
        read=state + sizes.record * (period + 1) // 2,
        written=(sizes.state + sizes.copy) // period + sizes.record,
    )


def conventional_step(layer: LayerBytes, step_tokens: int = 1) -> Traffic:
    """Bytes of one layer, sequence and step without records: inputs and outputs, and the state out for every token.

    The state is in the dtype of its sums: fewer bits, rounded at every token, would lose more than once a window.

    A step of several tokens leaves a state behind each of them, to which rejected drafts go back.
    """
    return Traffic(
        read=layer.wide_state + step_tokens * (layer.q + layer.record),
        written=step_tokens * (layer.wide_state + layer.y),
    )


def replay_step(layer: LayerBytes, window: int, step_tokens: int = 1, kept: int | None = None) -> Traffic:
    """Bytes of one layer, sequence and step of the kernels, averaged over a window.

    The steps of a window find K, 2 K, ... records, K = ``kept``, tokens of a step that stay (None: all of them). The
    last of them reads what it finds as records and folds it; the others read live records, which for delta rules hold
    u in place of v and beta.
    """
    kept = step_tokens if kept is None else kept
    steps = steps_of_window(window, step_tokens, kept)
    live = kept * steps * (steps - 1) // 2  # records, summed over the steps that do not flush
    new = step_tokens * (layer.q + layer.record)
    return Traffic(
        read=(layer.state + (steps - 1) * layer.read + live * layer.live_record) // steps + kept * layer.record + new,
        written=(layer.state + layer.copy) // steps + step_tokens * (layer.record + layer.u + layer.y),
        decays=kept * layer.g // 4,
    )


def steps_of_window(window: int, step_tokens: int = 1, kept: int = 1) -> int:
    """How many steps lie between two flushes of a row that keeps ``kept`` of ``step_tokens`` tokens a step.

    The first of them finds ``kept`` records; the last is the first one that has no room for all of its tokens.
    """
    return max((window - step_tokens) // kept + 1, 1)


def replay_memory(layer: LayerBytes, window: int, step_tokens: int = 1) -> int:
    """Bytes that one layer keeps for a sequence: the state, its copy, and a ring of the live records and new tokens."""
    return layer.state + layer.copy + Clock.slots_for(window, step_tokens) * (layer.record + layer.u)


def native_memory(layer: LayerBytes, step_tokens: int = 1) -> int:
    """Bytes that one layer keeps for a sequence without records: a state for each token that a step may go back to."""
    return step_tokens * layer.wide_state


class Gpu(NamedTuple):
    """What the model knows of a GPU: bandwidth as a streaming sum reads it, memory as the driver shows it."""

    name: str
    memory_gib: int
    datasheet_tb_s: float
    measured_tb_s: float | None = None

    @property
    def read_tb_s(self) -> float:
        """The ceiling of reads: measured, else the datasheet's bandwidth times ``OF_DATASHEET``."""
        return self.measured_tb_s or self.datasheet_tb_s * OF_DATASHEET


OF_DATASHEET = 4.64 / 4.8  # of the H200, the one GPU whose ceiling was measured
GPUS = (
    Gpu("H200", 139, 4.8, measured_tb_s=4.64),
    Gpu("H100", 79, 3.35),
    Gpu("B200", 178, 8.0),
    Gpu("A100 80GB", 79, 2.04),
    Gpu("MI300X", 191, 5.3),
    Gpu("L40S", 44, 0.864),
    Gpu("RTX 4090", 23, 1.008),
)
# Shares of the ceiling, and the fixed cost of a layer's step. From an H200, where tuned conventional steps move 3.77 to
# 4.18 TB/s at batch 256 and a kernel that only reads 4.2 to 4.3, and one row from memory takes 4.2 to 5.1 us.
READING, WRITING, LAUNCH_US = 0.92, 0.80, 3.0
# Where each key channel decays by itself, a fold computes more than memory hides. From the same card: KDA takes about
# 0.13 us a row longer than its bytes. Taken to grow as bandwidth does.
H200_DECAYS_PER_US = 31_500
SURE_BATCH = 32  # rows from which times are held against measurements; below, latency that is not modelled shows
USABLE = 0.9  # of a GPU's memory: the rest is for activations, kernels and fragments


def find_gpu(where: str, name: str) -> Gpu:
    """The GPU of this name; case, spaces, dashes and the maker do not matter ("NVIDIA H200").

    Raises:
        ValueError: it is not in the table; the text lists those that are.
    """
    for gpu in GPUS:
        if _plain(gpu.name) == _plain(name):
            return gpu
    raise ValueError(
        f"{where}: gpu must be one of {', '.join(gpu.name for gpu in GPUS)}; got {name!r}. Take one of about the same "
        "bandwidth, or add yours to GPUS in replayssm/plan.py."
    )


def _plain(name: str) -> str:
    return re.sub(r"^(nvidia|amd)|[\s_-]", "", name.casefold())


def predicted_us(traffic: Traffic, batch: int, gpu: Gpu) -> float:
    """Microseconds of one layer's step of ``batch`` rows that each move ``traffic``, with the state in memory.

    Within a quarter of measured times from ``SURE_BATCH`` rows on. One row takes up to a third longer than this.
    """
    per_us = gpu.read_tb_s * 1e6  # bytes
    folding = traffic.decays / (H200_DECAYS_PER_US * gpu.read_tb_s / GPUS[0].read_tb_s)
    return LAUNCH_US + batch * (traffic.read / (READING * per_us) + traffic.written / (WRITING * per_us) + folding)
