"""The plan of a server: memory, KV cache, step time and throughput."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.planning.serving.own_engine import draft_steps, own_steps, roofline_steps
    from craton.planning.serving.planner import (
        CPU_KV_BYTES,
        GPU_RESERVE_BYTES,
        PlannedLoad,
        ServePlan,
        passing_bytes,
        plan_serving,
        plan_steps,
    )
    from craton.planning.serving.profile import find_engine_profile, save_engine_profile
    from craton.planning.serving.served_model import BLOCK_BYTES, PLAIN_BYTES, ServedModel
    from craton.planning.serving.speculation import (
        ASSUMED_ACCEPTANCE,
        AUTO_LENGTHS,
        HOST_SECONDS,
        PUBLISHED_ACCEPTANCE,
        AcceptanceEstimate,
        SpeculationCosts,
        SpeculationPlan,
        best_draft_length,
        expected_tokens,
        plan_speculation,
        roofline_costs,
        speculation_costs,
        speculation_speedup,
    )
    from craton.planning.serving.step_times import ServedSteps
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
