"""What the user wrote: the job file, the cluster file, the model's shape and the layout algebra."""

from craton.job.checkpoint import Checkpoint, CheckpointTier, TierPlace, place_of
from craton.job.clusterfile import (
    LEVELS,
    ClusterFile,
    ClusterRef,
    GpuNumbers,
    HardwareNumbers,
    PriceNumbers,
    StorageNumbers,
    load_cluster,
)
from craton.job.data import STANDARD_LIBRARY, Data, WeightedPath
from craton.job.dump import dump_job
from craton.job.errors import ContentError, CratonError, FileError, JobError, LayoutError, ModelError, did_you_mean
from craton.job.huggingface import load_config, model_from_config
from craton.job.jobfile import TRAINING_KINDS, Job, LayoutSpec, Placement, Run, load_job, parse_job
from craton.job.layout import (
    OFFLOADS,
    PRECISIONS,
    RECOMPUTES,
    SCHEDULES,
    Layout,
    Offload,
    Precision,
    Recompute,
    Schedule,
)
from craton.job.layout_check import FP8_MULTIPLE, check_layout, layout_is_valid
from craton.job.model import MlaShape, ModelShape
from craton.job.nearest_layout import divisors, layout_line, nearest_layout
from craton.job.presets import model_preset, model_presets
from craton.job.schedules import (
    Action,
    forward_actions,
    in_flight_limit,
    lane_of,
    num_lanes,
    schedule_actions,
    stage_layers,
)
from craton.job.summary import JobSummary, check_job, checked_layout
from craton.job.train import Evaluate, FaultPolicy, LearningRateSchedule, Lora, Spike, Train, Weights
from craton.job.units import parse_count, parse_seconds

__all__ = [
    "FP8_MULTIPLE",
    "LEVELS",
    "OFFLOADS",
    "PRECISIONS",
    "RECOMPUTES",
    "SCHEDULES",
    "STANDARD_LIBRARY",
    "TRAINING_KINDS",
    "Action",
    "Checkpoint",
    "CheckpointTier",
    "ClusterFile",
    "ClusterRef",
    "ContentError",
    "CratonError",
    "Data",
    "Evaluate",
    "FaultPolicy",
    "FileError",
    "GpuNumbers",
    "HardwareNumbers",
    "Job",
    "JobError",
    "JobSummary",
    "Layout",
    "LayoutError",
    "LayoutSpec",
    "LearningRateSchedule",
    "Lora",
    "MlaShape",
    "ModelError",
    "ModelShape",
    "Offload",
    "Placement",
    "Precision",
    "PriceNumbers",
    "Recompute",
    "Run",
    "Schedule",
    "Spike",
    "StorageNumbers",
    "TierPlace",
    "Train",
    "WeightedPath",
    "Weights",
    "check_job",
    "check_layout",
    "checked_layout",
    "did_you_mean",
    "divisors",
    "dump_job",
    "forward_actions",
    "in_flight_limit",
    "lane_of",
    "layout_is_valid",
    "layout_line",
    "load_cluster",
    "load_config",
    "load_job",
    "model_from_config",
    "model_preset",
    "model_presets",
    "nearest_layout",
    "num_lanes",
    "parse_count",
    "parse_job",
    "parse_seconds",
    "place_of",
    "schedule_actions",
    "stage_layers",
]
