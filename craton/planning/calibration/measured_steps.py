"""Measured steps of Craton's own training loop: the data behind the `craton` profile.

Each row of data/craton_runs.json is one steady run. It becomes a job, whose plan must agree with the measurement, and a
case of the fit, like a published run of any other stack. A file without rows leaves the profile at its priors.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from craton.infrastructure.catalog import gpu
from craton.job import Job, parse_job
from craton.job.layout import Layout, Precision, Recompute
from craton.job.sections import Weights
from craton.planning.calibration.cases import Case, CaseFileError, CaseMachine, data_folder
from craton.planning.calibration.profiles import STACKS, UNKNOWN

NETWORK_BYTES_PER_SECOND = 50e9  # per GPU, for rows with several GPUs: the usual rail of its generation
NODE_GPUS = 8


class OwnRun(BaseModel):
    """One measured run. `model` has the format of a job file: a preset, or inline numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""
    model: str | dict[str, object]
    sequence: Annotated[int, Field(gt=0)]
    micro_batch: Annotated[int, Field(gt=0)]
    precision: Precision = "bf16"
    weights: Weights = "fp32"
    recompute: Recompute = "none"
    gpus: Annotated[int, Field(gt=0)] = 1
    gpu: str
    tokens_per_second: Annotated[float, Field(gt=0)]
    memory_gb: Annotated[float, Field(gt=0)]  # 10⁹ bytes, peak allocated

    @property
    def label(self) -> str:
        return (
            self.name or f"{self.model} {self.micro_batch} x {self.sequence} {self.precision}, weights {self.weights}"
        )

    @property
    def step_seconds(self) -> float:
        return self.gpus * self.micro_batch * self.sequence / self.tokens_per_second

    def job(self) -> Job:
        """Return this run as a job: one step of one micro-batch per GPU."""
        document = {
            "name": "measured",
            "kind": "pretrain",
            "model": self.model,
            "data": {"sequence": self.sequence},
            "train": {
                "global_batch_sequences": self.gpus * self.micro_batch,
                "steps": 1000,
                "precision": self.precision,
                "weights": self.weights,
            },
            "cluster": {
                "name": "measured",
                "hardware": {
                    "name": "measured",
                    "gpu": self.gpu,
                    "num_gpus": self.gpus,
                    "network_bytes_per_second": self.gpus * NETWORK_BYTES_PER_SECOND,
                },
                "nodes": 1,
            },
            "layout": {"fsdp": self.gpus, "micro_batch": self.micro_batch, "recompute": self.recompute},
        }
        return parse_job(json.dumps(document), name=self.label)

    def case(self) -> Case:
        job, card = self.job(), gpu(self.gpu)
        shape = job.model_shape
        assert shape is not None, "a row names a model whose numbers are known"
        node_gpus = min(self.gpus, NODE_GPUS)
        return Case(
            id=self.label,
            family=UNKNOWN,
            release="",
            quality="A",
            kind="moe" if shape.is_moe else "dense",
            dup_group=self.label,
            machine=CaseMachine(card.name, self.gpus, node_gpus, node_gpus, NETWORK_BYTES_PER_SECOND, 0),
            shape=shape,
            layout=Layout(
                fsdp=self.gpus, micro_batch=self.micro_batch, recompute=self.recompute, precision=self.precision
            ),
            sequence=self.sequence,
            global_batch_sequences=self.gpus * self.micro_batch,
            lora=False,
            traits=STACKS[UNKNOWN],
            measured_step_seconds=self.step_seconds,
            weights=self.weights,
        )


def load_own_runs(path: str | Path) -> list[OwnRun]:
    """Load the rows of a file; CaseFileError names an invalid row."""
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))["runs"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CaseFileError(f'{path}: expected an object with a list under "runs": {error}') from None
    result = []
    for position, row in enumerate(rows, start=1):
        try:
            result.append(OwnRun.model_validate(row))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise CaseFileError(f"{path}: run {position}: {where}: {first['msg']}") from None
    return result


@lru_cache(maxsize=1)
def own_runs() -> tuple[OwnRun, ...]:
    return tuple(load_own_runs(data_folder() / "craton_runs.json"))
