"""Training on pairs, from files to metrics: the reference is computed once, and a stopped run goes on to the bit."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from craton.job import load_job
from craton.job.model import ModelShape
from craton.ml.data import prepare
from craton.ml.data.tokenizer import copy_tokenizer, train_bpe
from craton.ml.export import export
from craton.ml.models import Decoder, DecoderConfig, save_folder
from craton.ml.posttraining.build import build
from craton.ml.training import RankIdentity, Trainer
from craton.telemetry import RunDirectory
from craton.telemetry.rank import LedgerClock

STEPS = 8
SHAPE = ModelShape("tiny", 2, 32, 64, 4, 2, 8, 259, tied_embeddings=True)
TRAIN = "global_batch_sequences: 4, precision: fp32, learning_rate: 5e-3, evaluate: {every_steps: 4, sequences: 4}"


class Noted:
    """A recorder that remembers metrics and events."""

    recording_seconds = 0.0

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}
        self.events: list[str] = []

    def metrics(self, step: int, **values: Any) -> None:
        self.steps.setdefault(step, {}).update(values)

    def event(self, name: str, step: int = 0, **_: Any) -> None:
        self.events.append(name)

    def ledger(self, step: int, seconds: dict[str, float]) -> None:
        pass

    def column(self, name: str) -> dict[int, float]:
        return {step: values[f"run_{name}"] for step, values in self.steps.items() if f"run_{name}" in values}


@dataclass(frozen=True)
class Place:
    """A model with a tokenizer, and pairs beside it."""

    folder: Path

    def run(self, name: str, preference: str = "{}", more: str = "") -> RunDirectory:
        job = self.folder / f"{name}.yaml"
        job.write_text(
            f"kind: dpo\nmodel: base\ndata: {{path: pairs.jsonl, validation: held.jsonl, sequence: 32}}\n"
            f"preference: {preference}\ntrain: {{steps: {STEPS}, {TRAIN}{more}}}\n"
            "cluster: local\nlayout: {micro_batch: 2}\n"
        )
        folders = prepare(load_job(job))
        text = job.read_text().replace("model: base", f"model: {self.folder / 'base'}")
        for key, file in (("path", "pairs"), ("validation", "held")):
            text = text.replace(f"{key}: {file}.jsonl", f"{key}: {folders[str(self.folder / file) + '.jsonl']}")
        run = RunDirectory.create(self.folder / "runs", name)
        run.job_path.write_text(text.replace("reference: other", f"reference: {self.folder / 'other'}"))
        return run


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    torch.set_num_threads(1)
    monkeypatch.setenv("CRATON_CACHE", str(tmp_path / "cache"))
    train_bpe([""], 259, tmp_path / "bytes")
    for seed, name in enumerate(("base", "other")):
        model = Decoder(DecoderConfig(SHAPE, initializer_range=0.1))
        model.initialize(seed)
        save_folder(dict(model.named_parameters()), model.config, tmp_path / name, dtype=torch.float32)
        copy_tokenizer(tmp_path / "bytes", tmp_path / name)
    for name, numbers in (("pairs", range(40)), ("held", range(40, 52))):
        rows = [{"prompt": f"{number}:", "chosen": "yes" * (number % 2 + 1), "rejected": "no"} for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Place(tmp_path)


def fit(run: RunDirectory, stop_at: int | None = None) -> Noted:
    noted = Noted()
    place = RankIdentity(0, 1, 0, run.path)
    Trainer(build(run, place, noted, LedgerClock()), stop_at).fit()  # type: ignore[arg-type]
    return noted


def test_a_stopped_run_goes_on_to_the_bit_without_a_second_reference(place: Place) -> None:
    calm = fit(place.run("calm"))
    losses = calm.column("loss")
    assert losses[1] == pytest.approx(math.log(2), abs=1e-6), "the model starts as its own reference"
    assert calm.column("reward_accuracy")[STEPS] > 0.9
    assert calm.column("reward_margin")[STEPS] > 0
    assert calm.column("validation_reward_accuracy")[STEPS] > 0.9
    assert calm.column("evaluation_loss")[STEPS] < math.log(2)
    assert calm.events.count("reference") == 2, "training and validation"

    stopped = place.run("stopped")
    first = fit(stopped, stop_at=3)
    assert "reference" not in first.events, "the shards have those of the same weights"
    for path in (place.folder / "cache").rglob("reference-*.values"):
        path.unlink()
    second = fit(stopped)
    assert "reference" not in second.events, "the run directory has them"
    assert first.column("loss") | second.column("loss") == losses

    torn = stopped.path / "reference" / "train-0.values"
    whole = torn.read_bytes()
    shards = next((place.folder / "cache").rglob("reference-*.values"))
    for damaged in (whole[:-3], whole[:-3] + b"\xff\xff\xff", b""):
        for path in (torn, shards, *shards.parent.parent.rglob("reference-*.values")):
            path.write_bytes(damaged)
        assert "reference" in fit(stopped).events
        assert torn.read_bytes() == whole


@pytest.mark.slow
def test_the_reference_is_the_start_another_model_or_none(place: Place) -> None:
    adapted = fit(place.run("adapted", more=", lora: {rank: 4}"))
    assert adapted.column("loss")[1] == pytest.approx(math.log(2), abs=1e-6)
    assert adapted.column("loss")[STEPS] < adapted.column("loss")[1]
    again = place.run("adapted-again", more=", lora: {rank: 4}")
    before = fit(again, stop_at=4)
    for path in (place.folder / "cache", again.path):
        for values in path.rglob("*.values"):
            values.unlink()
    after = fit(again)
    assert "reference" in after.events, "it is computed again, and is the same"
    assert before.column("loss") | after.column("loss") == pytest.approx(adapted.column("loss"), abs=1e-6)
    other = fit(place.run("other-reference", "{reference: other}"))
    assert abs(other.column("loss")[1] - math.log(2)) > 1e-3
    free = place.run("free", "{reference: none}")
    assert "reference" not in fit(free).events
    assert not (free.path / "reference").exists()


def test_a_reward_model_prefers_the_chosen_and_leaves_as_a_classifier(place: Place) -> None:
    transformers = pytest.importorskip("transformers")
    run = place.run("reward", "{loss: reward}")
    noted = fit(run)
    assert noted.column("loss")[1] == pytest.approx(math.log(2), abs=1e-6)
    assert noted.column("reward_accuracy")[STEPS] > 0.9
    export(str(run.path), place.folder / "out", dtype="fp32")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(place.folder / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(place.folder / "out")
    assert model.config.num_labels == 1
    scores = []
    with torch.no_grad():
        for answer in ("yes", "no"):
            ids = tokenizer(f"45:{answer}<|endoftext|>", return_tensors="pt")["input_ids"]
            scores.append(float(model(ids).logits))
    assert scores[0] > scores[1]
    assert math.log1p(math.exp(scores[1] - scores[0])) < noted.column("loss")[1]
