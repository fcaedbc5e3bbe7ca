"""Suites of `craton eval`: problems, prompts, verifiers and sampling, read from a YAML file or built in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.job.sections.suites.evaluation import Evaluation, Samples, SuiteName
    from craton.job.sections.suites.load import BUILT_IN_SUITES, SuiteError, load_suite, suite_name
    from craton.job.sections.suites.suite import Suite, SuiteData, SuiteSampling, SuiteTemplate
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
