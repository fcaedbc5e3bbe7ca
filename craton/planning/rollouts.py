"""What a step of post-training has besides training on its rows: rollouts, verdicts, weights for the rollouts, and
forward passes of references.

Rollouts take the step times of our own engine (`serving`) over the samples of a step. Lengths are not known before a
run: completions are assumed to be spread evenly up to their maximum; prompts to be as long as the first rows of the
data, or where these cannot be read to fill half of the rest of the sequence.

Guarantees: seconds are what the trainer waits for. Other kinds of training have none of this.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from craton.job import Job
from craton.job.sections.posttraining import RewardTerm
from craton.planning.frozen_models import FrozenModels, frozen_models
from craton.planning.rates import all_gather_seconds, point_to_point_seconds
from craton.planning.result import RolloutPlan
from craton.planning.search import Candidate
from craton.planning.serving import BLOCK_BYTES, PLAIN_BYTES, ServedModel, ServedSteps, own_steps, passing_bytes
from craton.planning.setting import Setting, mean_sample_tokens
from craton.planning.step import adapter_parameters, compose, evaluation_terms, group_of

# Seconds of one verdict, assumed: comparing text, one SymPy comparison, starting a sandboxed interpreter, a short
# answer of a judge. A user's function is assumed to be like `math`.
VERDICT_SECONDS = {"exact": 1e-4, "regex": 1e-4, "json_schema": 1e-3, "math": 0.02, "code": 0.2, "judge": 2.0}
FUNCTION_SECONDS = 0.02
KV_SHARE = 0.9  # of the memory that training leaves free
PAGE = 16  # tokens of a KV cache block


@dataclass(frozen=True)
class StepExtras:
    """Exposed seconds of a step by phase and part, and memory beside that of training."""

    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    once_seconds: float = 0.0  # of the whole run: the reference of preferences, computed once and kept
    memory_parts: dict[str, float] = field(default_factory=dict)
    rollout: RolloutPlan | None = None
    warnings: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(sum(parts.values()) for parts in self.parts.values())

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory_parts.values())


def step_extras(setting: Setting, candidate: Candidate, step_seconds: float) -> StepExtras:
    """Return what comes on top of a training step of `step_seconds`, as predicted."""
    job = setting.job
    if job.preference is not None and job.preference.reference_model is not None:
        return StepExtras(once_seconds=(job.steps or 1) * _forward_seconds(setting, candidate, step_seconds))
    if job.rollout is None or job.policy is None or job.verify is None:
        return StepExtras()
    frozen = frozen_models(setting, candidate)
    engine = _Engine.of(setting, candidate, frozen.memory_bytes)
    compute, optimizer = _further_passes(setting, candidate, step_seconds, frozen)
    training = step_seconds + sum(compute.values()) + sum(optimizer.values()) + frozen.reward_seconds
    generation = engine.seconds
    reward = _reward_seconds(setting)
    sync, sync_part = _sync_seconds(setting, candidate, engine)
    if job.rollout.mode == "separate":  # beside training: the trainer waits for what takes longer
        waited = max(0.0, generation + reward - training)
        reward = min(reward, waited)
        generation = waited - reward
    parts = {
        "rollout": {"prefill and decode": generation},
        "reward": {"verdicts": reward, "reward models": frozen.reward_seconds},
        "sync": {sync_part: sync},
        "compute": compute,
        "optimizer": optimizer,
    }
    shown = {phase: {name: value for name, value in entries.items() if value > 0} for phase, entries in parts.items()}
    memory = {**engine.memory_parts, **frozen.memory_parts}
    return StepExtras(shown, 0.0, memory, engine.plan(job), (*_warnings(engine, job), *frozen.warnings))


@dataclass(frozen=True)
class _Engine:
    """One of the engines that share the samples of a step."""

    model: ServedModel
    steps: ServedSteps
    slowdown: float  # by other processes, of a CPU
    engines: int
    samples: int  # of a step, of this engine
    group: int
    prompt_tokens: float
    completion_tokens: float
    max_tokens: int
    running: int  # samples that the KV cache holds at once
    memory_parts: dict[str, float]  # on a trainer's device; empty: rollouts have devices of their own

    @classmethod
    def of(cls, setting: Setting, candidate: Candidate, frozen_bytes: float) -> _Engine:
        """`frozen_bytes`: of other models on a trainer's device."""
        job, rollout, machine = setting.job, setting.job.rollout, setting.machine
        assert rollout is not None
        layout = candidate.layout
        is_own = rollout.mode == "separate"  # on servers of its own
        tp = (rollout.layout.tp if rollout.layout and rollout.layout.tp else 1) if is_own else layout.tp
        engines = rollout.num_workers or 1 if is_own else max(1, setting.world // tp)
        precision = job.precision if job.precision in BLOCK_BYTES else "bf16"
        if precision not in machine.rates.matrix_flops:
            precision = "fp32"
        ep = rollout.layout.ep if is_own and rollout.layout and rollout.layout.ep else 1
        model = ServedModel(setting.shape, precision, tp=tp, ep=ep)
        samples = -(-rollout.samples // engines)
        prompt, completion = mean_sample_tokens(job)
        workspace = passing_bytes(setting.shape, 2048, samples, PLAIN_BYTES[precision])
        is_sharded = layout.fsdp * layout.pp > 1  # otherwise the rollouts read the trainer's own weights
        copy = 0.0 if is_own or not is_sharded else model.weight_bytes
        used = model.weight_bytes if is_own else candidate.memory_bytes + frozen_bytes + copy
        free = KV_SHARE * (machine.gpu.memory_bytes - used - workspace)
        tokens_each = prompt / rollout.group + completion
        capacity = int(free / (model.kv_bytes_per_token * tokens_each)) if free > 0 else 0
        running = max(1, min(samples, capacity))
        kv = running * tokens_each * model.kv_bytes_per_token
        memory = {"rollout KV cache": kv, "rollout workspace": workspace, "rollout weights": copy}
        return cls(
            model,
            own_steps(model, machine),
            machine.gpu.cpu.serial_slowdown if machine.gpu.cpu is not None else 1.0,
            engines,
            samples,
            rollout.group,
            prompt,
            completion,
            job.max_completion_tokens,
            running,
            {} if is_own else {name: size for name, size in memory.items() if size > 0},
        )

    @property
    def seconds(self) -> float:
        """Prefill of every prompt once per group, then decode. With completions spread evenly up to the maximum, the
        last part of a step runs with ever fewer of them."""
        prompts = self.prompt_tokens * -(-self.samples // self.group)
        prefill = self.steps.prompts_seconds(max(1.0, prompts), self.prompt_tokens)
        tokens = self.samples * self.completion_tokens
        steps = max(float(self.max_tokens), tokens / self.running + self.max_tokens / 2)
        context = self.prompt_tokens + self.completion_tokens / 2
        decode = self.steps.decode_seconds(max(1.0, tokens / steps), context)
        return self.slowdown * float(prefill + steps * decode)

    def plan(self, job: Job) -> RolloutPlan:
        assert job.rollout is not None
        return RolloutPlan(
            mode=job.rollout.mode,
            prompts=job.rollout.prompts,
            group=job.rollout.group,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            engines=self.engines,
            running=self.running,
            seconds=self.seconds,
            tokens_per_second=job.rollout.samples * self.completion_tokens / self.seconds,
            kv_bytes=self.running
            * (self.prompt_tokens / self.group + self.completion_tokens)
            * self.model.kv_bytes_per_token,
        )


def _forward_seconds(setting: Setting, candidate: Candidate, step_seconds: float) -> float:
    """Return the seconds of one forward pass over the rows of a step."""
    constants = np.exp(np.array(setting.profile.log_constants))
    terms = evaluation_terms(candidate.terms, candidate.layout, setting.model.global_batch_sequences)
    return float(compose(terms, constants).step_seconds) * step_seconds / candidate.step_seconds


def _further_passes(
    setting: Setting, candidate: Candidate, step_seconds: float, frozen: FrozenModels
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of compute and optimizer beyond one pass over the rows with one update, by part."""
    policy = setting.job.policy
    assert policy is not None
    forward = _forward_seconds(setting, candidate, step_seconds)
    constants = np.exp(np.array(setting.profile.log_constants))
    times = compose(candidate.terms, constants)
    scale = step_seconds / float(times.step_seconds)
    update = float(times.optimizer) * scale
    compute = {
        "further epochs": (policy.epochs - 1) * (step_seconds - update),
        "log-probabilities before the step": forward if policy.updates > 1 else 0.0,
        "reference": frozen.reference_scale * forward,
        "teacher": frozen.teacher_scale * forward,
    }
    return compute, {"further updates": (policy.updates - 1) * update}


def _reward_seconds(setting: Setting) -> float:
    """Return the seconds of all verdicts of a step, shared by the workers of all nodes."""
    job, cluster = setting.job, setting.cluster
    assert job.verify is not None
    assert job.rollout is not None
    workers = cluster.num_nodes * (job.verify.workers or max(1, cluster.instance.vcpus))
    each = sum(verdict_seconds(term) for term in job.reward)
    return job.rollout.samples * min(each, job.verify.limit) / workers


def verdict_seconds(term: RewardTerm) -> float:
    """Return the seconds of one verdict, assumed."""
    if term.model is not None:
        return 0.0  # scored by the trainer, see frozen_models
    return FUNCTION_SECONDS if term.verifier is None else VERDICT_SECONDS[term.verifier]


def _sync_seconds(setting: Setting, candidate: Candidate, engine: _Engine) -> tuple[float, str]:
    """Return the seconds until the rollouts have new weights, and how they get them."""
    job, layout, network = setting.job, candidate.layout, setting.machine.network
    assert job.rollout is not None
    if job.rollout.endpoint is not None:
        return 0.0, "none: the endpoint keeps its weights"
    lora = job.train.lora if job.train else None
    size = engine.model.weight_bytes * engine.model.tp
    if lora is not None:
        size = adapter_parameters(setting.shape, lora.rank) * PLAIN_BYTES[engine.model.precision]
    if job.rollout.mode == "separate":
        return engine.engines * point_to_point_seconds(size, False, network), "sending weights"
    shards = layout.fsdp * layout.pp
    if shards == 1:
        return 0.0, "none: shared weights"
    gathered = size / engine.model.tp
    return all_gather_seconds(gathered, group_of(shards, layout.tp * layout.cp, network), network), "gathering weights"


def _warnings(engine: _Engine, job: Job) -> list[str]:
    result = [
        f"rollouts are planned with {engine.completion_tokens:,.0f} tokens per completion, half of the maximum, and "
        f"{engine.prompt_tokens:,.0f} per prompt"
    ]
    if engine.running < engine.samples:
        result.append(
            f"the KV cache holds {engine.running:,} of the {engine.samples:,} samples of an engine at once; more GPUs, "
            "or a lower rollout.max_tokens, make rollouts faster"
        )
    judges = sum(term.verifier == "judge" for term in job.reward)
    if judges and job.rollout is not None:
        verdicts = judges * job.rollout.samples
        result.append(
            f"a judge is planned with {VERDICT_SECONDS['judge']:g} s per verdict, {verdicts:,} a step; what its "
            "endpoint charges is not in the dollars"
        )
    return result
