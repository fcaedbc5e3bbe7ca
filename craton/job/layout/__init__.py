"""Parallelism layouts: dimensions, validity, nearest valid layout, pipeline schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.job.layout.check import FP8_MULTIPLE, check_layout, check_served_layout, layout_is_valid
    from craton.job.layout.layout import Layout, Precision, Recompute, Schedule
    from craton.job.layout.nearest import divisors, layout_line, nearest_layout
    from craton.job.layout.schedules import Action, forward_actions, lane_of, num_lanes, schedule_actions, stage_layers
    from craton.job.layout.section import LayoutSpec, parse_layout
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
