"""Jobs that serve: what the section may say, what it means when it says nothing, and what every mistake is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from craton.errors import CratonError
from craton.job import check_job, dump_job, make_job, parse_job
from craton.job.model import Int4Format
from craton.job.sections.strategy import VoteStrategy
from craton.telemetry import RunDirectory

JOB = "name: llama\nkind: serve\nmodel: llama-3.1-8b\ncluster: p5en.48xlarge x 1\n"
FULL = """\
serve:
  port: 9000
  host: 0.0.0.0
  served_name: llama
  max_length: 8k
  max_running: 128
  max_waiting: 500
  chunk_tokens: 4k
  page: 32
  memory: 0.85
  host_memory: 16GiB
  precision: fp8
  kv_precision: fp8
  speculate: {ngram: 4}
  adapters: {sql: adapters/sql}
  max_adapters: 4
  max_adapter_rank: 64
  shared_prefix: off
  backend: triton
  tool_parser: llama3
  reasoning_parser: think
  api_keys: LLAMA_KEYS
  admin: true
  drain: 1m
  initialize: random
  seed: 7
layout: {tp: 2}
"""


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    folder = tmp_path / "adapters" / "sql"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return tmp_path


def test_everything_that_may_be_said(adapters: Path) -> None:
    job = parse_job(JOB + FULL, folder=adapters)
    serve = job.serve
    assert serve is not None
    assert (serve.port, serve.host, serve.max_length, serve.chunk_tokens) == (9000, "0.0.0.0", 8192, 4096)
    assert (serve.host_memory, serve.drain, serve.adapter_slots, serve.draft_tokens) == (16 * 2**30, 60.0, 4, 4)
    assert serve.adapters == {"sql": str(adapters / "adapters" / "sql")}
    assert (job.served_name, job.served_length, job.precision, job.layout and job.layout.tp) == (
        "llama",
        8192,
        "fp8",
        2,
    )
    assert parse_job(dump_job(job), folder="/elsewhere") == job


def test_nothing_that_must_be_said() -> None:
    job = parse_job(JOB)
    serve = job.serve
    assert serve is not None
    assert (serve.port, serve.host, serve.memory, serve.host_memory, serve.drain) == (8000, "127.0.0.1", 0.9, 0, 30.0)
    assert (serve.max_length, serve.max_running, serve.running, serve.step_tokens) == (None, None, 256, 2048)
    assert (serve.speculate, serve.adapter_slots, serve.draft_tokens, job.precision) == (None, 0, 0, "bf16")
    assert (job.served_name, job.served_length) == ("llama-3.1-8b", 131_072)
    assert parse_job(JOB + "serve:\n").serve == serve
    words = "serve: {max_length: auto, max_running: auto, speculate: off, host_memory: 0, drain: 0}\n"
    said = parse_job(JOB + words).serve
    assert said is not None
    assert (said.max_length, said.speculate, said.host_memory, said.drain) == (None, None, 0, 0.0)
    assert parse_job(dump_job(job)) == job


def test_a_draft_model() -> None:
    for text, tokens, is_auto in (("", 8, True), (", tokens: auto", 8, True), (", tokens: 5", 5, False)):
        job = parse_job(JOB + f"serve: {{speculate: {{model: llama-3.2-1b{text}}}}}\n")
        serve = job.serve
        assert serve is not None
        assert (serve.draft_model, serve.draft_tokens, serve.draft_auto) == ("llama-3.2-1b", tokens, is_auto)
        assert job.draft_shape is not None
        assert job.draft_shape.layers == 16
        assert parse_job(dump_job(job)) == job


def folder_in_4_bits(folder: Path, **quantization: object) -> Path:
    """A folder as far as a job reads it: its config.json."""
    config = {
        **{"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 128},
    }
    stated = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"} | quantization
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    return folder


def test_a_folder_in_4_bits_sets_the_precision(tmp_path: Path) -> None:
    folder = folder_in_4_bits(tmp_path / "packed")
    text = f"name: packed\nkind: serve\nmodel: {folder}\ncluster: p5en.48xlarge x 1\n"
    for written in ("", "serve: {precision: int4}\n", "software: vllm\n"):
        job = parse_job(text + written)
        assert job.serve is not None
        assert (job.serve.precision, job.precision, job.draft_precision) == ("int4", "bf16", "int4")
        assert job.stored_int4 == Int4Format("awq", group=64, has_zero=True)
        assert parse_job(dump_job(job)) == job
    with pytest.raises(CratonError, match=r"job\.yaml:3: serve: the weights of packed are stored in 4 bits \(awq\)"):
        parse_job(text + "serve: {precision: bf16}\n")
    random = parse_job(text + "serve: {precision: bf16, initialize: random}\n")
    assert random.stored_int4 is None
    draft = parse_job(JOB + f"serve: {{precision: fp8, speculate: {{model: {folder}}}}}\n")
    assert draft.serve is not None
    assert (draft.serve.precision, draft.draft_precision) == ("fp8", "int4")
    other = parse_job(text.replace(str(folder), str(folder_in_4_bits(tmp_path / "fp8", quant_method="fp8"))))
    assert other.serve is not None
    assert (other.serve.precision, other.stored_int4) == ("bf16", None), "it can be planned, and not served"


def test_the_summary_names_ranks_and_precision() -> None:
    assert str(check_job(parse_job(JOB + "layout: {tp: 2}\n"), 8)) == (
        "llama (serve) · llama-3.1-8b, 8.03B parameters · p5en.48xlarge x 1 = 8 GPUs · layout tp 2 · bf16"
    )
    local = parse_job(JOB.replace("p5en.48xlarge x 1", "local") + "layout: {tp: 4}\n")
    assert "local x 1 = 4 ranks" in str(check_job(local, 1)), "a processor may have any number of them"


PROBLEMS = [
    ("serve: {prt: 1}\n", 5, "key 'prt' is not known under serve; allowed: port, host"),
    ("serve: {prt: 1}\n", 5, "did you mean 'port'?"),
    (
        "serve: {speculate: {ngrams: 2}}\n",
        5,
        "key 'ngrams' is not known under serve.speculate; allowed: ngram, model, tokens; did you",
    ),
    ("serve: {speculate: 4}\n", 5, "serve.speculate: 4 is not allowed; write off, or the draft method"),
    ("serve: {speculate: {}}\n", 5, "serve.speculate: give ngram or model"),
    ("serve: {speculate: {ngram: 2, model: llama-3.2-1b}}\n", 5, "draft tokens come from ngram or from model"),
    ("serve: {speculate: {ngram: 2, tokens: 3}}\n", 5, "serve.speculate: tokens applies to model"),
    ("serve: {speculate: {model: llama-3.2-1b, tokens: 17}}\n", 5, "tokens: 17 is not a whole number from 1 to 16"),
    ("serve: {speculate: {model: ./nowhere}}\n", 5, "serve.speculate.model"),
    (
        "serve: {speculate: {model: qwen3-0.6b}}\n",
        5,
        "the draft model's vocabulary of 151,936 tokens exceeds the model's, 128,256; use a draft model with the same",
    ),
    ("serve: {port: 70000}\n", 5, "serve.port: 70000 is not a whole number from 1 to 65535"),
    ("serve: {host: 'http://me'}\n", 5, "serve.host: 'http://me' is not an address to listen on"),
    ("serve: {memory: 90}\n", 5, "serve.memory: 90 is not a fraction of the GPU memory"),
    ("serve: {host_memory: lots}\n", 5, "serve.host_memory: 'lots' is not a size in bytes; write e.g. 80GiB"),
    ("serve: {max_length: long}\n", 5, "serve.max_length: 'long' is not a number of tokens"),
    (
        "serve: {max_length: 256k}\n",
        5,
        "max_length 262,144 exceeds the model's maximum sequence length of 131,072 tokens",
    ),
    ("serve: {tool_parser: lama3}\n", 5, "did you mean 'llama3'?"),
    ("serve: {precision: fp4}\n", 5, "allowed: bf16, fp8, fp32"),
    (
        "serve: {backend: flash3}\n",
        5,
        "serve.backend: 'flash3' was removed because it was never run on a GPU; allowed: auto, torch, triton",
    ),
    ("serve: {shared_prefix: onn}\n", 5, "serve.shared_prefix: 'onn' is not allowed; allowed: auto, on, off; did you"),
    ("serve: {backend: flashinfer}\n", 5, "serve.backend: 'flashinfer' was removed because it was never run"),
    ("serve: {backend: tritn}\n", 5, "serve.backend: 'tritn' is not allowed; allowed: auto, torch, triton; did you"),
    ("serve: {api_keys: 'my key'}\n", 5, "'my key' is not a valid name of an environment variable"),
    ("serve: {served_name: ' '}\n", 5, "the name is empty; write the model name that clients use"),
    ("serve:\n  adapters: {sql: nowhere}\n", 6, "'nowhere' contains no adapter (adapter_config.json is missing)"),
    ("serve: {adapters: [a]}\n", 5, "serve.adapters: ['a'] is not a mapping"),
    ("serve: {strategy: 'vote:0'}\n", 5, "serve.strategy.n: '0' is not a whole number from 1 to 1024"),
    ("serve: {strategy: 'wote:4'}\n", 5, "'wote' is not a strategy; allowed: vote, best_of, beam, tree, budget"),
    ("serve: {strategy: {kind: vote, max_dollars: 1}}\n", 5, "no prices, so max_dollars cannot be enforced"),
    ("serve: {strategy: 'best_of:4:maths', verifiers: {math: math}}\n", 5, "no verifier is called 'maths'"),
    ("serve: {strategy: 'vote:40', strategies: {max_n: 20}}\n", 5, "40 is above this server's maximum of 20"),
    ("serve: {verifiers: {tests: code}}\n", 5, "a request must not bring code"),
    ("serve: {reward_memory: 0.1}\n", 5, "reward_memory needs a reward model in verifiers"),
    ("serve: {reward_memory: 2, verifiers: {a: {model: /rm}}}\n", 5, "2 is not a fraction of the GPU memory"),
    ("serve: {reward_memory: 0.2, verifiers: {a: {model: /rm}}}\n", 5, "are more than the GPU has"),
    ("serve: {verifiers: {logprobs: math}}\n", 5, "'logprobs' is not a name for a verifier"),
    ("serve: {verifiers: {a: {verifier: maths}}}\n", 5, "'maths' is not a verifier"),
    (
        "serve: {host: 0.0.0.0, api_keys: KEYS, verifiers: {a: math}, verify: {sandbox: off}}\n",
        5,
        "serve: verify.sandbox off is refused on 0.0.0.0, which other machines can reach",
    ),
    ("layout: {tp: 2, fsdp: 4}\n", 5, "layout: fsdp does not apply to a server: gathering weights"),
    ("layout: {replicate: 2}\n", 5, "start another server on another port"),
    ("layout: {pp: 2}\n", 5, "layout: pp does not apply to a server"),
    ("layout: {precision: fp8}\n", 5, "layout: precision does not apply to a server: write serve.precision"),
    ("recover: {spares: 1}\n", 2, "recover: a server runs on one node and has no spares"),
    ("data: {path: /text}\n", 2, "kind serve reads no data; remove `data:` (lines 2 and 5)"),
    ("train: {global_batch_sequences: 8}\n", 2, "kind serve does not train; remove `train:` (lines 2 and 5)"),
    ("layout: {tp: 3}\n", 5, "tp 3 does not divide the model's 32 heads and 8 KV heads"),
    ("layout: {tp: 2, ep: 2}\n", 5, "ep 2 requires experts, but llama-3.1-8b is dense; remove ep"),
    ("layout: {tp: 16}\n", 5, "tp 16 does not divide the model's 8 KV heads; nearest: tp 8"),
]


@pytest.mark.parametrize(("text", "line", "message"), PROBLEMS, ids=lambda value: str(value)[:40])
def test_every_mistake_is_told_with_its_line(text: str, line: int, message: str) -> None:
    with pytest.raises(CratonError) as caught:
        check_job(parse_job(JOB + text), 8)
    assert str(caught.value).startswith(f"job.yaml:{line}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


MIXTURE = JOB.replace("llama-3.1-8b", "mixtral-8x7b")  # 8 experts


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("tp: 4, ep: 3", "ep 3 does not divide the model's 8 experts and tp 4; a server splits whole experts over its"),
        (
            "tp: 2, ep: 4",
            "ep 4 does not divide tp 2; a server splits whole experts over its tp ranks; nearest: ep 2, or",
        ),
        ("ep: 4", "ep 4 does not divide tp 1"),
        ("tp: 8, ep: 16", "nearest: ep 8"),
    ],
)
def test_a_split_of_experts_that_cannot_be_is_told_with_the_nearest(sizes: str, message: str) -> None:
    with pytest.raises(CratonError) as caught:
        check_job(parse_job(MIXTURE + f"layout: {{{sizes}}}\n"), 8)
    assert str(caught.value).startswith("job.yaml:5: layout: ep ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_experts_may_be_split_over_any_divisor_of_tp(ep: int) -> None:
    job = parse_job(MIXTURE + f"layout: {{tp: 4, ep: {ep}}}\n")
    assert (job.served_layout.tp, job.served_layout.ep) == (4, ep)
    assert parse_job(dump_job(job)) == job
    assert str(check_job(job, 8)).endswith("layout tp 4 · bf16" if ep == 1 else f"layout tp 4 · ep {ep} · bf16")


def test_strategies_and_verifiers_of_a_server() -> None:
    text = (
        "serve:\n  strategy: vote:16\n  strategies: {max_n: 64, max_tokens: 20000}\n"
        "  verifiers: {m: math, j: {verifier: judge, endpoint: {url: 'http://judge:8000', key: JUDGE_KEY}}}\n"
    )
    serve = parse_job(JOB + text).serve
    assert serve is not None
    assert isinstance(serve.strategy, VoteStrategy)
    assert (serve.strategy.n, serve.strategies.max_n) == (16, 64)
    assert list(serve.verifiers) == ["m", "j"]
    job = parse_job(JOB + text)
    assert parse_job(dump_job(job)) == job, "a run reads what the job was"


def test_names_do_not_meet(adapters: Path) -> None:
    with pytest.raises(CratonError, match=r"both called 'sql'"):
        parse_job(JOB + "serve: {served_name: sql, adapters: {sql: adapters/sql}}\n", folder=adapters)
    with pytest.raises(CratonError, match=r"'llama-3\.1-8b' is the name of the model"):
        parse_job(JOB + "serve: {adapters: {llama-3.1-8b: adapters/sql}}\n", folder=adapters)
    with pytest.raises(CratonError, match=r"1 adapters are given but max_adapters is 0"):
        parse_job(JOB + "serve: {max_adapters: 0, adapters: {sql: adapters/sql}}\n", folder=adapters)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: command\ncommand: ls\ncluster: local\nserve: {port: 1}\n", "serve applies to kind serve, not command"),
        ("kind: serve\nmodel: my.models:build\ncluster: local\n", "my.models:build is a function; give a preset"),
        ("kind: serve\ncluster: local\n", "kind serve needs `model:`"),
        (JOB.replace("x 1", "x 2"), "job.yaml:4: cluster: a server runs on one node"),
    ],
)
def test_what_does_not_go_together(text: str, message: str) -> None:
    with pytest.raises(CratonError, match=message):
        check_job(parse_job(text), 8)


def test_a_job_without_a_file_is_told_without_lines() -> None:
    made = make_job({"name": "llama", "kind": "serve", "model": "llama-3.1-8b", "cluster": "p5en.48xlarge x 1"})
    assert made == parse_job(JOB)
    assert made.where("model") == ""
    with pytest.raises(CratonError, match=r"^key 'porrt' is not known under serve;"):
        make_job({"kind": "serve", "model": "llama-3.1-8b", "cluster": "local", "serve": {"porrt": 1}})


def test_weights_are_needed_unless_they_are_to_be_random(tmp_path: Path) -> None:
    with pytest.raises(
        CratonError, match=r"job\.yaml:3: kind serve requires trained weights, but llama-3\.1-8b has none"
    ):
        _ = parse_job(JOB).weights_folder
    assert parse_job(JOB + "serve: {initialize: random}\n").weights_folder is None
    folder = tmp_path / "my-model"
    folder.mkdir()
    numbers = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    numbers |= {"num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(numbers))
    (folder / "model.safetensors").touch()
    job = parse_job("kind: serve\nmodel: ./my-model\ncluster: local\n", folder=tmp_path)
    assert (job.weights_folder, job.served_name, job.served_length) == (folder, "my-model", 256)


def trained(root: Path, name: str, text: str) -> Path:
    run = RunDirectory.create(root, name)
    run.job_path.write_text(dump_job(parse_job(text)))
    return run.path


def test_a_run_of_ours_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "runs"))
    train = (
        "kind: pretrain\nmodel: {name}\ndata: {{sequence: 64}}\ntrain: {{global_batch_sequences: 8}}\ncluster: local\n"
    )
    numbers = "{layers: 2, hidden: 64, ffn_hidden: 128, heads: 4, vocab: 512, max_sequence: 64}"
    path = trained(tmp_path / "runs", "mine", train.format(name=numbers))
    for model in ("mine", str(path), "runs/mine"):
        job = parse_job(f"kind: serve\nmodel: {model}\ncluster: local\n", folder=tmp_path)
        assert (job.model, job.trained_run, job.weights_folder) == (str(path), path, None)
        assert (job.served_name, job.served_length) == ("mine", 64)
        assert job.model_shape is not None
        assert job.model_shape.layers == 2
        assert parse_job(dump_job(job)) == job
    other = trained(tmp_path / "runs", "preset", train.format(name="qwen3-0.6b"))
    named = parse_job("kind: serve\nmodel: preset\ncluster: local\n")
    assert (named.trained_run, named.served_length) == (other, 40_960)
    with pytest.raises(
        CratonError, match=r"is a run, which can only be served; to continue training from it, export it"
    ):
        parse_job(train.format(name="mine"))
    trained(tmp_path / "runs", "server", "kind: serve\nmodel: mine\ncluster: local\n")
    with pytest.raises(CratonError, match="the run server has kind serve, which trains no model"):
        parse_job("kind: serve\nmodel: server\ncluster: local\n")
