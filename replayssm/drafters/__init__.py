"""Who guesses the next tokens of a text, for ``generate`` to verify them in one step."""

from replayssm.drafters.base import Context, Drafter, Proposer, Run
from replayssm.drafters.draft_model import DraftModel
from replayssm.drafters.mtp import MTP, MTPHead
from replayssm.drafters.prompt_lookup import PromptLookup

__all__ = ["MTP", "Context", "DraftModel", "Drafter", "MTPHead", "PromptLookup", "Proposer", "Run"]
