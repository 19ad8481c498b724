"""A step as one CUDA graph, and its verdict read back without waiting for it."""

import functools
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARM_UP = 2  # calls before the recording: kernels are compiled and chosen, and libraries take their memory


class Captured:
    """A function of nothing that works on buffers: on a GPU recorded once and replayed, elsewhere called.

    The first calls run it as it is and count like any other. Its Python code runs in these and in the recording only,
    so whatever it sets on the host must be as before when it returns: a model call and its commit leave a cache's host
    side so.

    Args:
        function: never waits for the device; what it leaves behind lies in tensors that it writes in place.
        device: that it works on.
        generators: of random numbers that it draws from, beside the global one.
    """

    def __init__(self, function: Callable[[], None], device: torch.device, generators: Sequence[torch.Generator] = ()):
        self._function, self._device, self._generators = function, device, generators
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Run the function once.

        Raises:
            RuntimeError: it cannot be recorded; what it works on is in no defined state then.
        """
        if self._graph is None and (self._device.type != "cuda" or self._calls < WARM_UP):
            self._calls += 1
            self._function()
            return
        if self._graph is None:
            self._graph = self._record()
        self._graph.replay()

    def _record(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        try:
            # thread_local: another thread, which takes what was streamed, may do on the device what it likes
            recording = torch.cuda.graph(graph, stream=_stream(self._device), capture_error_mode="thread_local")
            with torch.cuda.device(self._device), recording:
                self._function()
        except RuntimeError as error:
            raise RuntimeError(
                f"generate: a step must be free of what cannot be recorded in a CUDA graph; got: {error}. Pass "
                "cuda_graphs=False if the model or the drafter reads values, and reset the cache."
            ) from error
        return graph


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Where all recordings of a device are made: each stream that is new to cuBLAS costs a workspace."""
    return torch.cuda.Stream(device)


class Verdicts:
    """A small device tensor read on the host after each step: at once from a CPU, one step late from a GPU.

    One step late the GPU has its next step before the host waits for the last one.
    """

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self._waiting: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    @property
    def due(self) -> bool:
        """Whether the oldest verdict should be taken before another step is begun."""
        return len(self._waiting) > int(self.on_gpu)

    def put(self, verdict: Tensor) -> None:
        """Start to copy what the step that was begun last will write."""
        if not self.on_gpu:
            self._waiting.append((verdict.clone(), None))
            return
        copy = torch.empty(verdict.shape, dtype=verdict.dtype, pin_memory=True)
        copy.copy_(verdict, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(verdict.device))
        self._waiting.append((copy, event))

    def take(self) -> list[int]:
        """The oldest verdict."""
        verdict, event = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        return verdict.tolist()

    def __len__(self) -> int:
        return len(self._waiting)
