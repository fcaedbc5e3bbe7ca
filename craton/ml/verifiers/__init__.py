"""Verifiers: what a completion is worth, decided in processes that cannot harm the run; torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.verifiers.environment import Environment, Turn
    from craton.ml.verifiers.errors import IsolationError, VerifierError
    from craton.ml.verifiers.pool import Episode, VerifierPool
    from craton.ml.verifiers.reward_models import RewardModelProcess, RewardModelSetup
    from craton.ml.verifiers.sandbox import (
        INSTALL_ISOLATION,
        Isolation,
        IsolationReport,
        die_with_parent,
        probe_isolation,
        require_isolation,
    )
    from craton.ml.verifiers.verdict import SampleVerdict as Verdict
    from craton.ml.verifiers.verdict import VerifierSample, judge_failures
    from craton.ml.verifiers.wire import BlockingChannel
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
