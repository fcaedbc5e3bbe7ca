"""Real runs of kind grpo on this machine: tiny models and prompts, and what their journals say was trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from waiting import wait_until

from craton import run as start_run_of
from craton.job import Job, load_job
from craton.ml.data.tokenizer import train_bpe
from craton.ml.posttraining.asynchronous.journal import RolloutJournal
from craton.ml.posttraining.asynchronous.selection import Frontier
from craton.orchestration import living_agents
from craton.orchestration.start import kill_run
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_lines

PROMPTS, GROUP, STALENESS = 4, 4, 2
MODEL = "{name: adder, layers: 2, hidden: 32, ffn_hidden: 64, heads: 4, vocab: 259, tied_embeddings: true}"


def rollout_job(
    folder: Path, name: str, rollout: str, steps: int = 8, more: str = "", nodes: int = 1, cluster: str = "local"
) -> Job:
    """A job whose completions are rewarded for their length; every checkpoint is kept."""
    if not (folder / "tokenizer").exists():
        train_bpe([], 259, folder / "tokenizer")
        rows = [{"prompt": f"{number}+{number}=", "answer": str(2 * number)} for number in range(200)]
        (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "length_reward.py").write_text(
            "def score(prompt, completion, row, transcript):\n    return float(len(completion))\n"
        )
    file = folder / f"{name}.yaml"
    file.write_text(
        f"""
        name: {name}
        kind: grpo
        model: {MODEL}
        data: {{path: {folder / "sums.jsonl"}, tokenizer: {folder / "tokenizer"}, sequence: 16}}
        policy: {{loss: grpo}}
        rollout: {{prompts: {PROMPTS}, group: {GROUP}, max_tokens: 6, {rollout}}}
        reward: "length_reward:score"
        verify: {{workers: 1, sandbox: "off"}}
        train: {{steps: {steps}, precision: fp32, learning_rate: 1e-3, initialize: random}}
        cluster: {cluster} x {nodes}
        layout: {{micro_batch: 4}}
        checkpoint: {{tiers: [{{to: shared, every_steps: 1}}]}}
        {more}
        """
    )
    return load_job(file)


@contextmanager
def running(job: Job) -> Iterator[RunDirectory]:
    """Start a run; kill what is left of it."""
    run = start_run_of(job).directory
    try:
        yield run
    finally:
        if living_agents(run):
            kill_run(run)


def wait_for_end(run: RunDirectory) -> None:
    wait_until(lambda: run.has("DONE") or run.has("FATAL"), lambda: f"{run.name} ends; {log_of(run)}", 600)
    assert run.has("DONE"), f"{run.marker_text('FATAL')}\n{log_of(run)}"
    wait_until(lambda: not living_agents(run), "its agents end")


def wait_for_step(run: RunDirectory, step: int) -> None:
    def is_there() -> bool:
        assert not run.has("FATAL"), f"{run.marker_text('FATAL')}\n{log_of(run)}"
        return any(line.get("step", 0) >= step and "run_reward" in line for line in metrics(run))

    wait_until(is_there, lambda: f"step {step} of {run.name}; {log_of(run)}", 600)


def log_of(run: RunDirectory) -> str:
    return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted((run.path / "logs").glob("*")))


def metrics(run: RunDirectory) -> list[dict[str, Any]]:
    return [line for path in (run.path / "metrics").glob("*.jsonl") for line in read_lines(path)[0]]


def events(run: RunDirectory, name: str) -> list[dict[str, Any]]:
    lines = [line for path in (run.path / "events").glob("*.jsonl") for line in read_lines(path)[0]]
    return [line for line in lines if line["event"] == name]


def check_journal(run: RunDirectory, steps: int, staleness: int | None = STALENESS) -> None:
    """Check that every prompt index was trained exactly once, and by which weights its tokens were sampled."""
    journal = RolloutJournal(run.path / "journal")
    before, trained = Frontier(), []
    for step in range(1, steps + 1):
        entry = journal.read(step)
        assert entry is not None, f"step {step} of {journal.steps()}"
        assert before.can_become(entry.frontier, entry.settled), f"step {step}: an index is lost, or trained twice"
        copies = [copy for group in entry.batch for copy in group.copies]
        assert len(copies) == PROMPTS * GROUP
        assert all(copy.verdict is not None and copy.tokens for copy in copies)
        ages = [step - 1 - version for copy in copies for version in copy.versions]
        assert staleness is None or 0 <= min(ages) <= max(ages) <= staleness
        trained += entry.settled
        before = entry.frontier
    assert sorted(trained) == list(range(steps * PROMPTS))
    assert before.pending == ()
