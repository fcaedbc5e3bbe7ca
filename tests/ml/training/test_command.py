"""One rank as the agent starts it: `python -m craton.ml.training RUN`, with a user's own code and a real SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from gang import Gang
from tiny import Records
from waiting import PATIENCE_SECONDS, wait_until

from craton.job import dump_job, load_job, parse_job
from craton.ml.training import Trainer
from craton.ml.training.build import RankIdentity, build
from craton.ml.training.checkpoint import CheckpointError
from craton.ml.training.checkpoint.folder_tier import FolderTier
from craton.telemetry import RunDirectory
from craton.telemetry.rank import LedgerClock

EXAMPLES = Path(__file__).parents[3] / "examples"


def make_run(root: Path, text: str, name: str) -> RunDirectory:
    run = RunDirectory.create(root, name)
    run.job_path.write_text(dump_job(parse_job(text)), encoding="utf-8")
    return run


def start(run: RunDirectory, folder: Path, **environment: str) -> subprocess.Popen[str]:
    names = {"OMP_NUM_THREADS": "1", "CRATON_JOB_FOLDER": str(folder), **environment}
    return subprocess.Popen(
        [sys.executable, "-m", "craton.ml.training", str(run.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **names},
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def adder(steps: int) -> str:
    """The example of an own source, on a smaller model."""
    return f"""
        name: adder
        kind: pretrain
        model: {{layers: 1, hidden: 32, ffn_hidden: 64, heads: 2, vocab: 16, tied_embeddings: true}}
        data: {{source: "custom_source:sums", sequence: 32}}
        train: {{global_batch_sequences: 4, steps: {steps}, precision: fp32, learning_rate: 3e-3}}
        cluster: local
        """


@pytest.mark.slow
def test_sigterm_saves_and_the_run_goes_on_where_it_was(tmp_path: Path) -> None:
    run = make_run(tmp_path, adder(100_000), "adder")
    process = start(run, EXAMPLES)

    def has_trained() -> bool:
        assert process.poll() is None, process.communicate()
        return len(lines(run.metrics_path("node-0"))) >= 20

    wait_until(has_trained, "20 steps")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, err
    assert "training stopped at step" in out
    last = lines(run.metrics_path("node-0"))[-1]["step"]
    assert (run.checkpoints("shared") / f"step-{last:08d}" / "COMPLETE").exists()

    process = start(run, EXAMPLES, CRATON_STOP_AT=str(last + 3), CRATON_GENERATION="1")
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, err
    events = {line["event"]: line for line in lines(run.events_path("node-0"))}
    assert events["restored"]["step"] == last
    assert events["restored"]["next_sample"] == 4 * last
    assert events["summary"]["outcome"] == "stopped"
    measured = lines(run.metrics_path("node-0"))
    assert [line["step"] for line in measured] == list(range(1, last + 4)), "every step once"
    assert measured[-1]["run_loss"] < measured[0]["run_loss"]
    booked = [sum(line["seconds"].values()) for line in lines(run.ledger_path("node-0")) if line["generation"] == 1]
    assert sum(booked) > 0.5 * sum(line["run_step_seconds"] for line in measured[last:])


def test_a_function_that_raises_shows_its_traceback_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "own_objective.py").write_text("def wrong(log_probs, batch):\n    return log_probs.total(), {}\n")
    (tmp_path / "custom_source.py").write_text((EXAMPLES / "custom_source.py").read_text(encoding="utf-8"))
    text = adder(3).replace("cluster:", "objective: own_objective:wrong\n        cluster:")
    run = make_run(tmp_path / "runs", text, "wrong")
    process = start(run, tmp_path)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert "return log_probs.total(), {}" in err, "the user's own line, as Python shows it"
    place = f"({tmp_path}/own_objective.py:2)"
    assert err.splitlines()[-1].startswith("craton: own_objective:wrong raised AttributeError: 'Tensor' object has no")
    assert err.splitlines()[-1].endswith(place)


def test_a_tier_that_cannot_be_written_is_said_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = adder(3).replace("cluster:", f"checkpoint: {{tiers: [{{to: {tmp_path}/file}}]}}\n        cluster:")
    run = make_run(tmp_path / "runs", text, "nowhere")
    with pytest.raises(
        CheckpointError, match=r"tier .*/file cannot be used: .*: Not a directory; set checkpoint.tiers"
    ):
        build(run, RankIdentity(0, 1, 0, EXAMPLES), Records(), LedgerClock())  # type: ignore[arg-type]


def test_a_tier_is_made_ready_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, prepare = [], FolderTier.prepare

    def counted(tier: FolderTier) -> None:
        made.append(tier.folder.path)
        prepare(tier)

    monkeypatch.setattr(FolderTier, "prepare", counted)
    text = adder(3).replace("cluster:", f"checkpoint: {{tiers: [{{to: {tmp_path}/tier}}]}}\n        cluster:")
    run = make_run(tmp_path / "runs", text, "once")
    build(run, RankIdentity(0, 1, 0, EXAMPLES), Records(), LedgerClock())  # type: ignore[arg-type]
    assert len(made) == 1


@pytest.mark.parametrize("name", ["model", "objective", "source"])
def test_every_example_can_be_read_and_names_its_function(name: str) -> None:
    job = load_job(EXAMPLES / f"custom-{name}.yaml")
    function = {"model": job.model, "objective": job.objective, "source": job.data.source}[name]
    assert str(function).startswith(f"custom_{name}:")


def train_own_everything(path: Path, world: int) -> list[float]:
    run = RunDirectory(path)
    recorder = Records()
    place = RankIdentity(dist.get_rank() if dist.is_initialized() else 0, world, 0, EXAMPLES)
    trainer = Trainer(build(run, place, recorder, LedgerClock()))  # type: ignore[arg-type]
    assert trainer.fit() == "done"
    return list(recorder.losses.values())


@pytest.mark.slow
def test_own_model_objective_and_source_train_together_on_any_number_of_ranks(gang: Gang, tmp_path: Path) -> None:
    text = f"""
        kind: pretrain
        model: custom_model:build
        data: {{source: "custom_source:sums", sequence: 32}}
        train: {{global_batch_sequences: 8, steps: 6, precision: fp32, learning_rate: 3e-3}}
        objective: custom_objective:focal
        cluster: local x 2
        checkpoint: {{tiers: [{{to: {tmp_path}/saved}}]}}
        """
    one = gang.run(train_own_everything, make_run(tmp_path, text, "one").path, 1, ranks=1)[0]
    two = gang.run(train_own_everything, make_run(tmp_path, text, "two").path, 2, ranks=2)[0]
    assert two == pytest.approx(one, rel=1e-5)
    assert one[-1] < one[0] - 0.5
    assert (tmp_path / "saved" / "two" / "step-00000006" / "COMPLETE").exists()
