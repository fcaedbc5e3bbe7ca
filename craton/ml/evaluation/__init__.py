"""Evaluations: problems of a suite, verified answers of a model, and statistics of them; torch-free at import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.evaluation.errors import EvaluationError
    from craton.ml.evaluation.problems import SuiteProblem, open_problems
    from craton.ml.evaluation.records import PROBLEMS_FILE, ProblemResult, SampleResult, read_results
    from craton.ml.evaluation.results import (
        EVALUATION_FILE,
        EvaluationPrices,
        compare_runs,
        read_evaluation,
        summarize_results,
        write_evaluation,
    )
    from craton.ml.evaluation.runner import EvaluationSetting, SuiteRunner, judge_sample, plain_setting
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
