"""Adapters: only they are trained and saved, and merged they compute the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gang import Gang
from tiny import SHAPE, Records, Text, make_trainer, tiny_job

from craton.job.layout import Layout
from craton.job.sections import Lora
from craton.ml.data import collate
from craton.ml.models import Decoder, DecoderConfig, save_folder
from craton.ml.training import Batch, Trainer, merge_adapters
from craton.ml.training.build import RankIdentity, build
from craton.ml.training.lora import LoraError, add_adapters, base_only, initialize_adapters
from craton.telemetry import RunDirectory
from craton.telemetry.rank import LedgerClock

EXAMPLES = Path(__file__).parents[3] / "examples"


def adapted(targets: str = "all") -> Decoder:
    model = Decoder(DecoderConfig(SHAPE))
    add_adapters(model, Lora(rank=4, alpha=8.0, targets=targets))  # type: ignore[arg-type]
    with base_only(model):
        model.initialize(0)
    initialize_adapters(model, 0)
    return model


def batch() -> Batch:
    return Batch.from_arrays(collate([Text().sample(index) for index in range(2)]))


def hidden(model: torch.nn.Module) -> torch.Tensor:
    rows = batch()
    with torch.no_grad():
        out: torch.Tensor = model(rows.tokens, rows.positions, rows.documents)
    return out


def fit(folder: Path | None, world: int) -> tuple[list[float], list[str], bool]:
    model = adapted()
    before = {name: value.clone() for name, value in model.named_parameters()}
    trainer, records = make_trainer(
        tiny_job(16), Layout(fsdp=world, precision="fp32", micro_batch=4), folder, model=model
    )
    trainer.fit()
    base = {name: value for name, value in model.named_parameters() if "lora" not in name}
    frozen = not any(value.requires_grad for value in base.values())
    if world == 1:
        frozen = frozen and all(torch.equal(value, before[name]) for name, value in base.items())
    return list(records.losses.values()), list(trainer.saves.tensors()), frozen


def test_adapters_start_as_the_model_itself_and_merge_into_it() -> None:
    plain = Decoder(DecoderConfig(SHAPE))
    plain.initialize(0)
    model = adapted()
    assert torch.equal(hidden(model), hidden(plain))
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, std=0.1)
    learned = hidden(model)
    assert not torch.allclose(learned, hidden(plain), atol=1e-3)
    merge_adapters(model)
    assert torch.allclose(hidden(model), learned, atol=1e-4)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]


def test_only_adapters_are_trained_and_saved_on_any_number_of_ranks(gang: Gang, tmp_path: Path) -> None:
    losses, saved, frozen = gang.run(fit, tmp_path, 1, ranks=1)[0]
    assert frozen
    assert losses[-1] < losses[0] - 0.02
    assert saved
    assert all("lora_" in name for name in saved)
    sharded, same_names, _ = gang.run(fit, None, 2, ranks=2)[0]
    assert sharded == pytest.approx(losses, rel=1e-5)
    assert same_names == saved


def test_targets_choose_the_layers_and_unknown_models_are_refused() -> None:
    names = {name.rsplit(".", 2)[-2] for name, _ in adapted("attention").named_parameters() if "lora" in name}
    assert names == {"qkv", "output"}
    with pytest.raises(LoraError, match="no linear layer named"):
        add_adapters(torch.nn.Sequential(torch.nn.Linear(4, 4)), Lora(rank=2))


def train_folder(path: Path, world: int) -> list[float]:
    records = Records()
    place = RankIdentity(dist.get_rank(), world, 0, EXAMPLES)
    trainer = Trainer(build(RunDirectory(path), place, records, LedgerClock()))  # type: ignore[arg-type]
    trainer.fit()
    return list(records.losses.values())


def test_published_weights_load_under_adapters_and_shards(gang: Gang, tmp_path: Path) -> None:
    model = Decoder(DecoderConfig(SHAPE))
    model.initialize(7)
    save_folder(dict(model.named_parameters()), model.config, tmp_path / "published", dtype=torch.float32)
    paths = []
    for name, lora in (("whole", ""), ("adapted", "lora: {rank: 4}, ")):
        run = RunDirectory.create(tmp_path / "runs", name)
        run.job_path.write_text(
            f"""
            kind: pretrain
            model: {tmp_path}/published
            data: {{source: "custom_source:sums", sequence: 32}}
            train: {{{lora}global_batch_sequences: 4, steps: 3, precision: fp32, learning_rate: 1e-3}}
            cluster: local x 2
            """
        )
        paths.append(run.path)
    whole = gang.run(train_folder, paths[0], 1, ranks=1)[0]
    sharded = gang.run(train_folder, paths[1], 2, ranks=2)[0]
    assert sharded[0] == pytest.approx(whole[0], rel=1e-5), "both start from the same weights"
    assert sharded[2] != pytest.approx(whole[2], rel=1e-5), "and go different ways"
