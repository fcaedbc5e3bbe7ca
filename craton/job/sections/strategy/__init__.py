"""Strategies of test-time compute: voting, best-of-n, beam and tree search, budget forcing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.job.sections.strategy.kinds import (
        DEFAULT_STOP,
        LOGPROBS,
        MAX_SAMPLES,
        AnswerRule,
        BeamStrategy,
        BestOfStrategy,
        BudgetStrategy,
        SearchStep,
        SearchStrategy,
        Strategy,
        TreeStrategy,
        VoteStrategy,
    )
    from craton.job.sections.strategy.parse import (
        StrategyBounds,
        StrategySpec,
        check_score,
        parse_strategy,
        read_strategy,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
