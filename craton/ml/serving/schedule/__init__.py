"""Scheduling without torch: requests, KV cache blocks, the prefix cache, and the next batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.serving.schedule.batch import (
        Integers,
        PromptPart,
        RowStart,
        StepInput,
        has_penalties,
        is_plain,
        pack,
    )
    from craton.ml.serving.schedule.drafts import LAST_TOKENS, DraftInput, draft_lag, pack_drafts
    from craton.ml.serving.schedule.prefix import DUMMY, BlockPool, Move, PrefixTree, independent_moves
    from craton.ml.serving.schedule.scheduler import ScheduledChunk, ScheduledStep, Scheduler
    from craton.ml.serving.schedule.sequence import Sequence, ngram_drafts
    from craton.ml.serving.schedule.shared_prefix import MAX_GROUPS, PrefixGroups
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
