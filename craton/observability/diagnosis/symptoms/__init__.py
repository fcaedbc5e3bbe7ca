"""Symptoms of a run, before their cause is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.observability.diagnosis.symptoms.ended import last_bad_step, reported_losses
    from craton.observability.diagnosis.symptoms.naming import odd_by_output
    from craton.observability.diagnosis.symptoms.rewards import first_level, level_of, waits_text
    from craton.observability.diagnosis.symptoms.symptoms import straggler_of, symptoms_of
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
