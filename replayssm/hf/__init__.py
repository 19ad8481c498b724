"""Replay inside live transformers models: ``patch`` a model, and its own ``generate`` decodes from checkpoint and ring.

Needs transformers (the extra ``hf``).
"""

from replayssm.hf.versions import expect_transformers

expect_transformers("replayssm.hf")

from replayssm.hf.patching import Report, patch, unpatch  # noqa: E402
from replayssm.hf.registry import register, unregister  # noqa: E402

__all__ = ["Report", "patch", "register", "unpatch", "unregister"]
