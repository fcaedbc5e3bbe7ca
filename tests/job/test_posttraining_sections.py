"""The sections of kinds dpo and grpo: defaults, short forms, and every pair of keys that does not go together."""

from __future__ import annotations

from typing import get_args

import pytest

from craton.job import ContentError, Job, dump_job, parse_job
from craton.job.document import allowed_keys, foreign
from craton.job.sections.posttraining import PolicyLoss, PreferenceLoss

MODEL = "{layers: 2, hidden: 64, ffn_hidden: 128, heads: 4, kv_heads: 2, head_dim: 16, vocab: 259}"


def job_text(kind: str, **sections: str) -> str:
    lines = {
        "kind": kind,
        "model": MODEL,
        "data": "{path: /d, sequence: 64}",
        "train": "{steps: 5}" if kind == "grpo" else "{steps: 5, global_batch_sequences: 4}",
        "cluster": "local x 1",
        **({"reward": "math"} if kind == "grpo" else {}),
        **sections,
    }
    return "".join(f"{key}: {value}\n" for key, value in lines.items() if value)


def parsed(kind: str, **sections: str) -> Job:
    job = parse_job(job_text(kind, **sections), folder="/jobs")
    assert parse_job(dump_job(job), folder="/elsewhere") == job
    return job


def test_defaults_of_a_preference_job() -> None:
    preference = parsed("dpo").preference
    assert preference is not None
    assert (preference.loss, preference.scale, preference.reference_model) == ("dpo", 0.1, "start")
    simpo = parsed("dpo", preference="{loss: simpo}").preference
    assert simpo is not None
    assert (simpo.scale, simpo.target_margin, simpo.reference_model) == (2.0, 1.0, None)
    folder = parsed("dpo", preference="{loss: ipo, reference: base}").preference
    assert folder is not None
    assert folder.reference_model == "/jobs/base"


def test_defaults_of_an_rl_job() -> None:
    job = parsed("grpo")
    assert job.policy is not None
    assert job.rollout is not None
    assert job.verify is not None
    assert (job.policy.loss, job.policy.clip_range, job.policy.updates) == ("grpo", (0.2, 0.2), 1)
    assert (job.rollout.samples, job.global_batch_sequences, job.max_completion_tokens) == (512, 512, 32)
    assert (job.rollout.max_staleness, job.rollout.num_workers, job.rollout.max_turns) == (0, 0, 1)
    assert (job.verify.limit, job.verify.workers, job.verify.memory) == (10.0, None, 1 << 30)


def test_rewards_are_a_function_a_verifier_or_a_list() -> None:
    assert parsed("grpo", reward="my.rewards:score").reward[0].python == "my.rewards:score"
    terms = parsed("grpo", reward="[{verifier: exact, weight: 2, field: gold}, {model: rm}, my.rewards:score]").reward
    assert [(term.name, term.weight) for term in terms] == [
        ("exact", 2.0),
        ("model /jobs/rm", 1.0),
        ("my.rewards:score", 1.0),
    ]
    assert (terms[0].answer_field, terms[1].answer_field) == ("gold", "answer")


def test_clip_is_one_number_or_two() -> None:
    for written, expected in (("0.3", (0.3, 0.3)), ("[0.2, 0.28]", (0.2, 0.28))):
        policy = parsed("grpo", policy=f"{{clip: {written}}}").policy
        assert policy is not None
        assert policy.clip_range == expected
    dapo = parsed("grpo", policy="{loss: dapo}").policy
    assert dapo is not None
    assert dapo.clip_range == (0.2, 0.28)


def test_separate_rollouts_have_workers_and_staleness() -> None:
    rollout = parsed("grpo", rollout="{mode: separate, workers: 2, staleness: 3, layout: {tp: 2}}").rollout
    assert rollout is not None
    assert (rollout.num_workers, rollout.max_staleness) == (2, 3)


@pytest.mark.parametrize(
    ("kind", "sections", "message"),
    [
        ("dpo", {"preference": "{loss: kto}"}, "preference.loss: 'kto' is not allowed"),
        ("dpo", {"preference": "{loss: reward, beta: 1}"}, "loss reward has no beta"),
        ("dpo", {"preference": "{loss: orpo, reference: start}"}, "loss orpo compares with no reference"),
        ("dpo", {"preference": "{margin: 1}"}, "margin applies to loss simpo, not dpo"),
        ("dpo", {"rollout": "{group: 2}"}, "rollout applies to kind grpo, not dpo"),
        ("sft", {"preference": "{}"}, "preference applies to kind dpo, not sft"),
        ("sft", {"data": "{path: /d, sequence: 8, columns: {prompt: q}}"}, "columns applies to the kinds dpo and grpo"),
        ("grpo", {"train": "{steps: 5, global_batch_tokens: 64}"}, "global_batch_tokens does not apply to kind grpo"),
        ("grpo", {"train": "{tokens: 1k}"}, "tokens does not apply to kind grpo"),
        ("grpo", {"train": "{tokens: 1k, steps: 5}"}, "train: tokens does not apply to kind grpo"),
        ("grpo", {"train": "{precision: fp32}"}, "kind grpo needs steps"),
        ("grpo", {"verify": "{memory: 1MiB}"}, "verify.memory: 1 MiB is too little"),
        ("grpo", {"reward": ""}, "kind grpo needs `reward:`"),
        ("grpo", {"reward": "mth"}, "did you mean 'math'?"),
        ("grpo", {"reward": "[{verifier: judge}]"}, "verifier judge needs an endpoint"),
        ("grpo", {"reward": "[{verifier: math, python: 'a:b'}]"}, "give one of verifier, python and model"),
        ("grpo", {"reward": "[{verifier: regex, pattern: '('}]"}, "is not a regular expression"),
        ("grpo", {"reward": "[{verifier: math, pattern: x}]"}, "pattern applies to verifier regex, not math"),
        (
            "grpo",
            {"reward": "[{verifier: judge, endpoint: {url: 'http://h:1', key: KEY}}]"},
            "reward[0].endpoint: the ranks get KEY only as a secret; write run: {secrets: [KEY]}",
        ),
        ("grpo", {"rollout": "{staleness: 2}"}, "mode sync always has the newest weights"),
        ("grpo", {"rollout": "{workers: 2}"}, "workers applies to mode separate, not sync"),
        ("grpo", {"rollout": "{top_p: 0.9}"}, "top_p would sample from another distribution"),
        ("grpo", {"rollout": "{temperature: 0}"}, "temperature"),
        ("grpo", {"rollout": "{group: 1}"}, "group is 1; use 2 or more"),
        ("grpo", {"rollout": "{max_tokens: 64}"}, "leaves no room for a prompt"),
        ("grpo", {"rollout": "{turns: 2}"}, "turns needs an environment"),
        (
            "grpo",
            {"rollout": "{mode: separate, endpoint: {url: 'http://h:1'}}", "policy": "{correction: off}"},
            "keeps its own weights, so correction cannot be off",
        ),
        ("grpo", {"rollout": "{mode: separate, endpoint: {url: localhost}}"}, "'localhost' is not an endpoint"),
        ("grpo", {"policy": "{loss: distill}"}, "loss distill needs a teacher"),
        ("grpo", {"policy": "{loss: distill, teacher: big}"}, "loss distill learns from its teacher"),
        ("grpo", {"policy": "{teacher: big}"}, "loss grpo has no teacher"),
        ("grpo", {"policy": "{gae: 0.9}"}, "gae applies to loss ppo, not grpo"),
        ("grpo", {"policy": "{reference: base}"}, "reference is used only with kl"),
        ("grpo", {"policy": "{clip: [1, 2, 3]}"}, "is not a clip range"),
        ("grpo", {"policy": "{minibatches: 7}"}, "minibatches 7 does not divide the 512 samples"),
    ],
)
def test_keys_that_do_not_go_together(kind: str, sections: dict[str, str], message: str) -> None:
    with pytest.raises(ContentError) as error:
        parsed(kind, **sections)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("kind", "sections", "message"),
    [
        ("grpo", {"rollout": "{num_generations: 4}"}, "key 'num_generations' is not known under rollout; "),
        ("grpo", {"rollout": "{num_generations: 4}"}, "; use rollout.group"),
        ("grpo", {"train": "{steps: 5, num_generations: 4}"}, "; use rollout.group"),
        ("grpo", {"rollout": "{max_completion_length: 4}"}, "; use rollout.max_tokens"),
        ("grpo", {"train": "{steps: 5, max_new_tokens: 4}"}, "; use rollout.max_tokens"),
        ("grpo", {"policy": "{beta: 0.1}"}, "; use policy.kl"),
        ("grpo", {"beta": "0.1"}, "; use policy.kl"),
        ("grpo", {"loss": "dapo"}, "; use policy.loss"),
        ("dpo", {"train": "{steps: 5, beta: 0.1}"}, "; use preference.beta"),
        ("dpo", {"beta": "0.1"}, "; use preference.beta"),
        ("sft", {"train": "{steps: 5, beta: 0.1}"}, "did you mean 'betas'?"),
        ("grpo", {"rollout": "{mode: async}"}, "; write overlap (beside the trainer) or separate (on servers of"),
        ("grpo", {"rollout": "{mode: synch}"}, "did you mean 'sync'?"),
        ("rlhf", {}, "; write kind: dpo with preference: {loss: reward} for the reward model, then kind: grpo with"),
        ("RM", {}, "; write kind: dpo with preference: {loss: reward}"),
    ],
)
def test_what_other_tools_write_is_answered_with_our_key(kind: str, sections: dict[str, str], message: str) -> None:
    with pytest.raises(ContentError) as error:
        parsed(kind, **sections)
    assert message in str(error.value)


def test_every_loss_that_is_written_as_a_kind_is_told_its_kind() -> None:
    for kind, section, losses in (("grpo", "policy", PolicyLoss), ("dpo", "preference", PreferenceLoss)):
        for loss in {*get_args(losses)} - {kind}:
            with pytest.raises(ContentError) as error:
                parsed(loss)
            assert f"; write kind: {kind} with {section}: {{loss: {loss}}}" in str(error.value)


def test_every_key_that_is_offered_for_one_of_another_tool_exists() -> None:
    for keys in foreign._KEYS.values():
        for ours in keys.values():
            *section, key = ours.split(".")
            assert key in allowed_keys(Job, tuple(section)), ours
