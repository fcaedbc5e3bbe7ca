"""Plans of post-training: rollouts, verdicts and weight transfers beside the phases of training."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from craton.infrastructure import resolve_cluster
from craton.job import load_job
from craton.job.layout import Layout
from craton.planning import plan
from craton.planning.report import plan_html, plan_to_json, render_plan
from craton.planning.result import Plan
from craton.planning.rollouts import StepExtras, step_extras
from craton.planning.search import evaluate
from craton.planning.setting import setting_of
from craton.telemetry import PHASES, ROLLOUT_PHASES, plan_twins

GRPO = """
name: math
kind: grpo
model: llama-3.1-8b
data: {path: /data/prompts.jsonl, sequence: 2048}
train: {steps: 100, initialize: random}
cluster: p5en.48xlarge x 1
reward: [{verifier: math}]
"""


def extras_of(tmp_path: Path, text: str = GRPO, **sections: Any) -> tuple[StepExtras, float]:
    """What comes on top of a step of training, and the seconds of that."""
    path = tmp_path / "job.yaml"
    path.write_text(text + "".join(f"{name}: {json.dumps(value)}\n" for name, value in sections.items()))
    job = load_job(path)
    setting = setting_of(job, resolve_cluster(job.cluster))
    candidate = evaluate(setting.model, setting.machine, setting.profile, Layout(fsdp=8))
    return step_extras(setting, candidate, candidate.step_seconds), candidate.step_seconds


def planned(tmp_path: Path, text: str = GRPO, **sections: Any) -> Plan:
    path = tmp_path / "job.yaml"
    path.write_text(text + "".join(f"{name}: {json.dumps(value)}\n" for name, value in sections.items()))
    return plan(load_job(path))


def test_the_phases_of_a_step_with_rollouts_add_up(tmp_path: Path) -> None:
    result = planned(tmp_path, layout={"fsdp": 8})
    assert set(result.phases) == {*ROLLOUT_PHASES, *PHASES}
    assert sum(result.phases.values()) == pytest.approx(result.step_seconds)
    assert all(result.phases[phase] > 0 for phase in ("rollout", "reward", "sync", "compute"))
    assert sum(result.memory_parts.values()) == pytest.approx(result.memory_bytes)
    assert {"rollout KV cache", "rollout weights"} <= result.memory_parts.keys()  # sharded: rollouts need a copy
    twins = plan_twins(json.loads(json.dumps(plan_to_json(result))))
    assert twins["rollout_seconds"] == pytest.approx(result.phases["rollout"])
    assert result.rollout is not None
    assert result.tokens_per_second * result.step_seconds == pytest.approx(512 * (512 + 512))
    assert result.cost is not None
    console = Console(file=StringIO(), width=120)
    render_plan(result, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for page in (text, plan_html(result)):
        assert "64 prompts x 8 samples" in page
        assert "gathering weights" in page


def seconds(extras: StepExtras, phase: str) -> float:
    return sum(extras.parts[phase].values())


def test_the_plan_says_what_a_judge_adds(tmp_path: Path) -> None:
    base = planned(tmp_path, layout={"fsdp": 8})
    judge = "{verifier: judge, endpoint: {url: 'http://judge:8000'}}"
    judged = planned(tmp_path, GRPO.replace("{verifier: math}", judge), layout={"fsdp": 8})
    assert not [warning for warning in base.warnings if "judge" in warning]
    (warning,) = (warning for warning in judged.warnings if "judge" in warning)
    assert "2 s per verdict, 512 a step; what its endpoint charges is not in the dollars" in warning
    assert judged.phases["reward"] == pytest.approx(100 * base.phases["reward"], rel=0.01)


def test_more_samples_longer_texts_and_slower_verifiers_take_longer(tmp_path: Path) -> None:
    (base, _), (more, _) = extras_of(tmp_path), extras_of(tmp_path, rollout={"prompts": 128})
    longer, shorter = (extras_of(tmp_path, rollout={"max_tokens": tokens})[0] for tokens in (1536, 256))
    assert seconds(shorter, "rollout") < seconds(base, "rollout") < seconds(longer, "rollout")
    assert seconds(more, "rollout") > seconds(base, "rollout")
    assert seconds(more, "reward") == pytest.approx(2 * seconds(base, "reward"))
    assert seconds(extras_of(tmp_path, verify={"workers": 1})[0], "reward") > 100 * seconds(base, "reward")
    code, _ = extras_of(tmp_path, GRPO.replace("verifier: math", "verifier: code"))
    assert seconds(code, "reward") > seconds(base, "reward")


def test_epochs_references_and_updates_add_compute(tmp_path: Path) -> None:
    (base, step), (kl, _), (twice, _) = (
        extras_of(tmp_path, policy=policy) for policy in ({}, {"kl": 0.01}, {"epochs": 2, "minibatches": 2})
    )
    assert base.parts["compute"] == base.parts["optimizer"] == {}
    assert 0.2 * step < kl.parts["compute"]["reference"] < 0.5 * step
    assert twice.parts["compute"].keys() == {"further epochs", "log-probabilities before the step"}
    assert seconds(twice, "optimizer") > 0


def test_rollouts_on_servers_of_their_own_are_hidden_behind_training(tmp_path: Path) -> None:
    together, _ = extras_of(tmp_path)
    apart, _ = extras_of(tmp_path, rollout={"mode": "separate", "workers": 8})
    assert seconds(apart, "rollout") < seconds(together, "rollout")
    assert apart.parts["sync"].keys() == {"sending weights"}
    assert not apart.memory_parts
    few, _ = extras_of(tmp_path, rollout={"mode": "separate", "workers": 1, "prompts": 512})
    assert seconds(few, "rollout") > seconds(apart, "rollout")


def test_one_rank_shares_its_weights_with_the_rollouts(tmp_path: Path) -> None:
    result = planned(tmp_path, GRPO.replace("llama-3.1-8b", "qwen3-0.6b").replace("p5en.48xlarge x 1", "local"))
    assert result.phases["sync"] == 0.0
    assert "rollout weights" not in result.memory_parts


def test_preferences_add_one_pass_of_the_reference(tmp_path: Path) -> None:
    text = GRPO.replace("kind: grpo", "kind: dpo").replace("reward: [{verifier: math}]", "")
    text = text.replace("steps: 100", "steps: 100, global_batch_sequences: 64")
    dpo, step = extras_of(tmp_path, text)
    assert dpo.seconds == 0.0
    assert 0.2 < dpo.once_seconds / (100 * step) < 0.5  # a forward pass is about a third of a step
    assert extras_of(tmp_path, text, preference={"loss": "simpo"})[0] == StepExtras()


def reward_model(folder: Path, layers: int) -> str:
    """A folder with the shape of a reward model."""
    numbers = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = {"model_type": "llama", **numbers, "num_hidden_layers": layers, "vocab_size": 128256}
    (folder / f"scorer-{layers}").mkdir()
    (folder / f"scorer-{layers}" / "config.json").write_text(json.dumps(config))
    return str(folder / f"scorer-{layers}")


def test_reward_models_add_their_passes_and_their_weights(tmp_path: Path) -> None:
    """Twice the layers take twice the seconds: that many samples are bound by FLOPs. 512 samples of 1,024 tokens are
    shared by 8 ranks, and a pass takes 2 FLOPs a weight and token."""
    small, large = (reward_model(tmp_path, layers) for layers in (16, 32))

    def extras(reward: list[dict[str, Any]], **sections: Any) -> StepExtras:
        return extras_of(
            tmp_path, GRPO.replace("reward: [{verifier: math}]", f"reward: {json.dumps(reward)}"), **sections
        )[0]

    one, other = extras([{"model": small}]), extras([{"model": large}])
    assert one.parts["reward"].keys() == {"reward models"}
    assert seconds(other, "reward") == pytest.approx(2 * seconds(one, "reward"), rel=0.05)
    layer = 2048 * (2 * 2048 + 2 * 512) + 3 * 2048 * 8192
    ideal = 2 * 16 * layer * 512 * 1024 / 8 / 989e12
    assert 1 < seconds(one, "reward") / ideal < 4
    both = extras([{"model": small}, {"verifier": "math"}, {"model": large}])
    assert both.parts["reward"]["reward models"] == pytest.approx(seconds(one, "reward") + seconds(other, "reward"))
    assert both.parts["reward"]["verdicts"] > 0
    grown = other.memory_parts["reward models"] - one.memory_parts["reward models"]
    assert grown == pytest.approx(16 * 2 * layer, rel=0.01), "bf16, whole on every rank"
    apart = extras([{"model": small}], rollout={"mode": "separate", "workers": 64})
    assert apart.parts["reward"] == pytest.approx(one.parts["reward"]), "the trainer scores, and nothing hides it"
    unknown = extras([{"model": str(tmp_path / "elsewhere")}])
    assert not unknown.parts["reward"]
    assert "elsewhere are not planned" in unknown.warnings[-1]


def test_references_and_teachers_take_memory_and_time_by_their_size(tmp_path: Path) -> None:
    folder = reward_model(tmp_path, 16)
    start, _ = extras_of(tmp_path, policy={"kl": 0.01})
    smaller, _ = extras_of(tmp_path, policy={"kl": 0.01, "reference": folder})
    assert smaller.parts["compute"]["reference"] < 0.5 * start.parts["compute"]["reference"]
    assert start.memory_parts["reference weights"] == pytest.approx(8.03e9 * 4 / 8, rel=0.01), "fp32, sharded by 8"
    adapted, _ = extras_of(tmp_path, GRPO.replace("random}", "random, lora: {rank: 8}}"), policy={"kl": 0.01})
    assert adapted.parts["compute"]["reference"] > 0
    assert "reference weights" not in adapted.memory_parts
    text = GRPO.replace("reward: [{verifier: math}]", "")
    taught, _ = extras_of(tmp_path, text, policy={"loss": "distill", "teacher": folder})
    assert taught.parts["compute"]["teacher"] == pytest.approx(smaller.parts["compute"]["reference"], rel=0.05)
    assert taught.memory_parts["teacher weights"] < start.memory_parts["reference weights"]


def test_prompts_are_as_long_as_the_first_rows(tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"question": "x" * 400, "prompt": "y" * 40}) + "\n" for _ in range(8)))
    data = f"data: {{path: {rows}, sequence: 2048}}"
    text = GRPO.replace("data: {path: /data/prompts.jsonl, sequence: 2048}", data)
    short = planned(tmp_path, text, layout={"fsdp": 8})
    assert short.rollout is not None
    assert short.rollout.prompt_tokens == 10
    named = planned(tmp_path, text.replace("}\ntrain", ", columns: {prompt: question}}\ntrain"), layout={"fsdp": 8})
    assert named.rollout is not None
    assert named.rollout.prompt_tokens == 100
    assert named.phases["compute"] > short.phases["compute"]
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "x" * 40}] * 2}) + "\n")
    chat = planned(tmp_path, text, layout={"fsdp": 8})
    assert chat.rollout is not None
    assert chat.rollout.prompt_tokens == 80 / 4 + 2 * 4


@pytest.mark.parametrize("content", ["", "not json\n", '{"prompt": 3}\n', "[1]\n", '{"prompt": ["x"]}\n'])
def test_prompts_that_cannot_be_read_fill_half_of_the_rest(content: str, tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text(content)
    result = planned(tmp_path, GRPO.replace("/data/prompts.jsonl", str(rows)), layout={"fsdp": 8})
    assert result.rollout is not None
    assert result.rollout.prompt_tokens == 1024 - result.rollout.completion_tokens
