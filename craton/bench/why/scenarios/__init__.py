"""Scenarios of `craton bench why`: simulated runs, each with one known fault or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.bench.why.scenarios.catalog import Truth, draw_scenarios
    from craton.bench.why.scenarios.faults import Victim
    from craton.bench.why.scenarios.files import scheduler_of, write_world
    from craton.bench.why.scenarios.series import good_moment, served
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
