"""Layers of one transformers cache that have come the same way take the same step."""

from torch import Tensor

from replayssm.cache.step import Clock, Step


class Lockstep:
    """The last step of a layer of a transformers cache, for the layers behind it.

    Every layer has counters of its own, because each is cropped, reordered and reset by itself. While all have had the
    same steps their counters are equal, which is known without reading them. So what follows from counters (slots,
    lengths, which rows flush) is worked out by the first layer alone, and the others are spared 8 launches each.

    A layer's past is an object that stands for all that its counters have seen: None if that is nothing.
    """

    def __init__(self) -> None:
        self._step: Step | None = None
        self._before: object | None = None
        self._after: object | None = None
        self._kind: tuple[object, ...] = ()

    def offer(self, clock: Clock, past: object | None, t: int, attention_mask: Tensor | None) -> None:
        """Open the last step in the clock of a layer, if its own would be the same; else the layer makes one."""
        step = self._step
        if step is None or past is not self._before or self._kind != _kind(clock):
            return
        if step.t == t and step.attention_mask is attention_mask:
            clock.step = step

    def kept(self, clock: Clock, past: object | None) -> object | None:
        """The past of a layer after its open step, all of which is about to be committed."""
        step = clock.step
        assert step is not None
        if step is not self._step:
            step.start = step.start.clone()  # the commit moves the counters of this layer, not those of the next
            self._step, self._before, self._after, self._kind = step, past, object(), _kind(clock)
        return self._after


def _kind(clock: Clock) -> tuple[object, ...]:
    return clock.batch, clock.window, clock.step_tokens, clock.seqlen.device
