"""The loss of every step is recorded, also of those that were done right before a rank or an agent was killed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny import make_trainer, tiny_job

from craton.job.layout import Layout
from craton.ml.training import Trainer
from craton.ml.training.measure import record_missing
from craton.telemetry import RunDirectory
from craton.telemetry.files import read_lines
from craton.telemetry.rank import Recorder

LAYOUT = Layout(micro_batch=8, precision="fp32")


class KilledError(Exception):
    """Stands for SIGKILL: nothing that the loop would do at its end happens."""


def losses(run: RunDirectory) -> dict[int, float]:
    return {line["step"]: line["run_loss"] for line in read_lines(run.metrics_path("node-0"))[0]}


def trainer_of(run: RunDirectory, steps: int, recorder: Recorder) -> Trainer:
    trainer, _ = make_trainer(tiny_job(steps), LAYOUT, run.checkpoints("shared"), every_steps=4)
    trainer.parts = replace(trainer.parts, directory=run, recorder=recorder)
    trainer.saves.parts = trainer.parts
    trainer.parts.meter._recorder = recorder
    return trainer


@pytest.mark.parametrize("lost", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_a_restore_records_the_steps_whose_lines_were_lost(tmp_path: Path, lost: int) -> None:
    """The rank is killed in step 9, right after the checkpoint of step 8 is safe; the lines of the `lost` steps before
    were still on their way to the agent."""
    expected, _ = make_trainer(tiny_job(12), LAYOUT)
    records = expected.parts.recorder
    expected.fit()
    run = RunDirectory.create(tmp_path, "run")
    trainer = trainer_of(run, 12, Recorder("node-0", 0, 0, run))
    load, clock = trainer._load, trainer.parts.clock
    clock.is_shared = True  # as under an agent, which says what it has written

    def kill_in_step_9() -> object:
        clock.page.recorded_step = min(max(losses(run), default=0), 8 - lost)
        if trainer.step == 9:
            trainer.parts.checkpointer.wait()
            raise KilledError
        return load()

    trainer._load = kill_in_step_9  # type: ignore[method-assign, assignment]
    with pytest.raises(KilledError):
        trainer.fit()
    written = run.metrics_path("node-0").read_text().splitlines(keepends=True)
    run.metrics_path("node-0").write_text("".join(written[: 8 - lost]))
    assert sorted(losses(run)) == list(range(1, 9 - lost))

    again = trainer_of(run, 12, Recorder("node-0", 0, 1, run))
    assert again.fit() == "done"
    assert losses(run) == records.losses  # type: ignore[attr-defined]
    told = [line for line in read_lines(run.events_path("node-0"))[0] if line["event"] == "records_completed"]
    assert [line["steps"] for line in told] == [list(range(9 - lost, 9))]
    assert len(read_lines(run.metrics_path("node-0"))[0]) == 12, "no step is recorded twice"


def test_what_the_metrics_have_is_not_recorded_again(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "run")
    Recorder("node-1", 0, 0, run).metrics(3, run_loss=1.5)
    carried = [{"step": step, "loss": float(step), "learning_rate": 0.1} for step in (3, 4)]
    assert record_missing(run, Recorder("node-0", 0, 1, run), carried) == [4]
    (line,) = read_lines(run.metrics_path("node-0"))[0]
    assert (line["step"], line["run_loss"], line["run_learning_rate"]) == (4, 4.0, 0.1)
