"""What was trained leaves as a Hugging Face folder and can be sampled from, by the commands a user types."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from s3 import S3Server
from torch import Tensor, nn

from craton.job import load_job
from craton.ml import export, sample
from craton.ml.data import tokenize
from craton.ml.functions import FunctionError
from craton.ml.models import Decoder, config_from_shape, save_folder
from craton.ml.training.checkpoint import Checkpointer, TierFolder
from craton.telemetry import RunDirectory

JOB = """\
name: small
kind: pretrain
model: {model}
data: {{path: {data}, sequence: 32}}
train: {{global_batch_sequences: 2, steps: 4, precision: fp32{more}}}
cluster: local x 1
"""
NUMBERS = (
    "{name: tiny, layers: 2, hidden: 32, ffn_hidden: 64, heads: 4, kv_heads: 2, vocab: 300, tied_embeddings: true}"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards with the tokenizer that made them."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 50)
    tokenize([folder / "text.txt"], folder / "shards", bpe_vocabulary=300, workers=1)
    return folder / "shards"


def decoder(run: RunDirectory, seed: int) -> Decoder:
    shape = load_job(run.job_path).model_shape
    assert shape is not None
    model = Decoder(config_from_shape(shape))
    model.initialize(seed)
    return model


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items()}


def a_run(root: Path, data: Path, name: str = "small", model: str = NUMBERS, more: str = "") -> RunDirectory:
    run = RunDirectory.create(root, name)
    run.job_path.write_text(JOB.format(model=model, data=data, more=more))
    return run


def save(run: RunDirectory, step: int, tensors: dict[str, Tensor]) -> None:
    checkpointer = Checkpointer([TierFolder("shared", run.checkpoints("shared"))], 0, 1)
    checkpointer.save(step, {**tensors, "optimizer.count": torch.zeros(())}, {"next_sample": 0}, wait=True)
    checkpointer.close()


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    hidden = model(tokens)
    return hidden @ model.head_weight.T  # type: ignore[no-any-return, union-attr, operator]


@torch.no_grad()
def test_an_exported_run_computes_the_same_in_transformers(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    run = a_run(tmp_path, data)
    first, last = decoder(run, 1), decoder(run, 2)
    save(run, 1, weights(first))
    save(run, 4, weights(last))
    assert export.main([str(run.path), str(tmp_path / "out"), "--dtype", "fp32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 4
    assert export.main([str(run.path), str(tmp_path / "older"), "--step", "1"]) == 0
    tokens = torch.arange(20)[None]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.allclose(theirs(tokens).logits, logits(last, tokens), atol=1e-4)
    older = export.open_model(str(tmp_path / "older")).model(torch.device("cpu"), torch.float32)
    assert torch.allclose(logits(older, tokens), logits(first, tokens), atol=2e-2)  # through bf16
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("return a")["input_ids"]) == "return a"


@torch.no_grad()
@pytest.mark.parametrize("targets", ["attention", "all"])
def test_adapters_alone_are_served_as_they_were_trained(tmp_path: Path, data: Path, targets: str) -> None:
    from craton.ml.serving.device import Adapters
    from craton.ml.training import merge_adapters
    from craton.ml.training.lora import add_adapters

    base = decoder(a_run(tmp_path, data, "first"), 1)
    folder = save_folder(base.state_dict(), base.config, tmp_path / "base", dtype=torch.float32)
    more = f", initialize: weights, lora: {{rank: 3, alpha: 5, targets: {targets}}}"
    run = a_run(tmp_path, data, "tuned", model=str(folder), more=more)
    lora = load_job(run.job_path).train.lora  # type: ignore[union-attr]
    assert lora is not None
    trained = copy.deepcopy(base)
    add_adapters(trained, lora)
    for name, tensor in trained.named_parameters():
        if ".lora_" in name:
            tensor.normal_(std=0.3)
    save(run, 4, {name: tensor for name, tensor in weights(trained).items() if ".lora_" in name})
    out = tmp_path / "adapters"
    assert export.main([str(run.path), str(out), "--adapters", "--dtype", "fp32"]) == 0
    assert export.main([str(run.path), str(out), "--adapters"]) == 2, "a folder that is there is not written over"
    served = copy.deepcopy(base)
    adapters = Adapters(served, slots=2, rank=4)
    adapters.load("tuned", out)
    tokens = torch.arange(20)[None]
    adapters.of_tokens = torch.full((20,), adapters.slot("tuned"), dtype=torch.int32)
    merge_adapters(trained)
    assert torch.allclose(logits(served, tokens), logits(trained, tokens), atol=1e-4)
    assert not torch.allclose(logits(served, tokens), logits(base, tokens), atol=1e-2)


def test_a_run_without_adapters_has_none_to_export(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path, data)
    save(run, 4, weights(decoder(run, 1)))
    assert export.main([str(run.path), str(tmp_path / "out"), "--adapters"]) == 2
    assert "trains all weights, not adapters; export the model without --adapters" in capsys.readouterr().err


def test_an_export_goes_to_s3_or_is_copied_there(
    tmp_path: Path, data: Path, bucket: str, s3_server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path, data)
    with run.job_path.open("a") as file:
        file.write(f'checkpoint: {{tiers: [{{to: shared}}, {{to: "{bucket}/checkpoints"}}]}}\n')
    save(run, 4, weights(decoder(run, 1)))
    name, objects = bucket.removeprefix("s3://"), []
    for folder, *options in ([tmp_path / "alone", "--no-copy"], [f"{bucket}/models/small"], [tmp_path / "model"]):
        assert export.main([str(run.path), str(folder), *options, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        objects.append({Path(key).parent.as_posix() for key in s3_server.objects(name)})
        assert answer["folder"] == str(folder)
    assert answer["copy"] == f"{bucket}/checkpoints/small/exports/model"
    assert objects == [set(), {"models/small"}, {"models/small", "checkpoints/small/exports/model"}]
    expected = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert s3_server.read(name, "models/small/model.safetensors") == expected
    assert s3_server.read(name, "checkpoints/small/exports/model/model.safetensors") == expected

    save(run, 5, weights(decoder(run, 2)))  # of the same sizes and with the same config.json
    there = {key: s3_server.read(name, key) for key in s3_server.objects(name)}
    other = tmp_path / "other" / "model"
    for folder, place in ((f"{bucket}/models/small", "models/small"), (other, "checkpoints/small/exports/model")):
        assert export.main([str(run.path), str(folder)]) == 2
        assert f"{bucket}/{place}: already holds a model; remove it, or" in capsys.readouterr().err
    assert not other.exists()
    assert {key: s3_server.read(name, key) for key in s3_server.objects(name)} == there
    assert export.main([str(run.path), str(other), "--no-copy"]) == 0
    assert (other / "model.safetensors").read_bytes() != expected


def test_what_cannot_be_exported_is_said(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path, data)
    assert export.main([str(run.path), str(tmp_path / "out")]) == 2
    assert "there is no checkpoint yet" in capsys.readouterr().err
    assert export.main([str(run.path), str(tmp_path / "out"), "--json"]) == 2
    assert "there is no checkpoint yet" in json.loads(capsys.readouterr().out)["error"]
    save(run, 2, weights(decoder(run, 0)))
    assert export.main([str(run.path), str(tmp_path / "out"), "--step", "3"]) == 2
    assert "there is no checkpoint of step 3; there are 2" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert export.main([str(run.path), str(tmp_path / "out")]) == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert export.main([str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    assert "no run named" in capsys.readouterr().err


@torch.no_grad()
def test_adapters_are_merged_into_the_weights_they_adapt(tmp_path: Path, data: Path) -> None:
    base_run = a_run(tmp_path, data, "base")
    base = decoder(base_run, 3)
    save_folder(base.state_dict(), base.config, tmp_path / "base-model", data, torch.float32)
    run = a_run(tmp_path, data, "adapted", str(tmp_path / "base-model"), ", lora: {rank: 2, alpha: 6}")
    a, b = torch.randn(2, 32), torch.randn(32, 2)
    adapters = {
        f"model.blocks.{index}.attention.{layer}.lora_{side}": torch.zeros(shape)
        for index in range(2)
        for layer, rows in (("qkv", 64), ("output", 32))
        for side, shape in (("a", (2, 32)), ("b", (rows, 2)))
    }
    adapters |= {"model.blocks.1.attention.output.lora_a": a, "model.blocks.1.attention.output.lora_b": b}
    mlp = {
        f"model.blocks.{index}.mlp.{layer}.lora_{side}": torch.zeros(shape)
        for index in range(2)
        for layer, rows, columns in (("gate", 64, 32), ("up", 64, 32), ("down", 32, 64))
        for side, shape in (("a", (2, columns)), ("b", (rows, 2)))
    }
    save(run, 1, adapters | mlp)
    export.export(str(run.path), tmp_path / "out", dtype="fp32")
    merged = export.open_model(str(tmp_path / "out")).model(torch.device("cpu"), torch.float32)
    expected = dict(base.state_dict())
    expected["blocks.1.attention.output.weight"] = expected["blocks.1.attention.output.weight"] + 3.0 * b @ a
    for name, tensor in merged.state_dict().items():
        assert torch.allclose(tensor, expected[name], atol=1e-5), name


class Counting(nn.Module):
    """A model that knows that the token after n is n + 1, and that all others are half as likely as each other."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.head_weight = nn.Parameter(torch.eye(vocabulary) * 8)

    def forward(self, tokens: Tensor, positions: Tensor, documents: None) -> Tensor:
        assert torch.equal(positions[0], torch.arange(tokens.shape[1]))
        return nn.functional.one_hot((tokens + 1) % len(self.head_weight), len(self.head_weight)).float()


def test_rows_of_different_length_end_each_at_its_own_time() -> None:
    model = Counting(10)
    steps = list(sample.generate(model, [[0, 1, 2], [5]], max_tokens=10, temperature=0, end=8))
    assert steps == [[3, 6], [4, 7], [5, None], [6, None], [7, None]]
    assert list(sample.generate(model, [[0]], max_tokens=2, temperature=0)) == [[1], [2]]


def test_what_a_users_model_raises_names_it_and_its_line() -> None:
    class Short(Counting):
        def forward(self, tokens: Tensor, positions: Tensor, documents: None) -> Tensor:
            return super().forward(tokens, positions, documents)[:, [3]]

    with pytest.raises(FunctionError, match=r"Short raised IndexError: .*\(.*test_export.py:\d+\)"):
        list(sample.generate(Short(10), [[0]], max_tokens=1))


def test_temperature_top_k_and_seed_do_what_they_say() -> None:
    model = Counting(50)

    def draw(**settings: float) -> list[int | None]:
        return [step[0] for step in sample.generate(model, [[0]], max_tokens=12, **settings)]  # type: ignore[arg-type]

    assert draw(temperature=3.0, seed=1) == draw(temperature=3.0, seed=1)
    assert draw(temperature=3.0, seed=1) != draw(temperature=3.0, seed=2)
    assert draw(temperature=3.0, top_k=1) == draw(temperature=0)
    with pytest.raises(sample.SampleError, match="temperature is -1"):
        draw(temperature=-1)


def test_the_command_writes_what_the_function_says(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from craton.ml.data import end_of_document, load_tokenizer

    run = a_run(tmp_path, data)
    model = decoder(run, 5)
    save(run, 4, weights(model))
    tokenizer = load_tokenizer(data)
    end = end_of_document(data, tokenizer)
    (expected,) = sample.sample(model, tokenizer, ["def "], max_tokens=9, temperature=1.0, seed=7, end=end)
    command = [str(run.path), "--prompt", "def ", "--max-tokens", "9", "--temperature", "1", "--seed", "7"]
    assert sample.main(command) == 0
    assert capsys.readouterr() == (f"def {expected}\n", "")


def test_sampling_says_what_is_wrong(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path, data)
    save(run, 4, weights(decoder(run, 5)))
    assert sample.main([str(run.path), "--prompt", "def ", "--tokenizer", str(tmp_path)]) == 2
    assert "tokenizer.json" in capsys.readouterr().err
    assert sample.main([str(run.path), "--prompt", "a", "--max-tokens", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["step"], answer["samples"][0]["tokens"]) == (4, 3)
