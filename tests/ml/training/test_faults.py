"""What a job says about bad steps, and what happens when a run is stopped, resumed, or runs out of memory."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gang import Gang
from tiny import GLOBAL_BATCH, VOCABULARY, Records, Text, make_trainer, tiny_job

from craton.job.layout import Layout
from craton.ml.data.sample import Sample
from craton.ml.training import Batch
from craton.ml.training.checkpoint import CheckpointError
from craton.ml.training.guard import OutOfMemoryError, TrainingStoppedError
from craton.ml.training.objectives import Objective

STEPS = 12
BAD_STEP = 10


class Poisoned(Text):
    """Text whose labels of one step are random: the loss jumps; `nan` makes it no number at all."""

    def __init__(self, nan: bool) -> None:
        self.nan = nan

    def sample(self, index: int) -> Sample:
        sample = super().sample(index)
        if index // GLOBAL_BATCH + 1 != BAD_STEP:
            return sample
        if self.nan:
            return Sample(sample.tokens, sample.labels, sample.positions, sample.weight * np.nan, sample.documents)
        labels = (sample.labels + 60) % VOCABULARY
        return Sample(sample.tokens, labels, sample.positions, sample.weight * 20, sample.documents)


def heavy(log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Does not divide a weight out again, so heavy samples make a high loss."""
    loss = -(batch.weight.square() * log_probs).sum()
    return loss, {"accuracy": (log_probs > math.log(0.5)).float().sum()}


HEAVY = Objective("heavy", heavy)


def fit(folder: Path, nan: bool, every_steps: int | None = 4, **train: Any) -> Records:
    trainer, records = make_trainer(
        tiny_job(STEPS, **train),
        Layout(micro_batch=8, precision="fp32"),
        folder,
        Poisoned(nan),
        HEAVY,
        every_steps=every_steps,
    )
    assert trainer.fit() == "done"
    return records


def names(records: Records) -> list[str]:
    return [name for name, _, _ in records.events]


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path: Path) -> None:
    records = fit(tmp_path, nan=True)
    assert math.isnan(records.losses[BAD_STEP])
    assert records.metrics_by_step[STEPS]["run_skipped_steps"] == 1
    assert records.losses[STEPS] < records.losses[1]
    assert [step for name, step, _ in records.events if name == "bad_step"] == [BAD_STEP]


def test_rollback_returns_to_the_checkpoint_and_leaves_the_bad_samples_out(tmp_path: Path) -> None:
    records = fit(tmp_path, nan=True, on_nan="rollback")
    rolled = [(step, fields["reached"]) for name, step, fields in records.events if name == "rolled_back"]
    assert rolled == [(8, 11)]
    assert records.steps == [*range(1, BAD_STEP + 1), *range(9, STEPS + 1)]
    assert all(math.isfinite(loss) for loss in records.losses.values()), "step 10 was done again with other samples"
    assert records.seconds["redo"] > 0
    assert records.seconds["restore"] > 0


def test_rollback_after_a_save_that_failed(tmp_path: Path) -> None:
    tier, away = tmp_path / "tier", tmp_path / "away"
    layout = Layout(micro_batch=8, precision="fp32")
    job = tiny_job(STEPS, on_nan="rollback")
    trainer, records = make_trainer(job, layout, tier, Poisoned(nan=True), HEAVY, every_steps=4)
    load, saves = trainer._load, trainer.parts.checkpointer

    def load_and_fail_a_save() -> Any:
        if BAD_STEP not in records.steps:
            if trainer.step == 6:
                saves.wait()
                tier.rename(away)
            if trainer.step == 9:
                while saves._lanes["shared"].outstanding:
                    time.sleep(0.005)
                away.rename(tier)
        return load()

    trainer._load = load_and_fail_a_save  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="step 8 was not saved"):
        assert trainer.fit() == "done"
    rolled = [(step, fields["reached"]) for name, step, fields in records.events if name == "rolled_back"]
    assert rolled == [(4, 11)]
    assert records.steps[-1] == STEPS


def test_a_bad_last_step_is_rolled_back_too(tmp_path: Path) -> None:
    job = tiny_job(BAD_STEP, on_nan="rollback")
    layout = Layout(micro_batch=8, precision="fp32")
    trainer, records = make_trainer(job, layout, tmp_path, Poisoned(nan=True), HEAVY, every_steps=4)
    assert trainer.fit() == "done"
    assert records.steps == [*range(1, BAD_STEP + 1), 9, BAD_STEP]
    assert math.isfinite(records.losses[BAD_STEP])


def test_rollback_without_a_checkpoint_goes_on_out_loud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = fit(tmp_path, nan=True, every_steps=None, on_nan="rollback")
    assert "no checkpoint to roll back to" in capsys.readouterr().out
    assert "rolled_back" not in names(records)


def test_stop_saves_the_weights_of_the_last_good_step(tmp_path: Path) -> None:
    with pytest.raises(TrainingStoppedError, match=r"step 10: the loss is nan .* policy is stop; .* saved as step 11"):
        fit(tmp_path, nan=True, on_nan="stop")
    assert (tmp_path / "step-00000011" / "COMPLETE").exists()


def test_a_damaged_checkpoint_that_is_passed_over_is_an_event(tmp_path: Path) -> None:
    layout = Layout(micro_batch=8, precision="fp32")
    fit(tmp_path, nan=True)
    damaged = min((tmp_path / f"step-{STEPS:08d}").glob("*.distcp"))  # there are more of them on more cores
    damaged.write_bytes(damaged.read_bytes()[:-1])
    trainer, records = make_trainer(tiny_job(STEPS), layout, tmp_path, Poisoned(nan=True), HEAVY, every_steps=4)
    with pytest.warns(UserWarning, match="trying an older checkpoint"):
        trainer.fit()
    ((step, fields),) = [(step, fields) for name, step, fields in records.events if name == "checkpoint_passed_over"]
    assert step < STEPS
    assert f"step {STEPS} cannot be used" in fields["reason"]


def test_a_tier_that_is_gone_for_a_while_is_an_event_and_training_goes_on(tmp_path: Path) -> None:
    tier, away = tmp_path / "tier", tmp_path / "away"
    layout = Layout(micro_batch=8, precision="fp32")
    trainer, records = make_trainer(tiny_job(STEPS), layout, tier, every_steps=4)
    load, saves = trainer._load, trainer.parts.checkpointer

    def load_and_lose_the_tier() -> Any:
        if trainer.step == 6:
            saves.wait()
            tier.rename(away)
        if trainer.step == 10:
            with suppress(CheckpointError):
                saves.wait()
            away.rename(tier)
        return load()

    trainer._load = load_and_lose_the_tier  # type: ignore[method-assign]
    assert trainer.fit() == "done"
    assert records.steps == [*range(1, STEPS + 1)]
    found = [(name, step) for name, step, _ in records.events if name.startswith("checkpoint_")]
    assert found == [("checkpoint_saved", 4), ("checkpoint_failed", 8), ("checkpoint_saved", STEPS)]
    (reason,) = [fields["reason"] for name, _, fields in records.events if name == "checkpoint_failed"]
    assert "check that its file system is mounted" in reason
    assert sorted(path.name for path in tier.iterdir()) == ["step-00000004", f"step-{STEPS:08d}"]


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_spike_is_measured_against_the_recent_loss(tmp_path: Path, policy: str) -> None:
    records = fit(tmp_path, nan=False, on_spike=f"{{factor: 3, policy: {policy}}}")
    (reason,) = [fields["reason"] for name, _, fields in records.events if name == "bad_step"]
    assert "over 3 times its recent level" in reason
    assert records.metrics_by_step[STEPS]["run_skipped_steps"] == (1 if policy == "skip" else 0)
    assert ("rolled_back" in names(records)) == (policy == "rollback")
    assert "run_accuracy" in records.metrics_by_step[STEPS]


def train_part(folder: Path, sizes: dict[str, int], until: int | None, every_steps: int | None) -> dict[int, float]:
    trainer, records = make_trainer(
        tiny_job(STEPS), Layout(precision="fp32", **sizes), folder, every_steps=every_steps, steps=until
    )
    assert trainer.fit() == ("done" if until is None else "stopped")
    return records.losses


def test_a_stop_on_one_rank_stops_all_and_any_world_goes_on_exactly(gang: Gang, tmp_path: Path) -> None:
    whole = gang.run(train_part, tmp_path / "whole", {"micro_batch": 8}, None, None, ranks=1)[0]
    parts: dict[int, float] = {}
    for until, sizes in ((4, {"fsdp": 2}), (7, {"fsdp": 4}), (9, {}), (None, {"replicate": 2, "fsdp": 2})):
        ranks = Layout(**sizes).world
        losses = gang.run(train_part, tmp_path / "parts", {"micro_batch": 2, **sizes}, until, None, ranks=ranks)[0]
        assert not set(losses) & set(parts), "no step is done twice"
        parts |= losses
    assert list(parts) == list(range(1, STEPS + 1))
    assert list(parts.values()) == pytest.approx(list(whole.values()), rel=1e-5)


def stop_one(folder: Path) -> int:
    trainer, _ = make_trainer(tiny_job(STEPS), Layout(fsdp=2, precision="fp32"), folder)
    if torch.distributed.get_rank() == 1:
        trainer.stop()
    assert trainer.fit() == "stopped"
    return trainer.step


def test_one_rank_that_is_asked_to_stop_is_enough(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(stop_one, tmp_path) == [1, 1]
    assert (tmp_path / "step-00000001" / "COMPLETE").exists()


def test_memory_that_runs_out_names_the_phase_and_what_to_change() -> None:
    def starved(log_probs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return log_probs.sum() + torch.empty(2**58, dtype=torch.uint8).sum(), {}

    job = tiny_job(precision="bf16")
    trainer, _ = make_trainer(job, Layout(micro_batch=4), objective=Objective("starved", starved))
    with pytest.raises(OutOfMemoryError) as caught:
        trainer.fit()
    text = str(caught.value)
    assert "out of memory in the forward phase" in text
    for change in ("micro_batch below 4", "recompute selective or full", "fsdp above 1", "train.weights bf16"):
        assert change in text
