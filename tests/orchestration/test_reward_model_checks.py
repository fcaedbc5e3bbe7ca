"""Language models and reward models in the place of each other are refused before a rank starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rollout_jobs import FOLDER, byte_tokenizer, job_text

from craton.job import parse_job
from craton.ml.verifiers import VerifierError
from craton.orchestration import StartError, serve_job
from craton.orchestration.draft import draft_run
from craton.orchestration.start.rollout_rewards import check_rollout_job
from craton.telemetry import RunDirectory

NUMBERS = "{layers: 2, hidden: 32, ffn_hidden: 64, heads: 4, kv_heads: 2, vocab: 259, tied_embeddings: true}"
SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 259,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def model_folder(folder: Path, architecture: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SHAPE, "architectures": [architecture], "num_labels": 1}))
    (folder / "model.safetensors").touch()
    return folder


def test_a_language_model_gives_no_rewards(tmp_path: Path) -> None:
    language = model_folder(tmp_path / "language", "Qwen3ForCausalLM")
    rest = f"reward: [{{model: {language}}}]\n"
    job = parse_job(job_text(byte_tokenizer(tmp_path / "bytes"), reward="", rest=rest))
    with pytest.raises(VerifierError, match=r"reward\[0\]\.model: .*language is a language model without a scalar"):
        check_rollout_job(job, FOLDER)
    (language / "config.json").write_text(json.dumps({**SHAPE, "architectures": ["Qwen3ForSequenceClassification"]}))
    check_rollout_job(job, FOLDER)


def test_a_reward_model_teaches_nothing(tmp_path: Path) -> None:
    scores = model_folder(tmp_path / "scores", "Qwen3ForSequenceClassification")
    policy = f"{{loss: distill, teacher: {scores}}}"
    job = parse_job(job_text(byte_tokenizer(tmp_path / "bytes"), policy=policy, reward=""))
    with pytest.raises(StartError, match=r"policy\.teacher: .*scores is a reward model"):
        draft_run(job, tmp_path / "runs" / "rollouts")


def test_a_server_scores_with_reward_models_only(tmp_path: Path) -> None:
    policy = model_folder(tmp_path / "policy", "Qwen3ForCausalLM")
    settings = {"port": 1, "verifiers": {"rm": {"model": str(policy)}}}
    job = serve_job(str(policy), name="served", settings=settings)
    with pytest.raises(StartError, match=r"serve\.verifiers\.rm\.model: .*policy is a language model without a scalar"):
        draft_run(job, tmp_path / "runs" / "served")


def test_a_reward_model_is_not_served(tmp_path: Path) -> None:
    scores = model_folder(tmp_path / "scores", "Qwen3ForSequenceClassification")
    run = RunDirectory.create(tmp_path, "preferred")
    run.job_path.write_text(
        f"kind: dpo\nmodel: {NUMBERS}\ndata: {{path: pairs.jsonl}}\npreference: {{loss: reward}}\ncluster: local\n"
        "train: {global_batch_sequences: 4, steps: 3, initialize: random}\n"
    )
    for model in (scores, run.path):
        job = serve_job(str(model), name="served", settings={"port": 1})
        with pytest.raises(StartError, match=f"{model.name} is a reward model: it scores texts"):
            draft_run(job, tmp_path / "runs" / "served")
