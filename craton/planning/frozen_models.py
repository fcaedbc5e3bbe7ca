"""Models beside the trained one in reinforcement learning: reward models, the reference and the teacher.

Reward models are whole on every rank, and each rank scores its share of a step's samples, which is part of the phase
`reward`. References and teachers are sharded like the policy; their forward passes are `compute`. Shapes come from the
config.json in their folders. One that cannot be read is left out, with a warning.
"""

from __future__ import annotations

from dataclasses import dataclass

from craton.job import ModelError
from craton.job.model import ModelShape, model_shape
from craton.job.sections.posttraining import Policy
from craton.planning.search import Candidate
from craton.planning.serving import PLAIN_BYTES, ServedModel, own_steps, passing_bytes
from craton.planning.setting import Setting, mean_sample_tokens

SCORED_TOKENS = 16_384  # of one forward pass of a reward model, as the trainer batches them


@dataclass(frozen=True)
class FrozenModels:
    """What these models cost on one rank."""

    reward_seconds: float  # of a step: the scores of all reward models
    reference_scale: float  # forward pass of the reference in relation to the policy's; 0: there is none
    teacher_scale: float
    memory_parts: dict[str, float]
    warnings: tuple[str, ...]

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory_parts.values())


def frozen_models(setting: Setting, candidate: Candidate) -> FrozenModels:
    """Return what the models of a job of kind grpo cost beside the trained one."""
    job = setting.job
    assert job.policy is not None
    assert job.train is not None
    seconds = 0.0
    memory: dict[str, float] = {}
    warnings: list[str] = []
    for folder in (term.model for term in job.reward if term.model is not None):
        shape = _shape_of(folder)
        if shape is None:
            warnings.append(f"the forward passes of {folder} are not planned: it has no config.json that can be read")
            continue
        seconds += _score_seconds(setting, shape)
        memory["reward models"] = memory.get("reward models", 0.0) + _score_bytes(setting, shape)
    scales = {}
    for name, folder in _sharded(job.policy, is_adapted=job.train.lora is not None).items():
        known = setting.shape if folder in ("", "start") else _shape_of(folder)
        if known is None:
            warnings.append(
                f"the {name} in {folder} is planned like the policy: it has no config.json that can be read"
            )
        shape = known or setting.shape
        scales[name] = shape.active_parameters / setting.shape.active_parameters
        if folder:
            memory[f"{name} weights"] = _shard_bytes(setting, candidate, shape)
    return FrozenModels(seconds, scales.get("reference", 0.0), scales.get("teacher", 0.0), memory, tuple(warnings))


def _sharded(policy: Policy, is_adapted: bool) -> dict[str, str]:
    """Return name → folder of the models that are sharded like the policy; "": the policy without its adapters."""
    result = {}
    if policy.kl > 0:
        result["reference"] = "" if is_adapted and policy.reference == "start" else policy.reference
    if isinstance(policy.teacher, str):
        result["teacher"] = policy.teacher
    return result


def _shape_of(folder: str) -> ModelShape | None:
    try:
        return model_shape(folder)
    except (ModelError, OSError):  # the folder may be on the cluster only
        return None


def _precision(setting: Setting) -> str:
    """Return the precision of reward models, which are not quantized."""
    is_plain = setting.job.precision == "fp32" or "bf16" not in setting.machine.rates.matrix_flops
    return "fp32" if is_plain else "bf16"


def _score_seconds(setting: Setting, shape: ModelShape) -> float:
    """Return the seconds of one forward pass over a rank's samples."""
    rollout, machine = setting.job.rollout, setting.machine
    assert rollout is not None
    precision = _precision(setting)
    length = sum(mean_sample_tokens(setting.job))
    tokens = max(1.0, length * -(-rollout.samples // setting.world))
    steps = own_steps(ServedModel(shape, precision), machine, step_tokens=SCORED_TOKENS)
    slowdown = machine.gpu.cpu.serial_slowdown if machine.gpu.cpu is not None else 1.0
    return slowdown * float(steps.prompts_seconds(tokens, length))


def _score_bytes(setting: Setting, shape: ModelShape) -> float:
    """Return weights, without a token head, and activations of one forward pass."""
    value = PLAIN_BYTES[_precision(setting)]
    head = 0 if shape.tied_embeddings else shape.vocab * shape.hidden
    return (shape.parameters - head) * value + passing_bytes(shape, SCORED_TOKENS, 0, value)


def _shard_bytes(setting: Setting, candidate: Candidate, shape: ModelShape) -> float:
    """Return the weights that a rank holds of a model in the policy's layout."""
    layout, train = candidate.layout, setting.job.train
    assert train is not None
    return shape.parameters * PLAIN_BYTES[train.weights] / (layout.fsdp * layout.pp * layout.tp)
