"""Strategies of test-time compute over an inference client: voting, best-of-n, search, budget forcing; torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.serving.strategies.answers import counted_answer
    from craton.ml.serving.strategies.errors import LimitError, NoScoreError, StrategyRunError
    from craton.ml.serving.strategies.limits import Limits, Prices
    from craton.ml.serving.strategies.outcome import StrategyOutcome, StrategySample, StrategyUsage
    from craton.ml.serving.strategies.outcome import StrategyProgress as Progress
    from craton.ml.serving.strategies.run import prepare_request, run_strategy
    from craton.ml.serving.strategies.samples import completion_length
    from craton.ml.serving.strategies.scorers import CallableScorer, PoolScorer, Scorer
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
