"""Jobs of the bench on Slurm."""

from __future__ import annotations

from collections.abc import Callable

from craton.bench.why.faults.fault import JobRecipe
from craton.bench.why.faults.running import RunningJob
from craton.bench.why.faults.slurm import LocalSlurm


def slurm_recipe(
    program: str, nodes: int = 2, prepare: Callable[[RunningJob], None] | None = None, **run: object
) -> JobRecipe:
    """A command on Slurm that prints its steps; `run` is the section of that name."""
    return JobRecipe(
        kind="command",
        nodes=nodes,
        keys={
            "command": ["{python}", f"{program}.py"],
            "progress": {"pattern": "step {step} loss {loss}"},
            "run": run,
        },
        program=program,
        on="slurm",
        prepare=prepare,
        settled_step=10,
    )


def slurm_of(job: RunningJob) -> LocalSlurm:
    assert job.slurm is not None, "the recipe runs on Slurm"
    return job.slurm
