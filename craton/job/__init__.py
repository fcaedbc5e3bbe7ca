"""What the user wrote: the job file, the cluster file, the model's shape and the layout algebra."""

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
from craton.job.errors import ContentError, CratonError, FileError, JobError, LayoutError, ModelError, did_you_mean
from craton.job.huggingface import model_from_config
from craton.job.jobfile import (
    TRAINING_KINDS,
    Checkpoint,
    CheckpointTier,
    Data,
    Job,
    LayoutSpec,
    Lora,
    Placement,
    Run,
    Train,
    load_job,
    parse_job,
)
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
from craton.job.layout_check import check_layout, layout_is_valid
from craton.job.model import MlaShape, ModelShape
from craton.job.presets import model_preset, model_presets
from craton.job.summary import JobSummary, check_job
from craton.job.units import parse_count, parse_seconds

__all__ = [
    "LEVELS",
    "OFFLOADS",
    "PRECISIONS",
    "RECOMPUTES",
    "SCHEDULES",
    "TRAINING_KINDS",
    "Checkpoint",
    "CheckpointTier",
    "ClusterFile",
    "ClusterRef",
    "ContentError",
    "CratonError",
    "Data",
    "FileError",
    "GpuNumbers",
    "HardwareNumbers",
    "Job",
    "JobError",
    "JobSummary",
    "Layout",
    "LayoutError",
    "LayoutSpec",
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
    "StorageNumbers",
    "Train",
    "check_job",
    "check_layout",
    "did_you_mean",
    "layout_is_valid",
    "load_cluster",
    "load_job",
    "model_from_config",
    "model_preset",
    "model_presets",
    "parse_count",
    "parse_job",
    "parse_seconds",
]
