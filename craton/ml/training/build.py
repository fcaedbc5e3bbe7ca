"""Build everything a rank trains with, from a run directory and the environment.

The run directory says what (job.yaml) and how (plan.json); RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR/PORT identify
the rank. Without these variables there is one rank, so training can be started by hand.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from craton.agent.coordination import run_secret
from craton.errors import CratonError
from craton.infrastructure import MEMORY_FRACTION
from craton.job import Job, load_job
from craton.job.layout import Layout
from craton.job.sections import RESCUE, place_of, rescue_place
from craton.ml.collectives import local
from craton.ml.data import Loader, Source, open_source
from craton.ml.functions import FunctionError, load_function, search_folder, user_code
from craton.ml.kernels import check_device
from craton.ml.models import SCORE, Decoder, DecoderConfig, config_of_job, load_weights
from craton.ml.training import float8
from craton.ml.training.checkpoint import OWNER, Checkpointer, TierFolder, read_together
from craton.ml.training.checkpoint.peer import PeerSetup
from craton.ml.training.evaluate import evaluate
from craton.ml.training.guard import describe_out_of_memory, is_out_of_memory
from craton.ml.training.lora import add_adapters, base_only, initialize_adapters
from craton.ml.training.measure import Meter, PlannedStep
from craton.ml.training.objectives import objective_of
from craton.ml.training.optimizer import AdamW, Schedule
from craton.ml.training.orders import Order, connect
from craton.ml.training.parallel import Ranks, make_ranks, parallelize, parameter_dtype
from craton.ml.training.parts import MissingWeightsError, Parts, Recipe, TrainingInputs, TrainingSetup
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_regular, read_regular_text
from craton.telemetry.rank import LedgerClock, Recorder


class SetupError(CratonError):
    """This run cannot be trained."""


@dataclass(frozen=True)
class RankIdentity:
    """Identity of this process among the ranks."""

    rank: int
    world: int
    local_rank: int
    job_folder: Path  # searched for user code
    stop_at: int | None = None  # stop with a checkpoint after this step, before the end of training
    node: str = "node-0"
    generation: int = 0

    @classmethod
    def from_environment(cls) -> RankIdentity:
        def number(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        folder = Path(os.environ.get("CRATON_JOB_FOLDER") or ".").absolute()
        stop_at = number("CRATON_STOP_AT", 0) or None
        rank, local_world = number("RANK", 0), max(1, number("LOCAL_WORLD_SIZE", 1))
        node = os.environ.get("CRATON_NODE") or f"node-{rank // local_world}"
        generation = number("CRATON_GENERATION", 0)
        return cls(rank, number("WORLD_SIZE", 1), number("LOCAL_RANK", 0), folder, stop_at, node, generation)

    @classmethod
    def of(cls, order: Order) -> RankIdentity:
        """Identity from an agent's order; the rest comes from the environment."""
        return replace(
            cls.from_environment(),
            rank=order.rank,
            world=order.generation.world,
            local_rank=order.local_rank,
            node=order.node,
            generation=order.generation.number,
        )

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")


def inputs_from_source(setup: TrainingSetup) -> TrainingInputs:
    """Open the samples of the job's data, and its validation data if it evaluates."""
    job = setup.job
    assert job.train is not None
    validation = open_source(job, "validation", vocab=setup.vocabulary) if job.validates else None
    return inputs_of(setup, open_source(job, vocab=setup.vocabulary), validation)


def inputs_of(setup: TrainingSetup, source: Source, validation: Source | None) -> TrainingInputs:
    """Return a loader of these samples, and the objective's evaluation of the first of `validation`."""
    job, ranks = setup.job, setup.ranks
    assert job.train is not None
    wanted = job.train.evaluate

    def open_loader(start: int) -> Loader:
        sequences, micro_batch = job.global_batch_sequences, ranks.layout.micro_batch
        return Loader(source, sequences, ranks.data_rank, ranks.data_world, micro_batch, start)

    if wanted is None or validation is None:
        return TrainingInputs(open_loader, None)
    return TrainingInputs(
        open_loader, partial(evaluate, setup.model, validation, setup.objective, ranks, wanted.sequences)
    )


PRETRAINING = Recipe(objective_of, inputs_from_source)  # and supervised fine-tuning


def build(
    run: RunDirectory,
    place: RankIdentity,
    recorder: Recorder,
    clock: LedgerClock,
    order: Order | None = None,
    recipe: Recipe = PRETRAINING,
) -> Parts:
    """Build everything that `Trainer` needs. Starts the process group if there is more than one rank."""
    job = load_job(run.job_path)
    if job.train is None:
        raise SetupError(f"{run.job_path}: kind {job.kind} does not train")
    search_folder(place.job_folder)
    schedule = Schedule.of(job)
    objective = recipe.objective(job)
    device = place.device
    shares_gpu = device.type == "cuda" and use_gpu(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if place.world > 1 and order is not None:
        connect(order, backend, run_secret(run))
    elif place.world > 1 and not dist.is_initialized():
        dist.init_process_group(backend)
    layout = layout_of(job, run, place.world, order.generation.layout if order else None)
    ranks = make_ranks(layout, device, place.rank, place.world)
    clock.page.is_eager = device.type == "cpu" and job.train.compile is not True
    # before the model, so that an unusable tier is an error now and not at the first checkpoint
    folders = tier_folders(job, run, place.node, writes=True)
    continues = order is not None and (order.generation.is_planned or order.generation.broke_at > 0)
    checkpointer = Checkpointer(
        folders, place.rank, place.world, peer_setup(job, order), rescue_folder(run), continues=continues
    )
    prediction = PlannedStep.read(run.plan_path)
    missing_weights = ""
    try:
        try:
            model = build_model(job, ranks)
        except MissingWeightsError as error:
            if job.train.lora:  # its checkpoints have no base weights
                raise
            missing_weights = str(error)  # a checkpoint of the run itself has them too
            model = build_model(job, ranks, starts_at_random=True)
        optimizer = build_optimizer(job, ranks, model)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise describe_out_of_memory("start", ranks, job.train, prediction) from error
    # not every pipeline stage has the head
    vocabulary = model.config.shape.vocab if isinstance(model, Decoder) else cast("Tensor", model.head_weight).shape[0]
    setup = TrainingSetup(job, run, ranks, model, objective, vocabulary, recorder, clock, missing_weights)
    inputs = recipe.open_inputs(setup)
    if inputs.suite is None and job.train.evaluate and job.train.evaluate.suite:
        raise SetupError("train.evaluate.suite needs `python -m craton.ml.posttraining RUN`")
    return Parts(
        job=job,
        ranks=ranks,
        model=model,
        optimizer=optimizer,
        objective=objective,
        schedule=schedule,
        open_loader=inputs.open_loader,
        evaluate=inputs.evaluate,
        suite=inputs.suite,
        checkpointer=checkpointer,
        recorder=recorder,
        clock=clock,
        meter=Meter(recorder, ranks, schedule.steps, job.global_batch_tokens, prediction),
        shares_gpu=shares_gpu,
        directory=run,
        missing_weights=missing_weights,
    )


def use_gpu(device: torch.device) -> bool:
    """Make this GPU the default. Return whether ranks share it; this rank's tensors are then bound to its part of the
    memory."""
    torch.cuda.set_device(device)
    fraction = os.environ.get(MEMORY_FRACTION)
    if fraction:
        torch.cuda.set_per_process_memory_fraction(float(fraction), device)
    return bool(fraction)


def peer_setup(job: Job, order: Order | None) -> PeerSetup | None:
    """Return the keepers whose memory may hold state (the peer tier); None: there are none."""
    peer = job.checkpoint.peer
    if order is None or not order.keeper or peer == "off":
        return None
    generation = order.generation
    return PeerSetup(
        keeper=order.keeper,
        node=order.node,
        nodes=[node for node in generation.nodes for _ in range(generation.ranks_per_node)],
        keepers=generation.keepers,
        generation=generation.number,
        every_steps=job.checkpoint.peer_steps,
        every_seconds=job.checkpoint.peer_seconds,
    )


def layout_of(job: Job, run: RunDirectory, world: int, fields: Mapping[str, Any] | None = None) -> Layout:
    """Return the layout of the generation, else the planned one, else the job's, else FSDP over all ranks."""
    if fields is not None:
        return Layout(**fields)
    if run.plan_path.is_file():
        plan = json.loads(read_regular(run.plan_path))
        return Layout(**plan["layout"])
    return job.fixed_layout(world) or Layout(fsdp=world, precision=job.precision)


def build_model(job: Job, ranks: Ranks, starts_at_random: bool = False) -> nn.Module:
    """Build the job's model, distributed over the ranks, with random or published weights. A decoder is built on the
    meta device and filled once each rank holds only its own part; a user's model stays as built."""
    assert job.train is not None
    if job.weights_job is not None and job.trained_run is None:
        raise SetupError(f"the job does not state which run of {job.weights_job.name} has the weights to start from")
    shape = job.model_shape
    if shape is None:
        dtype = parameter_dtype(ranks.layout, job.train.weights)
        assert isinstance(job.model, str)
        function = load_function(job.model)
        with user_code(function, job.model):
            torch.manual_seed(job.train.seed)
            model = function(job)
        if not isinstance(model, nn.Module):
            raise FunctionError(f"{job.model} returned {type(model).__name__}, not a torch.nn.Module")
        for name in ("blocks", "head_weight"):
            if not hasattr(model, name):
                raise FunctionError(f"{job.model} returned a model without `{name}`; see examples/custom_model.py")
        _adapt(model, job, ranks)
        initialize_adapters(model, job.train.seed)
        model = parallelize(model.to(ranks.device, dtype), ranks, compiles(model, job, ranks))
        if job.trained_run is not None and not starts_at_random:
            with base_only(model):
                load_trained(model, job, ranks)
        return model
    return build_decoder(config_of_job(job), job, ranks, starts_at_random)


def build_decoder(config: DecoderConfig, job: Job, ranks: Ranks, starts_at_random: bool = False) -> Decoder:
    """Build a decoder of this config as the job says, on the meta device until each rank holds only its own part."""
    assert job.train is not None
    weights = job.weights_folder
    with torch.device("meta"):
        model = Decoder(config)
        _adapt(model, job, ranks)
    parallelize(model.to(parameter_dtype(ranks.layout, job.train.weights)), ranks, compiles(model, job, ranks))
    model.to_empty(device=ranks.device)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
    with base_only(model):
        if job.trained_run is not None and not starts_at_random:
            load_trained(model, job, ranks)
        elif weights is None:
            model.initialize(job.train.seed)
        else:
            load_weights(model, weights)
    initialize_adapters(model, job.train.seed)
    return model


def load_trained(model: nn.Module, job: Job, ranks: Ranks) -> None:
    """Fill the model of all ranks, without adapters, with the last weights of the run that trained them: neither its
    optimizer nor its step. A scalar head that the run did not train starts at zero."""
    assert job.trained_run is not None
    run = RunDirectory(job.trained_run)
    buffers = dict(model.named_buffers())
    persistent = {name: buffers[name] for name in model.state_dict() if name in buffers}
    tensors = {
        f"model.{name}": value.detach() for name, value in {**dict(model.named_parameters()), **persistent}.items()
    }
    try:
        trained = load_job(run.job_path)
        has_score = trained.model_shape is not None and config_of_job(trained).has_score
        if not has_score and (score := tensors.pop(f"model.{SCORE}", None)) is not None:
            local(score).zero_()
        last = (job.weights_job or trained).steps
        if last is None:
            raise SetupError("its job does not say how long it trains")
        read_together(tier_folders(trained, run), tensors, ranks.rank, ranks.layout.world, last)
    except CratonError as error:
        raise MissingWeightsError(f"the weights of the run {run.path} cannot be used: {error}") from None


def build_optimizer(job: Job, ranks: Ranks, model: nn.Module) -> AdamW:
    """Build AdamW over the trained parameters; in fp32 there are no separate masters."""
    assert job.train is not None
    if job.train.optimizer != "adamw":
        raise SetupError(f"optimizer {job.train.optimizer} can be planned but not trained yet; write optimizer: adamw")
    return AdamW(
        model.named_parameters(),
        job.train.betas,
        job.train.epsilon,
        job.train.weight_decay,
        job.train.weights if ranks.layout.precision != "fp32" else "fp32",
        job.train.seed,
        ranks.pipeline,
        model.copies if isinstance(model, Decoder) else (),
    )


def compiles(model: nn.Module, job: Job, ranks: Ranks) -> bool:
    """Whether blocks are compiled. `auto`: on a GPU, and only if our own kernels do not cover the blocks. Our kernels
    start at once, keep less for the backward pass and are as fast (docs/measurements.md)."""
    assert job.train is not None
    layout = ranks.layout
    if layout.tp * layout.cp * layout.ep > 1:
        if job.train.compile is True:
            raise SetupError(
                f"train.compile: true does not work with {layout}, where blocks call collectives: use compile: auto"
            )
        return False
    if job.train.compile != "auto":
        return job.train.compile
    covered = isinstance(model, Decoder) and all(block.has_own_kernels for block in model.blocks)
    return ranks.device.type == "cuda" and not covered


def tier_folders(job: Job, run: RunDirectory, node: str = "node-0", writes: bool = False) -> list[TierFolder]:
    """Return the folders of the job's checkpoint tiers for this run, as seen from a node. A writer outside the run
    directory is identified by the run's identity. Readers also get the rescued state, if there is one."""
    folders = []
    storage = job.cluster.file.storage if job.cluster.file else None
    for tier in job.checkpoint.places:
        place = place_of(tier, storage, run.path)
        folders.append(
            TierFolder(
                tier.to,
                place.place if place.is_url else Path(place.place),
                tier.every,
                tier.every_steps,
                tier.keep,
                node if place.is_node_local else None,
                run_identity(run) if writes and not place.is_inside_run else None,
                run.path if place.is_inside_run else None,
            )
        )
    rescue = rescue_folder(run)
    return folders if writes or not Path(rescue.path).is_dir() else [*folders, rescue]


def rescue_folder(run: RunDirectory) -> TierFolder:
    """Return where the run's last state goes if no lasting tier takes it."""
    return TierFolder(RESCUE, Path(rescue_place(run.path).place), keep=1, run=run.path)


def run_identity(run: RunDirectory) -> str:
    """Return the id that distinguishes this run from another of the same name: created once, kept in the run
    directory."""
    path = run.path / "checkpoints" / OWNER
    path.parent.mkdir(parents=True, exist_ok=True)
    identity = uuid.uuid4().hex
    fresh = path.with_name(f".{OWNER}.{identity}")
    try:
        fresh.write_text(identity, encoding="utf-8")
        with suppress(FileExistsError):  # atomic, so that the first rank wins
            os.link(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
    return read_regular_text(path, below=run.path).strip()


def _adapt(model: nn.Module, job: Job, ranks: Ranks) -> None:
    """Convert layers to LoRA or fp8 as the job says, before the model is distributed."""
    assert job.train is not None
    if job.train.lora and job.fp8:
        raise SetupError("train.lora and precision fp8 cannot be combined; use precision bf16 with adapters")
    if job.train.lora:
        add_adapters(model, job.train.lora)
    if job.fp8:
        check_device(ranks.device)
        float8.convert(model, job.fp8)
