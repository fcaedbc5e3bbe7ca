"""A training small enough for a test: a decoder of two layers on text that can be learned, built without a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from craton.job import Job, parse_job
from craton.job.layout import Layout
from craton.job.model import ModelShape
from craton.ml.collectives import Peers
from craton.ml.data import Loader
from craton.ml.data.sample import Sample, window
from craton.ml.models import DecoderConfig
from craton.ml.models.config import RoutingConfig
from craton.ml.training import Parts, Schedule, Trainer, build_decoder, build_optimizer
from craton.ml.training.checkpoint import Checkpointer, TierFolder
from craton.ml.training.checkpoint.peer import PeerSetup
from craton.ml.training.evaluate import evaluate
from craton.ml.training.measure import Meter
from craton.ml.training.objectives import CROSS_ENTROPY, Objective
from craton.ml.training.parallel import make_ranks, parallelize, parameter_dtype
from craton.telemetry.rank import LedgerClock

torch.set_num_threads(1)  # the machine's other cores run other tests

VOCABULARY = 128
SEQUENCE = 32
GLOBAL_BATCH = 8

SHAPE = ModelShape("tiny", 2, 32, 64, 4, 2, 8, VOCABULARY, tied_embeddings=True)
MOE_SHAPE = ModelShape(
    "tiny-moe", 2, 32, 64, 4, 2, 8, VOCABULARY, experts=4, top_k=2, moe_ffn_hidden=32, shared_experts=1, dense_layers=1
)


class Text:
    """Documents in which the next token follows from the last by a rule, so that a model can learn something."""

    sequence = SEQUENCE
    epoch_samples = None

    def sample(self, index: int) -> Sample:
        random = np.random.default_rng(index)
        start = int(random.integers(VOCABULARY))
        tokens = (start + 7 * np.arange(SEQUENCE + 1) + random.integers(0, 2, SEQUENCE + 1)) % VOCABULARY
        boundary = np.array([int(random.integers(8, SEQUENCE - 8))])
        return window(tokens.astype(np.int64), boundary)


@dataclass
class Records:
    """A recorder that remembers."""

    metrics_by_step: dict[int, dict[str, Any]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    events: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    recording_seconds: float = 0.0

    def metrics(self, step: int, **values: Any) -> None:
        self.metrics_by_step.setdefault(step, {}).update(values)
        self.steps.append(step)

    def event(self, name: str, step: int = 0, **fields: Any) -> None:
        self.events.append((name, step, fields))

    def ledger(self, step: int, seconds: dict[str, float]) -> None:
        for kind, value in seconds.items():
            self.seconds[kind] = self.seconds.get(kind, 0.0) + value

    @property
    def norms(self) -> dict[int, float]:
        return {
            step: each["run_gradient_norm"]
            for step, each in self.metrics_by_step.items()
            if "run_gradient_norm" in each
        }

    @property
    def losses(self) -> dict[int, float]:
        return {step: each["run_loss"] for step, each in self.metrics_by_step.items() if "run_loss" in each}


def tiny_job(steps: int = 6, **train: Any) -> Job:
    """A job of these steps; `train` adds to its section."""
    options = {"precision": "fp32", "learning_rate": "1e-2", **train}
    section = ", ".join(f"{name}: {value}" for name, value in options.items())
    return parse_job(
        f"""
        name: tiny
        kind: pretrain
        model:
          {{layers: 2, hidden: 32, ffn_hidden: 64, heads: 4, kv_heads: 2, vocab: {VOCABULARY}, tied_embeddings: true}}
        data: {{sequence: {SEQUENCE}, validation: other}}
        train: {{global_batch_sequences: {GLOBAL_BATCH}, steps: {steps}, {section}}}
        cluster: local
        """
    )


def make_trainer(
    job: Job,
    layout: Layout | None = None,
    folder: Path | None = None,
    source: Any = None,
    objective: Objective = CROSS_ENTROPY,
    config: DecoderConfig | None = None,
    every_steps: int | None = None,
    validation: Any = None,
    model: nn.Module | None = None,
    steps: int | None = None,
    device: str = "cpu",
    peer: PeerSetup | None = None,
) -> tuple[Trainer, Records]:
    """A trainer of this rank; `steps` ends it before the schedule does."""
    assert job.train is not None
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    layout = layout or Layout(fsdp=world, precision=job.precision)
    ranks = make_ranks(layout, torch.device(device), rank, world)
    if model is None:
        model = build_decoder(config or DecoderConfig(SHAPE), job, ranks)
    else:
        model.to(device, parameter_dtype(layout, job.train.weights))
        parallelize(model, ranks, job.train.compile is True)
    records = Records()
    source = source or Text()

    def open_loader(start: int) -> Loader:
        return Loader(source, GLOBAL_BATCH, ranks.data_rank, ranks.data_world, layout.micro_batch, start)

    wanted = job.train.evaluate
    schedule = Schedule.of(job)
    tiers = [TierFolder("shared", folder, every_steps=every_steps)] if folder else []
    parts = Parts(
        job=job,
        ranks=ranks,
        model=model,
        optimizer=build_optimizer(job, ranks, model),
        objective=objective,
        schedule=schedule,
        open_loader=open_loader,
        evaluate=partial(evaluate, model, validation, objective, ranks, wanted.sequences) if wanted else None,
        checkpointer=Checkpointer(tiers, rank, world, peer),
        recorder=records,  # type: ignore[arg-type]
        clock=LedgerClock(),
        meter=Meter(records, ranks, schedule.steps, GLOBAL_BATCH * SEQUENCE, None),  # type: ignore[arg-type]
    )
    trainer = Trainer(parts)
    if steps is not None:
        _stop_after(trainer, steps)
    return trainer, records


def _stop_after(trainer: Trainer, steps: int) -> None:
    take = trainer._load

    def load() -> Any:
        if trainer.step == steps:
            trainer.stop()
        return take()

    trainer._load = load  # type: ignore[method-assign]


def moe_config() -> DecoderConfig:
    return DecoderConfig(MOE_SHAPE, routing=RoutingConfig(auxiliary_loss=0.01, bias_update=0.001))


def silenced(peers: Peers | None, operation: str) -> Any:
    """A context in which one operation of these peers brings nothing from others."""
    assert peers is not None
    exchange = peers.start_exchange

    def silent_exchange(x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        arrived = exchange(x, received, sent)
        return torch.zeros_like(arrived) if x.is_floating_point() else arrived  # numbers of rows must be right

    silent: dict[str, Callable[..., Tensor]] = {
        "start_gather": lambda x: torch.cat([x] * peers.size),
        "start_scatter_sum": lambda x: x.chunk(peers.size)[peers.rank].clone(),
        "start_exchange": silent_exchange,
        "start_sum": lambda x, _operation="sum": x.clone(),
    }
    return mock.patch.object(peers, operation, silent[operation])
