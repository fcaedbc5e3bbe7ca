"""Plans of test-time compute: what more samples are worth, what they cost, and the best strategy under a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.planning.strategies.budget import parse_budget
    from craton.planning.strategies.early_stop import stopped_votes
    from craton.planning.strategies.evaluation_file import (
        SampleRecord,
        parse_accuracy,
        read_record,
        shape_of,
    )
    from craton.planning.strategies.planner import PlannedStrategy, StrategiesPlan, plan_strategies
    from craton.planning.strategies.posterior import KnownAccuracy
    from craton.planning.strategies.prediction import AccuracyCurve, PredictedAccuracy
    from craton.planning.strategies.price import (
        EndpointPrice,
        MeasuredPrice,
        NoPrice,
        PriceModel,
        ServerPrice,
    )
    from craton.planning.strategies.problem_mix import NODES, any_correct
    from craton.planning.strategies.stopping_rule import leader_confidence, needed_samples, needed_table
    from craton.planning.strategies.suite_prompts import SuitePrompts, estimated_tokens, record_of_suite
    from craton.planning.strategies.usage import (
        SampleLengths,
        StrategyShape,
        strategy_usage,
    )
    from craton.planning.strategies.votes import LEADS, win_probabilities
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
