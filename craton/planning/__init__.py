"""What a job will do before it runs: layout, step time, memory, storage, goodput, cost, and how sure that is."""

from craton.planning.bench import Bench, bench_json, bench_plan, decisions, statistics, summary, tables
from craton.planning.calibration import Calibration, CalibrationError, calibrate, load_pins, load_runs
from craton.planning.cases import Case, CaseFileError, Skipped, load_cases
from craton.planning.corpus import corpus_path
from craton.planning.cost import billed_instances
from craton.planning.inference import Roofline, Roofs, ServedModel, roofs_of
from craton.planning.inventory import StageInventory, inventory
from craton.planning.memory import Memory, memory
from craton.planning.pair_rates import pair_bytes_per_second
from craton.planning.placed import placed_step_seconds
from craton.planning.planner import plan, plan_clusters
from craton.planning.profiles import (
    STACKS,
    UNKNOWN,
    ProfileError,
    check_software,
    find_profile,
    load_profile,
    save_profile,
    software_names,
)
from craton.planning.report import render_front, render_plan
from craton.planning.report_html import plan_html
from craton.planning.report_json import plan_to_json, serving_to_json
from craton.planning.report_serving import render_serving
from craton.planning.result import (
    Alternative,
    Bottleneck,
    CostPlan,
    GoodputPlan,
    Plan,
    RecoveryPlan,
    ScalingPoint,
    Sensitivity,
    StoragePlan,
    TierPlan,
)
from craton.planning.serving import (
    CPU_KV_BYTES,
    GPU_RESERVE_BYTES,
    DecodePoint,
    ServePlan,
    passing_bytes,
    plan_serving,
)
from craton.planning.setting import PlanError
from craton.planning.software import CONSTANTS, SoftwareProfile, Traits
from craton.planning.training import Workload

__all__ = [
    "CONSTANTS",
    "CPU_KV_BYTES",
    "GPU_RESERVE_BYTES",
    "STACKS",
    "UNKNOWN",
    "Alternative",
    "Bench",
    "Bottleneck",
    "Calibration",
    "CalibrationError",
    "Case",
    "CaseFileError",
    "CostPlan",
    "DecodePoint",
    "GoodputPlan",
    "Memory",
    "Plan",
    "PlanError",
    "ProfileError",
    "RecoveryPlan",
    "Roofline",
    "Roofs",
    "ScalingPoint",
    "Sensitivity",
    "ServePlan",
    "ServedModel",
    "Skipped",
    "SoftwareProfile",
    "StageInventory",
    "StoragePlan",
    "TierPlan",
    "Traits",
    "Workload",
    "bench_json",
    "bench_plan",
    "billed_instances",
    "calibrate",
    "check_software",
    "corpus_path",
    "decisions",
    "find_profile",
    "inventory",
    "load_cases",
    "load_pins",
    "load_profile",
    "load_runs",
    "memory",
    "pair_bytes_per_second",
    "passing_bytes",
    "placed_step_seconds",
    "plan",
    "plan_clusters",
    "plan_html",
    "plan_serving",
    "plan_to_json",
    "render_front",
    "render_plan",
    "render_serving",
    "roofs_of",
    "save_profile",
    "serving_to_json",
    "software_names",
    "statistics",
    "summary",
    "tables",
]
