"""Measure what smaller states do to the bundled model far into a text, against decoding with states in fp32."""

import argparse
import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from replayssm import ReplayStateCache
from replayssm.arguments import count
from replayssm.bench import drift_report, report
from replayssm.bench.held_out import SEPARATOR, held_out_documents
from replayssm.bench.machine import about
from replayssm.bench.options import add_output
from replayssm.bench.progress import Progress
from replayssm.bench.spectra import spectra
from replayssm.graphs import Captured
from replayssm.models import from_pretrained
from replayssm.plan import conventional_traffic, replay_traffic, state_bytes

# checkpoint and read format. The first is replay itself: what rounding of fp32 does, below which nothing is a finding.
ARMS: tuple[tuple[str, str | None], ...] = (
    ("fp32", None),
    ("nvfp4_sr", None),
    ("fp8_sr", None),
    ("fp32", "nvfp4"),
    ("fp16_sr", "nvfp4"),
    ("fp16_sr", "lr_if4"),
    ("fp16_sr", "int8"),
)
ON_GPU, ON_CPU = (4, 128 * 1024), (1, 4096)  # texts and their tokens
PIECE = 1024  # tokens of a call that the expected distributions are made by
FIRST_BIN = 128  # tokens; each further one is as long as all before it
SHOWN = 64  # times that progress is shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``replayssm bench drift``."""
    (gpu_rows, gpu_tokens), (cpu_rows, cpu_tokens) = ON_GPU, ON_CPU
    parser.add_argument("--tokens", type=count, help=f"of each text (default {gpu_tokens}; {cpu_tokens} on a CPU)")
    parser.add_argument("--texts", type=count, help=f"read side by side (default {gpu_rows}; {cpu_rows} on a CPU)")
    parser.add_argument("--window", type=count, default=16, help="most tokens between two flushes (default 16)")
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print a table and write the JSON; returns the exit status 0.

    Raises:
        ValueError: no window of two tokens, or fewer tokens than one window.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    rows, tokens = ON_GPU if on_gpu else ON_CPU
    rows, tokens = options.texts or rows, options.tokens or tokens
    window = options.window
    if window < 2 or tokens < window:
        raise ValueError(
            f"--window must be at least 2 and at most --tokens={tokens}; got {window}. With a shorter one every token "
            "reads the state itself."
        )
    tokens -= tokens % window
    if not on_gpu:
        torch.set_num_threads(1)  # the model is too small to share between threads
    model, _ = from_pretrained("tiny", device=device, dtype=torch.float32)
    ids = texts(rows, tokens).to(device)
    command = f"replayssm bench drift --tokens {tokens} --texts {rows} --window {window}"
    document: dict[str, Any] = about(command, options.commit, device) | measure(model, ids, window)
    path = report.save(document, "drift", options.out)
    print(f"{drift_report.table(document)}\n\n{drift_report.conditions(document)}\n")
    print(f"{drift_report.spectra_table(document)}\n\nWritten: {path}")
    return 0


def texts(rows: int, tokens: int) -> Tensor:
    """(rows, tokens) int64: pieces of the held-out modules one after another, which begin as far apart as can be.

    When the modules are at an end they begin again.
    """
    stream = b"".join(text + SEPARATOR for text in held_out_documents().values())
    starts = [row * len(stream) // rows for row in range(rows)]
    whole = stream * (2 + tokens // len(stream))
    return torch.tensor([list(SEPARATOR + whole[start : start + tokens - 1]) for start in starts])


@torch.no_grad()
def measure(model: nn.Module, ids: Tensor, window: int) -> dict[str, Any]:
    """Every arm over the same texts, and the spectra of the states behind them.

    Args:
        ids: (texts, tokens) int64, whole windows.

    Returns:
        The entries of the JSON: "window", "texts", "tokens", "bins", "runs" and "spectra".
    """
    expected, states = reference(model, ids)
    bins = bins_of(ids.shape[1])
    place = torch.zeros((), dtype=torch.int64, device=ids.device)
    arms = [Arm(model, ids, expected, place, window, *formats) for formats in ARMS]
    force(arms, place, ids.shape[1] // window, window)
    for arm in arms:
        arm.cache.check()
    return {
        "window": window,
        "texts": len(ids),
        "tokens": ids.shape[1],
        "bins": bins,
        "runs": [arm.figures(bins) for arm in arms],
        "spectra": spectra(states),
    }


def reference(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits (texts, tokens, vocab) of every token, and each layer's last states.

    States in fp32, by scans: the recurrence of conventional decoding, whose every step keeps its state in fp32, in
    another order of sums. ``ARMS[0]`` says how much that is.
    """
    cache = ReplayStateCache(model, len(ids), window=0, backend="torch")
    logits = []
    for piece in ids.split(PIECE, 1):
        logits.append(model(piece, cache))
        cache.commit()
    return torch.cat(logits, 1), {layer.name: layer.state() for layer in cache.layers}


class Arm:
    """One pair of formats, fed the texts as single-token decoding would be.

    A step of several tokens flushes before all of them or before none, and reads one copy for all of them. Decoding
    token by token flushes at one token of ``window``, which answers from the folded state, and reads one copy at the
    window - 1 others. So a window is fed as a step of one token, which flushes, and a step of all others: each token
    finds the checkpoint, the copy, the records and the random words that it would find alone, and only sums are formed
    in another order.

    Attributes:
        divergence: (texts, tokens) fp64, KL of the next token's distribution from the expected one, in nats.
        agrees: (texts, tokens) bool, the likeliest token is the expected one.
    """

    def __init__(
        self,
        model: nn.Module,
        ids: Tensor,
        expected: Tensor,
        place: Tensor,
        window: int,
        checkpoint: str,
        read_format: str | None,
    ):
        self._model, self._ids, self._expected, self._place = model, ids, expected, place
        self.checkpoint, self.read_format = checkpoint, read_format
        self._steps = (0, 1), (1, window)
        self.cache = ReplayStateCache(
            model,
            len(ids),
            window=window,
            step_tokens=window - 1,
            checkpoint=checkpoint,
            read_format=read_format,
            backend="torch",
        )
        self.divergence = torch.zeros(ids.shape, dtype=torch.float64, device=ids.device)
        self.agrees = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)

    def advance(self) -> None:
        """Read the window of tokens from ``place`` on; never waits for the device."""
        for first, last in self._steps:
            tokens = self._place + torch.arange(first, last, device=self._ids.device)
            logits = self._model(self._ids.index_select(1, tokens), self.cache)
            self.cache.commit()
            expected = self._expected.index_select(1, tokens)
            # in fp64: a divergence of 1e-9 is a sum of differences that cancel
            wanted, found = expected.double().log_softmax(-1), logits.double().log_softmax(-1)
            self.divergence.index_copy_(1, tokens, (wanted.exp() * (wanted - found)).sum(-1))
            self.agrees.index_copy_(1, tokens, expected.argmax(-1) == logits.argmax(-1))

    def figures(self, bins: list[list[int]]) -> dict[str, Any]:
        """The entry of "runs": what the formats keep and move, and means by position."""
        sizes = state_bytes(self.cache)
        replay, conventional = replay_traffic(sizes, self.cache.window), conventional_traffic(sizes)
        return {
            "checkpoint": self.checkpoint,
            "read_format": self.read_format,
            "kept_bytes": sizes.state + sizes.copy,
            "moved_bytes": replay.moved,
            "conventional_bytes": conventional.moved,
            "kl": [self.divergence[:, low:high].mean().item() for low, high in bins],
            "kl_by_text": [self.divergence[:, low:high].mean(1).tolist() for low, high in bins],
            "top1": [self.agrees[:, low:high].double().mean().item() for low, high in bins],
        }


def force(arms: list[Arm], place: Tensor, windows: int, window: int) -> None:
    """Feed all arms all windows; on a GPU side by side in one recording: kernels of one alone do not fill it."""
    device = place.device
    streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in arms]

    def advance() -> None:
        for arm, stream in zip(arms, streams, strict=True):
            with _beside(stream):
                arm.advance()
        for stream in streams:
            if stream is not None:
                torch.cuda.current_stream(device).wait_stream(stream)
        place.add_(window)

    captured, progress = Captured(advance, device), Progress(1, SHOWN)
    each = math.ceil(windows / SHOWN)
    for number in range(windows):
        if number % each == 0:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # so that what is shown has been done
            progress.stage(f"{number * window:,} of {windows * window:,} tokens")
        captured()
    progress.part(f"{windows * window:,} tokens, {len(arms)} pairs of formats")


@contextlib.contextmanager
def _beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on ``stream`` behind what the current one has been given; None is the current one."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def bins_of(tokens: int) -> list[list[int]]:
    """[first, last) positions of each bin, octaves from ``FIRST_BIN`` on; the last one may be cut."""
    edges = [0]
    while edges[-1] < tokens:
        edges.append(min(max(2 * edges[-1], FIRST_BIN), tokens))
    return [list(pair) for pair in itertools.pairwise(edges)]
