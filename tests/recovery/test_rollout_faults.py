"""A run of kind grpo whose ranks are killed while they generate, verify and train ends like one that nothing happened
to: the same rewards and losses in every step, and the same weights, to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from rehearsed import events, fired, last_words, losses, wait_until
from rollout_jobs import FOLDER, byte_tokenizer, job_text
from torch import Tensor

from craton.bench.recovery.rehearsal import Rehearsal, running
from craton.ml.export import open_model
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_lines

STEPS = 8
KILLS = (
    "kill rank=1@during=rollout,step=2",
    "kill rank=0@during=reward,step=4",
    "kill rank=1@during=productive,step=5",
    "kill rank=0@during=sync,step=7",
)


@dataclass(frozen=True)
class RolloutRehearsal(Rehearsal):
    """Two nodes with one rank each; every step has four prompts, and two optimizer updates."""

    nodes: int = 2
    ranks_per_node: int = 1
    steps: int = STEPS
    tokenizer: Path = Path()
    environment: Mapping[str, str] = field(default_factory=lambda: {"CRATON_JOB_FOLDER": str(FOLDER)})
    checkpoint: str = "{peer: 1 steps, tiers: [{to: shared, every_steps: 3}]}"

    def job_text(self) -> str:
        return job_text(
            self.tokenizer,
            self.name,
            self.steps,
            policy="{loss: grpo, minibatches: 2, kl: 0.05}",
            rollout="filter: equal",
            reward="rare_reward",
            cluster=f"local x {self.nodes}",
            rest=f"checkpoint: {self.checkpoint}\nrecover: {self.recover}\n",
        )


def rewards_of(run: RunDirectory) -> dict[int, float]:
    """step → the reward of the last time that it was done."""
    lines = [line for path in (run.path / "metrics").glob("*.jsonl") for line in read_lines(path)[0]]
    ordered = sorted((line for line in lines if "run_reward" in line), key=lambda line: float(line["time"]))
    return {int(line["step"]): line["run_reward"] for line in ordered}


def weights_of(run: RunDirectory) -> dict[str, Tensor]:
    weights = open_model(run.path).weights()
    return {name: weights[name].clone() for name in weights}


def finished(root: Path, rehearsal: RolloutRehearsal) -> RunDirectory:
    with running(root, rehearsal) as run:
        wait_until(lambda: run.has("DONE") or run.has("FATAL"), f"{run.name} ends", run)
        assert not run.has("FATAL"), run.marker_text("FATAL") + last_words(run)
        return run


@pytest.mark.slow
def test_killed_ranks_leave_no_trace_in_the_weights(runs: Path, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "tokenizer")
    calm = finished(runs, RolloutRehearsal("rollouts-calm", tokenizer=tokenizer))
    broken = finished(runs, RolloutRehearsal("rollouts-broken", tokenizer=tokenizer, chaos=KILLS))
    assert len(fired(broken)) == len(KILLS), last_words(broken)
    assert len(events(broken, "recovered")) >= len(KILLS) - 1, last_words(broken)
    assert losses(broken) == losses(calm)
    found = rewards_of(broken)
    assert found
    assert {step: rewards_of(calm)[step] for step in found} == found
    expected = weights_of(calm)
    different = [name for name, weight in weights_of(broken).items() if not torch.equal(weight, expected[name])]
    assert not different


@pytest.mark.slow
def test_fewer_ranks_continue_where_two_stopped(runs: Path, tmp_path: Path) -> None:
    """The prompts of every step are those of the calm run, whatever the number of ranks; sums are rounded otherwise."""
    tokenizer = byte_tokenizer(tmp_path / "tokenizer")
    rehearsal = RolloutRehearsal(
        "rollouts-shrunk", tokenizer=tokenizer, min_nodes=1, layouts={1: {}}, chaos=("lose-node node-1@step=4",)
    )
    shrunk = finished(runs, rehearsal)
    assert events(shrunk, "generation_started")[-1]["world"] == 1
    assert sorted(losses(shrunk)) == list(range(1, STEPS + 1))
