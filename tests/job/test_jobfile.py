"""The job file: what is read from it, and how each mistake is told."""

from __future__ import annotations

import json
import re
import string
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from craton.job import ContentError, JobError, SchemaError, check_job, dump_job, load_job, make_job, parse_job
from craton.job.document import Section
from craton.job.layout import Layout
from craton.version import VERSION

EXAMPLES = Path(__file__).parents[2] / "examples"
KNOWN_KEYS = {key for section in Section.__subclasses__() for key in section.model_fields}

FULL = """\
name: llama-8b
kind: pretrain
model: llama-3.1-8b
data: {path: /fsx/tokens, sequence: 8192}
train: {global_batch_tokens: 8M, tokens: 15T, precision: bf16, learning_rate: 3e-4, seed: 0}
cluster: p5en.48xlarge x 16
layout: auto
placement: {within: leaf}
checkpoint:
  peer: auto
  tiers: [{to: nvme, every: 5m}, {to: shared, every: 30m}, {to: "s3://bucket/run", every: 2h}]
run: {on: slurm, partition: p5, account: lab, time_limit: 2d, image: team/train.sqsh, env: {A: b}, secrets: [HF_TOKEN]}
track: [tensorboard]
"""


def with_lines(**changes: str) -> str:
    """A small valid job with some of its lines replaced or added, or removed where the change is empty."""
    lines = {
        "kind": "pretrain",
        "model": "llama-3.1-8b",
        "data": "{sequence: 8192}",
        "train": "{global_batch_sequences: 64, steps: 10}",
        "cluster": "p5.48xlarge x 8",
    }
    return "".join(f"{key}: {value}\n" for key, value in {**lines, **changes}.items() if value)


def problems_of(text: str, folder: Path | str = ".") -> tuple[str, ...]:
    with pytest.raises(ContentError) as caught:
        parse_job(text, folder=folder)
    return caught.value.problems


def test_every_key_of_a_full_job() -> None:
    job = parse_job(FULL)
    assert job.train is not None
    assert (job.name, job.kind, job.train.learning_rate, job.layout) == ("llama-8b", "pretrain", 3e-4, None)
    assert (job.sequence, job.global_batch_sequences, job.global_batch_tokens) == (8192, 1024, 8_388_608)
    assert job.total_tokens == 15e12
    assert job.steps == 1_788_140
    assert job.model_shape is not None
    assert job.model_shape.parameters == 8_030_261_248
    assert (job.cluster.instance, job.cluster.num_nodes, job.cluster.min_nodes) == ("p5en.48xlarge", 16, 0)
    assert [(tier.to, tier.every) for tier in job.checkpoint.tiers][1] == ("shared", 1800)
    assert (job.run.on, job.run.time_limit, job.run.env, job.run.secrets) == (
        "slurm",
        172800,
        {"A": "b"},
        ("HF_TOKEN",),
    )
    assert str(check_job(job, 128)) == (
        "llama-8b (pretrain) · llama-3.1-8b, 8.03B parameters · p5en.48xlarge x 16 = 128 GPUs · "
        "1,024 sequences of 8,192 = 8.39M tokens per step · 1,788,140 steps, 15T tokens · layout auto"
    )


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_examples_load_and_mean_the_same_after_a_round_trip(file: Path) -> None:
    job = load_job(file)
    assert job.name == file.stem
    assert job.steps or job.serve or job.progress
    assert parse_job(dump_job(job), folder="/elsewhere") == job


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("sft", {"data": "{path: /d, sequence: 8192}", "train": "{global_batch_sequences: 8, lora: {rank: 16}}"}),
        ("dpo", {"data": "{path: /d}"}),
        (
            "grpo",
            {"data": "{path: /d}", "reward": "my.rewards:exact", "objective": "my.losses:gspo", "train": "{steps: 10}"},
        ),
        ("serve", {"train": "", "data": ""}),
        ("command", {"train": "", "data": "", "model": "", "command": "[python, train.py, --steps, 10]"}),
    ],
)
def test_every_kind(kind: str, extra: dict[str, str]) -> None:
    job = parse_job(with_lines(kind=kind, **extra))
    assert job.kind == kind
    if kind == "command":
        assert job.command == ("python", "train.py", "--steps", "10")
        assert (job.model_shape, job.steps, job.total_tokens) == (None, None, None)


def test_defaults() -> None:
    job = parse_job(with_lines(data=""), name="runs/my-job.yaml")
    assert job.name == "my-job"
    assert job.sequence == 8192  # the model could see 131,072
    assert (job.precision, job.software, job.layout, job.checkpoint.peer) == ("bf16", "craton", None, "auto")
    assert parse_job(with_lines(model="llama-2-7b", data="")).sequence == 4096


def test_what_training_uses_when_the_job_does_not_say() -> None:
    job = parse_job(with_lines(train="{global_batch_sequences: 8, steps: 300}"))
    assert job.train is not None
    assert (job.learning_rate, job.final_learning_rate, job.warmup_steps) == (3e-4, pytest.approx(3e-5), 30)
    assert (job.train.weights, job.train.schedule, job.train.weight_decay) == ("fp32", "cosine", 0.1)
    assert (job.train.betas, job.train.epsilon, job.train.clip) == ((0.9, 0.95), 1e-8, 1.0)
    assert (job.train.compile, job.train.initialize, job.train.on_nan) == ("auto", "auto", "skip")
    assert (job.train.evaluate, job.train.on_spike, job.fp8, job.data.pack) == (None, None, None, True)
    assert [(tier.to, tier.every, tier.every_steps) for tier in job.checkpoint.places] == [("shared", None, None)]

    tuned = parse_job(with_lines(kind="sft", data="{path: /d}", train="{global_batch_sequences: 8, tokens: 15T}"))
    assert (tuned.learning_rate, tuned.warmup_steps) == (2e-5, 2000)
    constant = parse_job(with_lines(train="{global_batch_sequences: 8, schedule: constant, warmup_steps: 0}"))
    assert (constant.final_learning_rate, constant.warmup_steps) == (3e-4, 0)
    assert parse_job(with_lines(train="{global_batch_sequences: 8, precision: fp8}")).fp8 == "tensorwise"


def test_how_training_is_done_can_be_written() -> None:
    train = (
        "{global_batch_sequences: 8, steps: 100, precision: fp8, weights: bf16, fp8: rowwise, schedule: wsd, "
        "warmup_steps: 5, final_learning_rate: 0, weight_decay: 0, betas: [0.8, 0.99], epsilon: 1e-6, clip: 0, "
        "compile: false, evaluate: {every_steps: 50, sequences: 16}, on_nan: rollback, "
        "on_spike: {factor: 3, policy: stop}, initialize: random}"
    )
    job = parse_job(with_lines(train=train, data="{sequence: 128, validation: stdlib}"))
    assert job.train is not None
    assert job.train.evaluate is not None
    assert job.train.on_spike is not None
    assert (job.train.weights, job.fp8, job.warmup_steps, job.final_learning_rate) == ("bf16", "rowwise", 5, 0)
    assert (job.train.betas, job.train.clip, job.train.compile) == ((0.8, 0.99), 0, False)
    assert (job.train.evaluate.every_steps, job.train.evaluate.sequences) == (50, 16)
    assert (job.train.on_nan, job.train.on_spike.factor, job.train.on_spike.policy) == ("rollback", 3, "stop")


def test_data_paths_start_at_the_job_file_and_words_stay(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    data = "{path: tokens, validation: ../held, tokenizer: words, sequence: 8}"
    job = parse_job(with_lines(data=data), folder=tmp_path)
    assert job.data.mixture == ((str(tmp_path / "tokens"), 1.0),)
    assert job.data.validation_mixture == ((str(tmp_path.parent / "held"), 1.0),)
    assert job.data.tokenizer == str(tmp_path / "words")

    data = "{path: [{path: stdlib, weight: 3}, {path: s3://b/t}, more.jsonl], tokenizer: bpe:4096, sequence: 8}"
    job = parse_job(with_lines(data=data), folder=tmp_path)
    assert job.data.mixture == (("stdlib", 3.0), ("s3://b/t", 1.0), (str(tmp_path / "more.jsonl"), 1.0))
    assert (job.data.validation_mixture, job.data.tokenizer) == ((), "bpe:4096")
    hub = parse_job(with_lines(data="{tokenizer: Qwen/Qwen3-8B, sequence: 8}"), folder=tmp_path)
    assert hub.data.tokenizer == "Qwen/Qwen3-8B"


def test_weights_are_loaded_where_there_are_some(tmp_path: Path) -> None:
    config = '{"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}'
    (tmp_path / "config.json").write_text(config)
    text = with_lines(model=str(tmp_path), data="{sequence: 8}")
    wanted = text.replace("steps: 10", "steps: 10, initialize: weights")
    assert parse_job(text).weights_folder is None
    with pytest.raises(
        JobError, match=r"job\.yaml:4: train\.initialize is weights, but no weights of the model were found"
    ):
        _ = parse_job(wanted).weights_folder

    (tmp_path / "model.safetensors").write_bytes(b"")
    assert parse_job(text).weights_folder == parse_job(wanted).weights_folder == tmp_path
    assert parse_job(text.replace("steps: 10", "steps: 10, initialize: random")).weights_folder is None
    assert parse_job(with_lines()).weights_folder is None


def test_a_written_layout_is_filled_on_the_cluster() -> None:
    job = parse_job(with_lines(layout="{tp: 8, precision: fp8}"))
    assert job.fixed_layout(64) == Layout(fsdp=8, tp=8, precision="fp8")
    assert parse_job(with_lines(layout="auto")).fixed_layout(64) is None


def test_the_users_own_price() -> None:
    job = parse_job(with_lines(price="{dollars_per_hour: 31.5, kind: spot, date: 2026-10-01}"))
    assert job.price is not None
    assert (job.price.dollars_per_hour, job.price.kind, job.price.date) == (31.5, "spot", date(2026, 10, 1))


def test_peer_checkpoints_can_be_off_or_timed() -> None:
    assert parse_job(with_lines(checkpoint="{peer: off}")).checkpoint.peer == "off"
    assert parse_job(with_lines(checkpoint="{peer: 2m}")).checkpoint.peer == 120
    assert parse_job(with_lines(checkpoint="{peer: 2m}")).checkpoint.peer_seconds == 120
    in_steps = parse_job(with_lines(checkpoint="{peer: 5 steps}"))
    assert (in_steps.checkpoint.peer_steps, in_steps.checkpoint.peer_seconds) == (5, None)
    assert parse_job(dump_job(in_steps)) == in_steps
    auto = parse_job(with_lines(checkpoint="{peer: auto}")).checkpoint
    assert (auto.peer_steps, auto.peer_seconds) == (None, None)


def test_a_software_profile_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("")
    assert parse_job(with_lines(software="./mine.toml"), folder=tmp_path).software == str(tmp_path / "mine.toml")
    assert "profile file 'gone.toml' does not exist" in problems_of(with_lines(software="gone.toml"), tmp_path)[0]


def test_a_job_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        parse_job(FULL).name = "other"  # type: ignore[misc]


MISTAKES: list[tuple[dict[str, str], int, str]] = [
    (
        {"kind": "pretrian"},
        1,
        "kind: 'pretrian' is not allowed; allowed: pretrain, sft, dpo, grpo, serve, eval, command; did you",
    ),
    (
        {"train": "{global_batch_sequences: 8, learning_rte: 1}"},
        4,
        "key 'learning_rte' is not known under train; allowed:",
    ),
    ({"train": "{global_batch_sequences: 8, learning_rte: 1}"}, 4, "on_spike, lora; did you mean 'learning_rate'?"),
    (
        {"train": "{global_batch_sequences: 8, precision: bf17}"},
        4,
        "train.precision: 'bf17' is not allowed; allowed: fp32,",
    ),
    ({"train": "{global_batch_sequences: 8, precision: bf17}"}, 4, "mxfp8, nvfp4; did you mean 'bf16'?"),
    ({"train": "{global_batch_sequences: 8, learning_rate: fast}"}, 4, "train.learning_rate: 'fast' is not a number"),
    ({"train": "{global_batch_sequences: 1.5}"}, 4, "train.global_batch_sequences: 1.5 is 1.5, not a whole number"),
    ({"train": "{steps: 10}"}, 4, "train: give global_batch_tokens or global_batch_sequences"),
    ({"train": ""}, 1, "kind pretrain needs `train:`"),
    ({"train": "[1]"}, 4, "train: [1] is not a mapping of `key: value`"),
    ({"cluster": ""}, 1, "key 'cluster' is missing at the top"),
    ({"cluster": "p5 x many"}, 5, "cluster: 'many' is not a number of nodes; write e.g. 16, or 2..8"),
    (
        {"cluster": "p5 x 8..2"},
        5,
        "cluster: '8..2' is not a number of nodes; write at least 1, the smaller number first",
    ),
    ({"cluster": "p5 16"}, 5, "cluster: 'p5 16' is not a cluster; write e.g. `p5en.48xlarge x 16`"),
    ({"layout": "fast"}, 6, "layout: 'fast' is not a layout; write auto, or a mapping such as {fsdp: 16, tp: 8}"),
    ({"layout": "{fspd: 8}"}, 6, "key 'fspd' is not known under layout; allowed: pp, replicate, fsdp, cp, tp, ep,"),
    ({"layout": "{fspd: 8}"}, 6, "zero, schedule, offload; did you mean 'fsdp'?"),
    ({"layout": "{zero: 4}"}, 6, "layout.zero: 4 is not allowed; allowed: 1, 2, 3"),
    (
        {"image": "a.sqsh"},
        6,
        "key 'image' is not known at the top; allowed: name, kind, model, data, train, serve, eval, cluster,",
    ),
    ({"image": "a.sqsh"}, 6, "reward, price; it belongs under run"),
    ({"train": "{steps: 8, objective: mine:loss}"}, 4, "lora; it belongs at the top of the file, not under train"),
    (
        {"run": "{on: slrum}"},
        6,
        "run.on: 'slrum' is not allowed; allowed: local, slurm, kubernetes; did you mean 'slurm'?",
    ),
    ({"run": "{secrets: [HF-TOKEN]}"}, 6, "run.secrets[0]: 'HF-TOKEN' is not a valid name of an environment variable"),
    ({"run": "{env: {1A: x}}"}, 6, "run.env.1A: '1A' is not a valid name of an environment variable"),
    ({"run": "{env: {KEY: x}, secrets: [KEY]}"}, 6, "run: KEY is both a secret and in env; remove it from env"),
    (
        {"checkpoint": "{tiers: [{to: nvme, evry: 5m}]}"},
        6,
        "key 'evry' is not known under checkpoint.tiers[0]; allowed: to,",
    ),
    ({"checkpoint": "{tiers: [{to: moon, every: 5m}]}"}, 6, "checkpoint: 'moon' is not a tier; allowed: nvme, "),
    ({"checkpoint": "{tiers: [{to: nvme, every: 5m}, {to: nvme, every: 1m}]}"}, 6, "tier 'nvme' is given twice"),
    (
        {"checkpoint": "{tiers: [{to: nvme, every: 5m, every_steps: 9}]}"},
        6,
        "every and every_steps are both given; keep",
    ),
    ({"train": "{global_batch_sequences: 8, fp8: rowwise}"}, 4, "train: fp8 rowwise needs precision fp8, not bf16"),
    (
        {"train": "{global_batch_sequences: 8, weights: bf16, precision: fp32}"},
        4,
        "train: weights bf16 cannot be used with precision fp32; use precision bf16 or fp8, or weights fp32",
    ),
    (
        {"train": "{global_batch_sequences: 8, evaluate: {every_steps: 5}}"},
        4,
        "evaluate requires data.validation, or a suite, e.g. suite: arithmetic",
    ),
    (
        {"train": "{global_batch_sequences: 8, evaluate: {every_steps: 5, samples: 4}}"},
        4,
        "train: evaluate.samples applies to a suite; give one, e.g. suite: arithmetic, or remove samples",
    ),
    (
        {"train": "{global_batch_sequences: 8, evaluate: {every_steps: 5, suite: 3}}"},
        4,
        "train.evaluate.suite: 3 is not a suite; write the path of a YAML file, or the name of a built-in suite",
    ),
    (
        {"model": "a:b", "train": "{global_batch_sequences: 8, evaluate: {every_steps: 5, suite: arithmetic}}"},
        2,
        "evaluate.suite needs a model that Craton can serve, and a:b is a function; remove suite",
    ),
    ({"train": "{global_batch_sequences: 8, evaluate: 5}"}, 4, "train.evaluate: 5 is not a mapping of `key: value`"),
    (
        {"train": "{global_batch_sequences: 8, steps: 10, warmup_steps: 11}"},
        4,
        "train: warmup_steps 11 exceeds the 10 steps of the job",
    ),
    (
        {"train": "{global_batch_sequences: 8, schedule: constant, final_learning_rate: 0}"},
        4,
        "train: a constant schedule has no final_learning_rate; remove one of the two",
    ),
    ({"train": "{global_batch_sequences: 8, betas: 0.9}"}, 4, "train.betas: 0.9 is not a pair; write two numbers"),
    ({"train": "{global_batch_sequences: 8, betas: [0.9, 1]}"}, 4, "betas[1]: 1 is not allowed; give a number below 1"),
    ({"train": "{global_batch_sequences: 8, compile: fast}"}, 4, "train.compile: 'fast' is not allowed; allowed: auto"),
    ({"train": "{global_batch_sequences: 8, on_nan: skp}"}, 4, "skip, rollback, stop; did you mean 'skip'?"),
    ({"train": "{global_batch_sequences: 8, on_spike: {factor: 1}}"}, 4, "1 is not allowed; give a number above 1"),
    ({"train": "{global_batch_sequences: 8, learning_rate: -1}"}, 4, "rate: -1 is not allowed; give a number above 0"),
    ({"train": "{global_batch_sequences: 8, weight_decay: -1}"}, 4, "-1 is not allowed; give a number of at least 0"),
    ({"data": "{sequence: 8, tokenizer: bpe:9}"}, 3, "data.tokenizer: 'bpe:9' is not a BPE tokenizer; write bpe:"),
    ({"data": "{sequence: 8, tokenizer: bpe:258}"}, 3, "data.tokenizer: 'bpe:258' is not a BPE tokenizer"),
    ({"data": "{sequence: 8, path: 7}"}, 3, "data.path: 7 is not a path; write a file, a folder, an s3:// prefix or"),
    ({"data": "{sequence: 8, path: []}"}, 3, "data.path: the list is empty; write a path, or a list of {path, weight}"),
    (
        {"data": "{sequence: 8, path: [stdlib, {path: x, wait: 1}]}"},
        3,
        "key 'wait' is not known under data.path[1]; allowed: path, weight; did you mean 'weight'?",
    ),
    ({"data": "{sequence: 8, path: [{path: x, weight: 0}]}"}, 3, "weight: 0 is not allowed; give a number above 0"),
    ({"checkpoint": "{peer: never}"}, 6, "checkpoint.peer: 'never' is not allowed; write auto, off, a duration"),
    ({"name": "a b"}, 6, "name: 'a b' is not a name"),
    (
        {"reward": "exakt"},
        6,
        "verifier: 'exakt' is not a verifier; allowed: exact, regex, json_schema, math, code, judge",
    ),
    ({"reward": "a:b"}, 1, "reward applies to kind grpo, not pretrain (lines 1 and 6)"),
    (
        {"kind": "grpo", "data": "{path: /d, sequence: 8}", "train": "{steps: 1}"},
        1,
        "kind grpo needs `reward:`, or an environment that gives it",
    ),
    ({"kind": "command"}, 1, "kind command needs `command:`"),
    ({"kind": "serve"}, 1, "kind serve does not train; remove `train:` (lines 1 and 4)"),
    ({"placement": "{within: rack}"}, 6, "placement.within: 'rack' is not allowed; allowed: node, leaf, spine, zone"),
    ({"price": "{dollars_per_hour: 3, date: soon}"}, 6, "price.date: 'soon' is not a date such as 2026-11-15"),
    (
        {"track": "tensorbord"},
        6,
        "track[0]: 'tensorbord' is not allowed; allowed: tensorboard, wandb, mlflow; did you mean",
    ),
]


@pytest.mark.parametrize(("changes", "line", "says"), MISTAKES)
def test_a_mistake_is_told_with_line_key_and_what_is_allowed(changes: dict[str, str], line: int, says: str) -> None:
    problems = problems_of(with_lines(**changes))
    assert len(problems) == 1
    assert problems[0].startswith(f"job.yaml:{line}: ")
    assert says in problems[0]


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "WANDB_API_KEY",
        "PGPASSWORD",
        "my_secret",
        "SSH_PRIVATE_KEY",
    ],
)
def test_a_secret_is_not_written_down_and_its_value_not_told(name: str) -> None:
    (problem,) = problems_of(with_lines(run=f"{{env: {{{name}: hf_q8Zr0s5T}}}}"))
    assert problem.startswith(f"job.yaml:6: run.env: {name} looks like a secret")
    assert f"run: {{secrets: [{name}]}}" in problem
    assert "hf_q8Zr0s5T" not in problem


def test_what_only_sounds_like_a_secret_may_be_written_down() -> None:
    env = {
        "TOKENIZERS_PARALLELISM": "false",
        "MAX_TOKENS": "4096",
        "PAD_TOKEN": "pad",
        "IMAGE_TOKEN": "<image>",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "OPENAI_API_KEY": "EMPTY",
        "HF_TOKEN": "",
        "DB_PASSWORD": "/run/secrets/password",
        "AWS_WEB_IDENTITY_TOKEN_FILE": "token",
        "SECRET_NAME": "team-tokens",
        "NCCL_KEY": "value",
    }
    assert parse_job(with_lines(run=f"{{env: {json.dumps(env)}}}")).run.env == env


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "llama-3.1-8b"),
        ("data", "{path: /d}"),
        ("layout", "{tp: 2}"),
        ("checkpoint", "{tiers: [{to: shared, every: 5m}]}"),
        ("objective", "my.losses:own"),
    ],
)
def test_what_a_command_would_ignore_is_refused(key: str, value: str) -> None:
    text = f"kind: command\ncommand: ls\ncluster: local\n{key}: {value}\n"
    (problem,) = problems_of(text)
    assert f"{key} does not apply to kind command: the command " in problem
    assert problem.endswith("(lines 1 and 4)")
    job = parse_job("kind: command\ncommand: ls\ncluster: local\n")
    assert parse_job(dump_job(job)) == job, "what a run keeps of it, with all defaults, is read"


def test_never_both_of_a_pair() -> None:
    text = with_lines(train="\n  tokens: 1B\n  global_batch_sequences: 8\n  steps: 4")
    assert problems_of(text) == ("job.yaml:5: train: tokens and steps are both given; keep one (lines 5 and 7)",)
    text = with_lines(train="\n  global_batch_sequences: 8\n  global_batch_tokens: 4M")
    assert (
        "global_batch_tokens and global_batch_sequences are both given; keep one (lines 5 and 6)"
        in problems_of(text)[0]
    )


def test_a_batch_must_be_whole_sequences() -> None:
    (problem,) = problems_of(with_lines(train="{global_batch_tokens: 8000000}"))
    assert (
        "8,000,000 is not a multiple of the sequence 8,192; nearest: 8,003,584 = global_batch_sequences 977" in problem
    )


def test_a_model_that_says_no_sequence_needs_one() -> None:
    (problem,) = problems_of(with_lines(model="a.b:c", data="{}"))
    assert problem.startswith("job.yaml:3: data.sequence is missing")


def test_all_problems_are_listed_in_the_order_of_their_lines() -> None:
    text = with_lines(kind="sfd", data="{sequence: long}", cluster="p5 x 0", layout="{tp: 0}")
    assert [problem.split(": ")[0] for problem in problems_of(text)] == [f"job.yaml:{line}" for line in (1, 3, 5, 6)]


def test_at_most_ten_problems_are_listed() -> None:
    problems = problems_of(with_lines(run="{" + ", ".join(f"key{i}: 1" for i in range(25)) + "}"))
    assert len(problems) == 11
    assert problems[-1] == "job.yaml: and 15 more; fix these first"


def test_a_layout_that_does_not_fit_is_told_with_its_line() -> None:
    job = parse_job(with_lines(layout="{tp: 64, fsdp: 1}"))
    with pytest.raises(ContentError) as caught:
        check_job(job, 64)
    assert caught.value.problems[0].startswith("job.yaml:6: layout: tp 64 does not divide the model's 32 heads")
    with pytest.raises(ContentError, match=r"job\.yaml:6: layout needs a multiple of 3 ranks"):
        check_job(parse_job(with_lines(layout="{pp: 3}")), 64)


def _jobs() -> st.SearchStrategy[dict[str, Any]]:
    """Valid jobs as plain data, of many shapes."""
    optional = st.fixed_dictionaries(
        {},
        optional={
            "name": st.just("a-job"),
            "layout": st.sampled_from(["auto", {"tp": 2, "recompute": "full"}, {"pp": 2, "micro_batch": 2}]),
            "placement": st.sampled_from([{"within": "leaf"}, {"within": "zone"}]),
            "checkpoint": st.sampled_from(
                [
                    {"peer": "off"},
                    {"peer": 90, "tiers": [{"to": "nvme", "every": "5m", "keep": 2}]},
                    {"tiers": [{"to": "shared", "every_steps": 100}, {"to": "/a", "every": "1h30m"}, {"to": "object"}]},
                ]
            ),
            "run": st.sampled_from([{"on": "slurm", "partition": "p"}, {"time_limit": "2d", "image": "x"}]),
            "track": st.just(["wandb"]),
            "price": st.just({"dollars_per_hour": 3.5, "kind": "own"}),
        },
    )
    required = st.fixed_dictionaries(
        {
            "kind": st.just("pretrain"),
            "model": st.sampled_from(
                ["llama-3.1-8b", {"layers": 2, "hidden": 64, "heads": 4, "ffn_hidden": 128, "vocab": 5000}]
            ),
            "data": st.sampled_from(
                [
                    {"sequence": 128},
                    {"sequence": "4k", "path": "/data", "tokenizer": "bpe:4096"},
                    {"sequence": 64, "path": [{"path": "stdlib", "weight": 2}, {"path": "t"}], "pack": False},
                ]
            ),
            "train": st.sampled_from(
                [
                    {"global_batch_sequences": 8, "steps": 5},
                    {"global_batch_tokens": "4M"},
                    {"global_batch_sequences": 8, "weights": "bf16", "on_spike": {"factor": 2.5}, "compile": True},
                    {"global_batch_sequences": 8, "betas": [0.9, 0.999], "epsilon": 1e-6, "lora": {"rank": 8}},
                ]
            ),
            "cluster": st.sampled_from(
                ["p5.48xlarge x 2", {"name": "c", "instance": "p5", "nodes": 4, "levels": {"leaf": {"nodes": 2}}}]
            ),
        }
    )
    return st.builds(lambda first, second: {**first, **second}, required, optional)


_TEXTS = st.one_of(
    st.text(max_size=30).filter(lambda text: not any(0xD800 <= ord(letter) < 0xE000 for letter in text)),
    st.sampled_from(
        ["3e-4", "off", "1_000", "1:30", "~", "null", "2026-10-01", "a: b", "#x", "'", "- y", "x\n y\n", "é"]
    ),
)


@settings(max_examples=150)
@given(_jobs(), st.dictionaries(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), _TEXTS, max_size=3), _TEXTS)
def test_any_job_is_read_back_as_it_was_written(job: dict[str, Any], env: dict[str, str], image: str) -> None:
    run = {**job.get("run", {}), "env": env, "image": image}
    first = parse_job(json.dumps({**job, "run": run}))
    again = parse_job(dump_job(first), name="other.yaml", folder="/elsewhere")
    assert again == first
    assert dump_job(again) == dump_job(first)


def _keys(data: Any, location: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    if isinstance(data, list):
        return [key for index, item in enumerate(data) for key in _keys(item, (*location, index))]
    if not isinstance(data, dict):
        return []
    return [key for name, value in data.items() for key in [(*location, name), *_keys(value, (*location, name))]]


def _misspell(data: Any, location: tuple[str | int, ...], wrong: str) -> Any:
    head, *rest = location
    if isinstance(data, list):
        return [_misspell(item, tuple(rest), wrong) if index == head else item for index, item in enumerate(data)]
    return {
        (wrong if name == head and not rest else name): (
            _misspell(value, tuple(rest), wrong) if name == head and rest else value
        )
        for name, value in data.items()
    }


@settings(max_examples=150)
@given(_jobs(), st.data(), st.booleans())
def test_any_misspelt_key_is_named_with_its_line(job: dict[str, Any], draw: st.DataObject, flow: bool) -> None:
    location = draw.draw(st.sampled_from(_keys(job)))
    key = str(location[-1])
    position = draw.draw(st.integers(0, len(key)))
    wrong = key[:position] + draw.draw(st.sampled_from(string.ascii_lowercase)) + key[position:]
    assume(wrong not in KNOWN_KEYS)

    parse_job(yaml.safe_dump(job, sort_keys=False))
    text = yaml.safe_dump(_misspell(job, location, wrong), sort_keys=False, default_flow_style=None if flow else False)
    line = next(
        number for number, line in enumerate(text.splitlines(), start=1) if re.search(rf"(?<!\w){wrong}:", line)
    )
    named = [problem for problem in problems_of(text) if f"key '{wrong}' is not known" in problem]
    assert named
    assert named[0].startswith(f"job.yaml:{line}: ")
    assert f"did you mean '{key}'?" in named[0] or len(key) < 4


def test_the_schema_is_dumped_and_may_be_written() -> None:
    job = parse_job(with_lines())
    dumped = dump_job(job)
    assert dumped.startswith("schema: 1\nname: job\n")
    assert parse_job(dumped) == job == parse_job(with_lines(schema="1"))
    assert parse_job(dumped.removeprefix("schema: 1\n")) == job, "as before there was one"
    assert make_job({"schema": 1, **yaml.safe_load(with_lines())}) == make_job(yaml.safe_load(with_lines()))


def test_a_newer_schema_is_refused_in_one_line() -> None:
    text = with_lines(schema="2", learning_speed="1", kind="teach")
    refused = f"schema 2 is newer than schema 1, which this Craton ({VERSION}) reads; use the version of Craton that "
    with pytest.raises(SchemaError) as caught:
        parse_job(text)
    assert str(caught.value) == f"job.yaml:6: {refused}wrote it, or a newer one"
    with pytest.raises(SchemaError) as caught:
        make_job(yaml.safe_load(text))
    assert str(caught.value) == f"{refused}wrote it, or a newer one"


@pytest.mark.parametrize("schema", ["0", "one", "1.0", "true", "[1]"])
def test_a_schema_that_never_was(schema: str) -> None:
    (problem,) = problems_of(with_lines(schema=schema))
    assert problem.startswith("job.yaml:6: schema: ")
    assert problem.endswith(" is not allowed; allowed: 1")
