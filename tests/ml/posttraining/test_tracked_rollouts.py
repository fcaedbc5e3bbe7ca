"""TensorBoard, Weights & Biases and MLflow get the metrics of reinforcement learning, of every step.

TensorBoard's files are read back. The other two are optional packages: stand-ins note what our sinks give them.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rollout_jobs import FOLDER, byte_tokenizer, job_text, rollout_run

from craton.ml.posttraining import build as posttraining
from craton.ml.training import RankIdentity, Trainer
from craton.telemetry import RunDirectory
from craton.telemetry.rank import LedgerClock, Recorder
from craton.telemetry.track import follow

STEPS = 3
# What a synchronous run with a reference and an evaluation has.
WANTED = {
    *("run_reward", "run_reward_std", "run_completion_tokens", "run_longest_completion_tokens", "run_truncated_share"),
    *("run_kl", "run_entropy", "run_logprob_gap", "run_logprob_k3", "run_clipped_share", "run_corrected_share"),
    *("run_staleness", "run_rollout_tokens_per_second", "run_rollout_tail_share", "run_verifier_failure_share"),
    *("run_advantage_zero_share", "run_step_tokens", "run_rollout_seconds", "run_reward_seconds", "run_sync_seconds"),
}
Points = dict[str, dict[int, float]]  # metric → step → value


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run that has trained for three steps and evaluated after the second and the last."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tracked")
    tokenizer = byte_tokenizer(folder / "tokenizer")
    text = job_text(tokenizer, steps=STEPS, policy="{loss: grpo, kl: 0.1}", train="evaluate: {every_steps: 2}")
    made = rollout_run(folder, "tracked", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CRATON_JOB_FOLDER", str(FOLDER))
        identity = RankIdentity(0, 1, 0, FOLDER)
        Trainer(posttraining.build(made, identity, Recorder("node-0", 0, 0, made), LedgerClock())).fit()
    return made


def check(found: Points) -> None:
    assert {name: sorted(found.get(name, {})) for name in WANTED} == {name: [1, 2, STEPS] for name in WANTED}
    assert sorted(found["run_validation_reward"]) == [2, STEPS]
    assert all(0 < reward < 1 for reward in found["run_reward"].values())


def test_tensorboard_has_the_metrics_of_rollouts(run: RunDirectory) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    follow(run, "tensorboard", lambda _: True)
    found: Points = {}
    for path in (run.path / "tensorboard").iterdir():
        events = accumulator.EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
    check(found)


def test_wandb_gets_the_metrics_of_rollouts(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Points = {}

    def log(values: dict[str, float]) -> None:
        for name in values.keys() - {"step", "time"}:
            found.setdefault(name, {})[int(values["step"])] = values[name]

    given = SimpleNamespace(define_metric=lambda *_, **__: None, log=log, finish=lambda: None)
    stand_in(monkeypatch, "wandb", init=lambda **_: given)
    follow(run, "wandb", lambda _: True)
    check(found)


def test_mlflow_gets_the_metrics_of_rollouts(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Points = {}

    class Client(SimpleNamespace):
        def __init__(self, uri: str) -> None:
            super().__init__(update_run=lambda *_, **__: None, set_terminated=lambda _: None)

        def get_experiment_by_name(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(experiment_id=name)

        def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
            return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

        def log_batch(self, identity: str, metrics: Any = (), params: Any = ()) -> None:
            for name, value, _, step in metrics:
                found.setdefault(name, {})[step] = value

    stand_in(monkeypatch, "mlflow")
    stand_in(monkeypatch, "mlflow.entities", Metric=lambda *values: values, Param=lambda *values: values)
    stand_in(monkeypatch, "mlflow.tracking", MlflowClient=Client)
    follow(run, "mlflow", lambda _: True)
    check(found)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)
