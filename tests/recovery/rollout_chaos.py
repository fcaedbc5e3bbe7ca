"""Faults of reinforcement learning, drawn from a seed, and what must be true of a run that they hit.

Six kinds: a trainer's rank, an agent, a rollout server, the verifiers' workers, a byte of the journal, a transfer of
weights. Each case draws its mode, phase, step and victim, and one in three a second fault while it recovers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rehearsed import events, last_words, wait_until
from rollout_jobs import byte_tokenizer
from torch import Tensor

from craton import run as start_run_of
from craton.api import Run
from craton.job import Job, load_job
from craton.ml.export import open_model
from craton.orchestration import living_agents
from craton.orchestration.changes import fired_faults
from craton.orchestration.start import kill_run
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_lines

SEED = 23
PHASES = ("rollout", "reward", "sync", "productive", "checkpoint", "saving")
KINDS = {"rank": 7, "agent": 7, "server": 7, "verifier": 6, "journal": 6, "transfer": 7}  # kind → cases
MODES: dict[str, Sequence[str]] = {
    "rank": ("sync", "overlap", "separate"),
    "agent": ("sync", "overlap", "separate"),
    "server": ("separate",),
    "verifier": ("sync", "overlap", "separate"),
    "journal": ("overlap", "separate"),
    "transfer": ("separate", "sync", "separate", "overlap", "separate"),
}
# kind → faults; agents are killed in phases that last, for they are not traps of the rank itself
WAYS: dict[str, Sequence[str]] = {
    "rank": (
        *(f"kill rank={{rank}}@during={phase},step={{step}}" for phase in PHASES),
        "kill rank={rank}@step={last}",
    ),
    "agent": (
        "kill agent={node}@during=rollout,step={step}",
        "kill agent={node}@during=reward,step={step}",
        "kill agent={node}@step={step}",
        "kill agent={node}@step={last}",
    ),
    "server": ("kill rank=0,member={server}@step={tokens}", "kill member={server}@step={tokens}"),
    "verifier": ("kill verifier={rank}@during=reward,step={step}",),
    "journal": ("corrupt journal,how=flip@step={step}", "corrupt journal,how=cut@step={step}"),
    "transfer": (
        "kill rank=0@during=transfer,step={step}",
        "kill rank=0,member={server}@during=transfer,step=1",
        "corrupt weights@step={step}",
    ),
}
STEPS, PROMPTS, GROUP, STALENESS = 6, 4, 2, 2
END_SECONDS = 300.0  # of a run on a busy machine
REWARD = """\
import time

def score(prompt, completion, row, transcript):
    # Steps last, and a fault can meet a sample that is being verified.
    time.sleep({seconds})
    return sum(map(ord, completion)) % 17 / 16
"""


@dataclass(frozen=True)
class RolloutFaults:
    """A run and its faults. `following` is ordered once the first fault has happened."""

    name: str
    kind: str
    mode: str
    faults: tuple[str, ...]
    nodes: int = 1
    workers: int = 1
    following: str = ""
    checkpoint: str = "{peer: 1 steps, tiers: [{to: shared, every_steps: 2}]}"
    reward_seconds: float = 0.05

    def job(self, folder: Path) -> Job:
        """The job, in a folder of its own."""
        byte_tokenizer(folder / "tokenizer")
        rows = [{"prompt": f"{number}+{number}=", "answer": str(2 * number)} for number in range(200)]
        (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "slow_reward.py").write_text(REWARD.format(seconds=self.reward_seconds))
        servers = f", workers: {self.workers}" if self.mode == "separate" else ""
        staleness = f", staleness: {STALENESS}" if self.mode != "sync" else ""
        file = folder / f"{self.name}.yaml"
        file.write_text(
            f"""
            name: {self.name}
            kind: grpo
            model: {{name: adder, layers: 2, hidden: 32, ffn_hidden: 64, heads: 4, vocab: 259, tied_embeddings: true}}
            data: {{path: {folder / "sums.jsonl"}, tokenizer: {folder / "tokenizer"}, sequence: 16}}
            policy: {{loss: grpo}}
            rollout: {{prompts: {PROMPTS}, group: {GROUP}, max_tokens: 6, mode: {self.mode}{servers}{staleness}}}
            reward: "slow_reward:score"
            verify: {{workers: 1, sandbox: "off"}}
            train: {{steps: {STEPS}, precision: fp32, learning_rate: 1e-2, initialize: random}}
            cluster: local x {self.nodes}
            layout: {{micro_batch: 4}}
            checkpoint: {self.checkpoint}
            chaos: {json.dumps(list(self.faults))}
            """
        )
        return load_job(file)


def drawn_cases(seed: int = SEED) -> list[RolloutFaults]:
    """The cases of a seed, by kind. Of modes, phases and ways, each comes once before any comes again."""
    return [case for kind, count in KINDS.items() for case in _drawn(kind, count, random.Random(f"{kind} {seed}"))]


def _drawn(kind: str, count: int, draw: random.Random) -> Iterator[RolloutFaults]:
    modes, ways = _deck(draw, MODES[kind], count), _deck(draw, WAYS[kind], count)
    for number, (mode, way) in enumerate(zip(modes, ways, strict=True)):
        # An agent is started again by that of another node, or by what looks after members.
        nodes = 1 if mode == "separate" else 2 if kind == "agent" else draw.choice((1, 2))
        workers = draw.choice((1, 2))
        if kind == "transfer" and mode != "separate":
            way = "kill rank={rank}@during=sync,step={step}"  # the engine of the same process takes the weights
        is_late = "{last}" in way
        fault = way.format(
            rank=draw.randrange(nodes),
            node=f"node-{draw.randrange(nodes)}",
            server=f"rollout-{draw.randrange(workers)}",
            step=draw.randrange(2, STEPS - 1),
            last=STEPS,
            tokens=draw.randrange(3, 15),  # steps of a server
        )
        following, checkpoint = "", RolloutFaults.checkpoint
        if kind == "journal":
            # Without checkpoints between, the run goes on from its beginning and reads every entry again.
            checkpoint = "{peer: off, tiers: [{to: shared, every_steps: 100}]}"
        if kind == "journal" or (number % 3 == 1 and not is_late):
            following = f"kill rank={draw.randrange(nodes)}"
        yield RolloutFaults(f"{kind}-{number}", kind, mode, (fault,), nodes, workers, following, checkpoint)


def _deck(draw: random.Random, options: Sequence[str], count: int) -> list[str]:
    drawn: list[str] = []
    while len(drawn) < count:
        drawn += draw.sample(options, len(options))
    return drawn[:count]


@contextmanager
def ended(case: RolloutFaults, folder: Path) -> Iterator[RunDirectory]:
    """A run of a case that has completed, after all its faults."""
    run = start_run_of(case.job(folder)).directory
    try:
        wanted = list(case.faults)
        if case.following:
            wait_until(lambda: fired_faults(run) or is_over(run), f"the first fault of {case}", run, END_SECONDS)
            assert not is_over(run), f"it ended before {case}{last_words(run)}"
            handle = Run(run)
            handle.inject(handle.draft_faults([case.following]))
            wanted.append(case.following)
        wait_until(lambda: is_over(run), f"{run.name} ends: {case}", run, END_SECONDS)
        assert run.has("DONE"), f"{case}: {run.marker_text('FATAL')}{last_words(run)}"
        wait_until(lambda: not living_agents(run), "its agents end", run)
        missing = [fault for fault in wanted if fault not in fired_faults(run)]
        assert not missing, f"{missing} did not happen{last_words(run)}"
        yield run
    finally:
        if living_agents(run):
            kill_run(run)


def is_over(run: RunDirectory) -> bool:
    return run.has("DONE") or run.has("FATAL")


def check_samples(run: RunDirectory, mode: str) -> None:
    """Check that every copy of every prompt of the calm order was trained exactly once, and each had its verdict."""
    steps = trained(run)
    assert sorted(steps) == list(range(1, STEPS + 1)), last_words(run)
    indices = [index for step in sorted(steps) for index in steps[step]]
    expected = list(range(STEPS * PROMPTS))
    assert (indices if mode == "sync" else sorted(indices)) == expected, f"{steps}{last_words(run)}"
    assert {copies for step in steps.values() for copies in step.values()} == {GROUP}
    recorded = metrics(run)
    assert {line["run_verifier_failure_share"] for line in recorded if "run_verifier_failure_share" in line} == {0.0}
    ages = [line["run_max_staleness"] for line in recorded if "run_max_staleness" in line]
    assert max(ages, default=0.0) <= STALENESS


def trained(run: RunDirectory) -> dict[int, dict[int, int]]:
    """step → prompt index → copies that were trained: of the last time that the step was done."""
    lines = [line for path in (run.path / "samples").glob("*.jsonl") for line in read_lines(path)[0]]
    ordered = sorted((line for line in lines if "trained" in line), key=lambda line: float(line["time"]))
    return {line["step"]: {int(index): copies for index, copies in line["trained"].items()} for line in ordered}


def metrics(run: RunDirectory) -> list[dict[str, Any]]:
    return [line for path in (run.path / "metrics").glob("*.jsonl") for line in read_lines(path)[0]]


def weights_of(run: RunDirectory) -> dict[str, Tensor]:
    weights = open_model(run.path).weights()
    return {name: weights[name].clone() for name in weights}


def check_kind(case: RolloutFaults, run: RunDirectory) -> None:
    """Check that the fault of a kind had its consequence: a fault without one tests nothing."""
    if case.kind == "journal":
        assert events(run, "journal_damaged"), last_words(run)
    if case.kind in ("server", "transfer") and case.mode == "separate":
        assert events(run, "rollout_server_lost") or events(run, "recovered"), last_words(run)
    if case.kind in ("rank", "agent"):
        assert len(events(run, "generation_started")) > 1, last_words(run)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
