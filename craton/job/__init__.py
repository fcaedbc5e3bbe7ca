"""What the user wrote: the job file, the cluster file, the model's shape and the layout algebra."""

from craton.job.aws import Aws
from craton.job.checkpoint import Checkpoint, CheckpointTier, TierPlace, place_of
from craton.job.clusterfile import (
    LEVELS,
    ClusterFile,
    ClusterRef,
    GpuNumbers,
    HardwareNumbers,
    PriceNumbers,
    Scheduler,
    StorageNumbers,
    load_cluster,
)
from craton.job.command import PLACEHOLDERS, ProgressSection, Workdir, starts_own_ranks
from craton.job.data import STANDARD_LIBRARY, Data, WeightedPath
from craton.job.dump import dump_job
from craton.job.errors import (
    ContentError,
    CratonError,
    FaultError,
    FileError,
    JobError,
    LayoutError,
    ModelError,
    did_you_mean,
)
from craton.job.faults import (
    DURING,
    EXAMPLES,
    FAULT_KINDS,
    RANDOM_KINDS,
    Fault,
    check_fault,
    parse_fault,
    random_faults,
)
from craton.job.huggingface import load_config, model_from_config
from craton.job.jobfile import TRAINING_KINDS, Job, Placement, Run, load_job, make_job, parse_job
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
from craton.job.layout_check import FP8_MULTIPLE, check_layout, check_served_layout, layout_is_valid
from craton.job.layoutspec import LayoutSpec
from craton.job.model import MlaShape, ModelShape
from craton.job.names import is_name
from craton.job.nearest_layout import divisors, layout_line, nearest_layout
from craton.job.presets import model_preset, model_presets
from craton.job.recover import RandomChaos, RecoverSection, faults_of
from craton.job.schedules import (
    Action,
    forward_actions,
    in_flight_limit,
    lane_of,
    num_lanes,
    schedule_actions,
    stage_layers,
)
from craton.job.serve import DEFAULT_CHUNK_TOKENS, DEFAULT_RUNNING, Serve, Speculate
from craton.job.summary import JobSummary, check_job, checked_layout
from craton.job.train import Evaluate, FaultPolicy, LearningRateSchedule, Lora, Spike, Train, Weights
from craton.job.units import parse_count, parse_seconds

__all__ = [
    "DEFAULT_CHUNK_TOKENS",
    "DEFAULT_RUNNING",
    "DURING",
    "EXAMPLES",
    "FAULT_KINDS",
    "FP8_MULTIPLE",
    "LEVELS",
    "OFFLOADS",
    "PLACEHOLDERS",
    "PRECISIONS",
    "RANDOM_KINDS",
    "RECOMPUTES",
    "SCHEDULES",
    "STANDARD_LIBRARY",
    "TRAINING_KINDS",
    "Action",
    "Aws",
    "Checkpoint",
    "CheckpointTier",
    "ClusterFile",
    "ClusterRef",
    "ContentError",
    "CratonError",
    "Data",
    "Evaluate",
    "Fault",
    "FaultError",
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
    "ProgressSection",
    "RandomChaos",
    "Recompute",
    "RecoverSection",
    "Run",
    "Schedule",
    "Scheduler",
    "Serve",
    "Speculate",
    "Spike",
    "StorageNumbers",
    "TierPlace",
    "Train",
    "WeightedPath",
    "Weights",
    "Workdir",
    "check_fault",
    "check_job",
    "check_layout",
    "check_served_layout",
    "checked_layout",
    "did_you_mean",
    "divisors",
    "dump_job",
    "faults_of",
    "forward_actions",
    "in_flight_limit",
    "is_name",
    "lane_of",
    "layout_is_valid",
    "layout_line",
    "load_cluster",
    "load_config",
    "load_job",
    "make_job",
    "model_from_config",
    "model_preset",
    "model_presets",
    "nearest_layout",
    "num_lanes",
    "parse_count",
    "parse_fault",
    "parse_job",
    "parse_seconds",
    "place_of",
    "random_faults",
    "schedule_actions",
    "stage_layers",
    "starts_own_ranks",
]
