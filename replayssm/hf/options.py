"""How a patched model keeps its states: the arguments of ``patch``."""

from typing import NamedTuple

from replayssm.cache.arguments import Window, check_arguments


class Options(NamedTuple):
    """Arguments of the caches that patched mixers allocate; see ``ReplayStateCache``."""

    window: Window
    step_tokens: int
    checkpoint: str
    read_format: str | None

    def check(self) -> None:
        """Refuse what is out of range or does not exist, as a cache would."""
        check_arguments(1, self.window, self.step_tokens, None, self.checkpoint, self.read_format)
