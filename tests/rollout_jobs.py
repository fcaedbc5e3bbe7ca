"""Tiny jobs of kind grpo whose prompts and rewards are functions of this file, and their runs in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from craton.job import Job, dump_job, parse_job
from craton.ml.data.tokenizer import train_bpe
from craton.telemetry import RunDirectory

FOLDER = Path(__file__).parent
PROMPT_TOKENS = 6


def prompts(job: Job, split: str = "train") -> Callable[[int], dict[str, str]]:
    """Rows whose prompts have 6 bytes; the answer is the first of them."""
    offset = 0 if split == "train" else 500

    def row(index: int) -> dict[str, str]:
        text = f"{(index + offset) * 7919 % 999_983:06d}"
        return {"prompt": text, "answer": text[0]}

    return row


def byte_reward(prompt: str, completion: str, row: Mapping[str, Any], transcript: Sequence[Any]) -> float:
    """Many different rewards, which depend on the whole completion."""
    return sum(map(ord, completion)) % 17 / 16


def rare_reward(prompt: str, completion: str, row: Mapping[str, Any], transcript: Sequence[Any]) -> float:
    """Often equal within a group."""
    return float(sum(map(ord, completion)) % 9 == 0)


def failing_reward(prompt: str, completion: str, row: Mapping[str, Any], transcript: Sequence[Any]) -> float:
    """Fails for about an eighth of the completions."""
    if sum(map(ord, completion)) % 8 == 3:
        raise ValueError("no reward today")
    return byte_reward(prompt, completion, row, transcript)


def broken_reward(prompt: str, completion: str, row: Mapping[str, Any], transcript: Sequence[Any]) -> float:
    raise ValueError("never a reward")


def nan_reward(prompt: str, completion: str, row: Mapping[str, Any], transcript: Sequence[Any]) -> float:
    return float("nan")


def text_reward(prompt: str, completion: str, row: Mapping[str, Any], transcript: Sequence[Any]) -> Any:
    return "good"


class Echo:
    """An environment that writes `ok` after each of the first two turns, then rewards the number of turns."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self.turns = 0

    def step(self, completion: str) -> str | float:
        self.turns += 1
        return "ok" if self.turns < 3 else self.turns + len(completion) / 100


def job_text(
    tokenizer: Path,
    name: str = "rollouts",
    steps: int = 3,
    policy: str = "{loss: grpo}",
    rollout: str = "",
    reward: str = "byte_reward",
    train: str = "",
    rest: str = "",
    cluster: str = "local",
) -> str:
    """A job of 4 prompts with 4 completions each per step."""
    rewards = f'reward: "rollout_jobs:{reward}"\n' if reward else ""
    return (
        f"name: {name}\nkind: grpo\n"
        "model: {layers: 2, hidden: 32, ffn_hidden: 64, heads: 4, kv_heads: 2, vocab: 259, tied_embeddings: true}\n"
        f'data: {{source: "rollout_jobs:prompts", tokenizer: {tokenizer}, sequence: 24}}\n'
        f"policy: {policy}\nrollout: {{prompts: 4, group: 4, max_tokens: 6{rollout and ', ' + rollout}}}\n{rewards}"
        f"train: {{steps: {steps}, precision: fp32, initialize: random, learning_rate: 1e-2{train and ', ' + train}}}\n"
        f"verify: {{workers: 1}}\ncluster: {cluster}\n{rest}"
    )


def byte_tokenizer(folder: Path) -> Path:
    """A tokenizer of bytes, made once per folder."""
    if not (folder / "tokenizer.json").is_file():
        train_bpe([], 259, folder)
    return folder


def rollout_run(root: Path, name: str, text: str) -> RunDirectory:
    """The directory of a run of this job."""
    run = RunDirectory.create(root, name)
    run.job_path.write_text(dump_job(parse_job(text, name)), encoding="utf-8")
    return run
