"""`sweep:` and `model: {job: FILE}`: every combination is a valid job, and every mistake is one line, found early."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from craton.job import ContentError, Job, dump_job, load_job, make_job, parse_job, sweep_jobs

BASE = """\
kind: pretrain
model: {layers: 2, hidden: 64, ffn_hidden: 128, heads: 4, vocab: 512}
data: {path: text, tokenizer: "bpe:512", sequence: 64}
train: {global_batch_sequences: 8, steps: 10, precision: fp32}
cluster: local
"""


def with_sweep(sweep: str) -> Job:
    return parse_job(f"{BASE}sweep: {sweep}\n")


def problem_of(text: str) -> str:
    with pytest.raises(ContentError) as caught:
        parse_job(text)
    (problem,) = caught.value.problems
    return problem


def test_a_grid_has_a_member_for_each_combination_in_order() -> None:
    job = with_sweep("{train.learning_rate: [1e-3, 3e-3], model.hidden: [64, 128], parallel: 2}")
    members = sweep_jobs(job)
    assert [member.name for member in members] == [
        "learning_rate-0.001-hidden-64",
        "learning_rate-0.001-hidden-128",
        "learning_rate-0.003-hidden-64",
        "learning_rate-0.003-hidden-128",
    ]
    assert members[1].values == {"train.learning_rate": 1e-3, "model.hidden": 128}
    assert members[1].job.learning_rate == 1e-3
    assert members[1].job.model_shape is not None
    assert members[1].job.model_shape.hidden == 128
    assert {member.job.name for member in members} == {member.name for member in members}
    assert all(member.job.sweep is None for member in members)
    assert job.sweep is not None
    assert job.sweep.parallel == 2


def test_a_list_has_a_member_for_each_entry_which_may_have_a_name() -> None:
    job = with_sweep("{list: [{name: small, train.seed: 1}, {model.hidden: 128}]}")
    members = sweep_jobs(job)
    assert [(member.name, member.values) for member in members] == [
        ("small", {"train.seed": 1}),
        ("hidden-128", {"model.hidden": 128}),
    ]
    assert members[1].job.train is not None
    assert members[1].job.train.seed == 0


def test_values_are_those_of_the_job_file_and_stay_the_same_elsewhere(tmp_path: Path) -> None:
    sweep = (
        "{data.path: [text, other], train.tokens: [1k, 2M], layout: [auto, {fsdp: 1}], train.lora: [null, {rank: 4}]}"
    )
    job = parse_job(f"{BASE.replace(', steps: 10', '')}sweep: {sweep}", folder=tmp_path)
    last = sweep_jobs(job)[-1]
    assert last.values["data.path"] == str(tmp_path / "other")
    assert last.values["train.tokens"] == 2_000_000
    assert last.name == "path-other-tokens-2000000-layout-fsdp-16"
    again = parse_job(dump_job(job), folder="/elsewhere")
    assert again == job
    assert [member.job for member in sweep_jobs(again)] == [member.job for member in sweep_jobs(job)]


def test_a_required_key_may_stand_in_the_sweep_only() -> None:
    job = parse_job(BASE.replace("hidden: 64, ", "") + "sweep: {model.hidden: [32, 96]}")
    assert [member.job.model_shape.hidden for member in sweep_jobs(job) if member.job.model_shape] == [32, 96]


MISTAKES = [
    ("{train.learning_rte: [1]}", "key 'train.learning_rte' is not known; allowed under train: global_batch_tokens, "),
    ("{train.learning_rte: [1]}", "did you mean 'train.learning_rate'?"),
    ("{lr: [1e-3]}", "did you mean 'train.learning_rate'?"),
    (
        "{cluster: [local]}",
        "key 'cluster' cannot be swept: all members share it; allowed: model, data, train, layout, ",
    ),
    ("{name: [a, b]}", "members are named by their values, or by `name:` in the entries of `list:`"),
    ("{sweep.train.seed: [1]}", "a sweep cannot contain a sweep"),
    ("{train.learning_rate: [1e-3, fast]}", "train.learning_rate: 'fast' is not a number"),
    ("{train.learning_rate: []}", "the list is empty"),
    ("{train.learning_rate: 1e-3}", "0.001 is not a list of values; write e.g. train.learning_rate: [A, B]"),
    ("{train.learning_rate: [1e-3, 0.001]}", "train.learning_rate: 0.001 is given twice; remove one"),
    ("{train.global_batch_sequences: [8, 1k, 1000]}", "train.global_batch_sequences: 1000 is given twice"),
    ("{model.heads: [2, 3]}", "heads 3 does not divide hidden 64; give head_dim (sweep: model.heads 3)"),
    ("{train: [{steps: 1}], train.seed: [1]}", "train.seed is a part of train; keep one"),
    ("{train.seed.x: [1]}", "key 'train.seed.x' is not known"),
    ("{objective.x: [1]}", "key 'objective.x' is not known"),
    ("{}", "has no keys"),
    ("{parallel: 2}", "has no keys"),
    ("{parallel: 0, train.seed: [1]}", "sweep.parallel: 0 is not"),
    ("[1, 2]", "[1, 2] is not a sweep; write a mapping such as {train.learning_rate: [1e-3, 3e-3]}"),
    ("{list: []}", "sweep.list: the list is empty"),
    ("{list: 3}", "sweep.list: 3 is not a list"),
    ("{list: [1]}", "sweep.list[0]: 1 is not a mapping"),
    ("{list: [{}]}", "sweep.list[0]: has no keys"),
    ("{list: [{train.seed: 1}], train.seed: [1]}", "'train.seed' stands beside list"),
    ("{list: [{train.seed: 1}, {train.seed: 1}]}", "sweep: list: {'train.seed': 1} is given twice; remove one"),
    ("{list: [{name: a, train.seed: 1}, {name: A, train.seed: 2}]}", "entries 0 and 1 have the same name 'A'"),
    ("{list: [{name: a/b, train.seed: 1}]}", "'a/b' is not a name"),
    ("{list: [{name: 7, train.seed: 1}]}", "sweep.list[0].name: 7 is not a text; quote it"),
    ("{list: [{name: status.json, train.seed: 1}]}", "sweep.list[0].name: a file of the run is called 'status.json'"),
    ("{model: [{job: base.yaml}]}", "a sweep cannot choose between jobs"),
    (f"{{train.seed: {list(range(1001))}}}", "has 1,001 combinations; at most 1,000 are allowed"),
]


@pytest.mark.parametrize(("sweep", "says"), MISTAKES)
def test_a_mistake_in_a_sweep_is_one_line(sweep: str, says: str) -> None:
    problem = problem_of(f"{BASE}sweep: {sweep}\n")
    assert says in problem
    assert problem.startswith(("job.yaml:6: ", "job.yaml:2: "))


def test_a_mistake_names_the_line_of_the_value() -> None:
    lines = "sweep:\n  train.seed: [1]\n  train.learning_rate:\n  - 1e-3\n  - fast\n"
    assert problem_of(BASE + lines) == "job.yaml:10: train.learning_rate: 'fast' is not a number"


@pytest.mark.parametrize("kind", ["serve", "command"])
def test_only_training_is_swept(kind: str) -> None:
    text = f"kind: {kind}\nmodel: llama-3.1-8b\ncluster: local\nsweep: {{train.seed: [1, 2]}}\n"
    if kind == "command":
        text = text.replace("model: llama-3.1-8b", "command: 'true'")
    assert problem_of(text).startswith(f"job.yaml:1: sweep applies to the kinds pretrain, sft, dpo, grpo, not {kind}")


def test_sizes_that_no_machine_could_list_are_refused_at_once() -> None:
    keys = ", ".join(f"train.{key}: {list(range(1000))}" for key in ("seed", "clip", "epsilon", "weight_decay"))
    assert "has 1,000,000,000,000 combinations" in problem_of(f"{BASE}sweep: {{{keys}}}")
    deep = "a" + ".a" * 5000
    assert len(problem_of(f"{BASE}sweep: {{? {deep} : [1]}}")) < 400
    nested = "[" * 30 + "]" * 30
    with pytest.raises(ValueError, match="nested deeper than 20 levels"):
        parse_job(f"{BASE}sweep: {{train.seed: {nested}}}")
    with pytest.raises(ContentError, match="key 3 is not a text"):
        make_job({"kind": "pretrain", "sweep": {3: [1]}})


_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "train.learning_rate": st.floats(1e-9, 10.0),
    "train.seed": st.integers(0, 2**63 - 1),
    "train.schedule": st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    "train.betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)).map(list),
    "model.hidden": st.integers(1, 64).map(lambda number: 4 * number),
    "model.name": st.text(max_size=60).filter(lambda text: not any(0xD800 <= ord(letter) < 0xE000 for letter in text)),
    "data.path": st.text(string.ascii_letters + "-. üß→", max_size=60).map(lambda text: f"a{text}b"),
    "train.lora": st.sampled_from([None, {"rank": 4}, {"rank": 8, "targets": "mlp"}]),
}


@settings(max_examples=25)
@given(st.data())
def test_any_grid_has_unique_names_and_valid_jobs(draw: st.DataObject) -> None:
    keys = draw.draw(st.lists(st.sampled_from(sorted(_VALUES)), min_size=1, max_size=3, unique=True))
    sweep = {
        key: draw.draw(st.lists(_VALUES[key], min_size=1, max_size=4, unique_by=lambda value: json.dumps(value)))
        for key in keys
    }
    job = parse_job(f"{BASE}sweep: {json.dumps(sweep)}")
    members = sweep_jobs(job)
    assert job.sweep is not None
    assert len(members) == job.sweep.num_members
    assert len({member.name.lower() for member in members}) == len(members)
    assert all(len(member.name) <= 40 for member in members)
    assert parse_job(dump_job(members[-1].job), folder="/elsewhere") == members[-1].job
    assert parse_job(dump_job(job), folder="/elsewhere") == job


# --- model: {job: FILE}


def write(folder: Path, **models: str) -> None:
    """Write job files that differ in their model."""
    for name, model in models.items():
        text = BASE if not model else BASE.replace(BASE.splitlines()[1], f"model: {model}")
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def test_a_job_starts_from_the_weights_of_another(tmp_path: Path) -> None:
    write(tmp_path, base="", middle="{job: base.yaml}", last="{job: middle.yaml}")
    job = load_job(tmp_path / "last.yaml")
    assert job.weights_job is not None
    assert job.weights_job.weights_job is not None
    assert (job.weights_job.name, job.weights_job.weights_job.name) == ("middle", "base")
    assert job.model_shape == load_job(tmp_path / "base.yaml").model_shape
    assert (job.trained_run, job.weights_folder) == (None, None)
    (tmp_path / "base.yaml").unlink()
    assert parse_job(dump_job(job), folder="/elsewhere") == job


def test_the_run_with_the_weights_is_part_of_the_resolved_job(tmp_path: Path) -> None:
    write(tmp_path, base="", job="{job: base.yaml}")
    job = load_job(tmp_path / "job.yaml")
    assert job.weights_job is not None
    placed = job.with_weights_of(job.weights_job, tmp_path / "run")
    assert placed != job
    again = parse_job(dump_job(placed))
    assert again == placed
    assert again.trained_run == tmp_path / "run"


def test_fine_tuning_and_serving_take_the_weights_of_a_job(tmp_path: Path) -> None:
    write(tmp_path, base="")
    text = BASE.replace("pretrain", "sft").replace(BASE.splitlines()[1], "model: {job: base.yaml}")
    tuned = parse_job(text, folder=tmp_path)
    assert tuned.weights_folder is None
    text = "{kind: serve, model: {job: base.yaml}, cluster: local, serve: {max_length: 64}}"
    served = parse_job(text, folder=tmp_path)
    assert served.served_name == "inline"


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("{job: bas.yaml}", "job.yaml:2: model.job: {folder}/bas.yaml: no such file; did you mean 'base'?"),
        ("{job: 3}", "job.yaml:2: model.job: 3 is not a job file; write e.g. job: base.yaml"),
        ("{jobs: base.yaml}", "job.yaml:2: key 'jobs' is not known under model; allowed: job; did you mean 'job'?"),
        ("{job: base.yaml, hidden: 8}", "job.yaml:2: key 'hidden' is not known under model beside job: "),
        ("{job: command.yaml}", "model.job: command is of kind command, which trains no weights; give a job of kind "),
        ("{job: swept.yaml}", "model.job: swept is a sweep, which has many results"),
        ("{job: endless.yaml}", "model.job: endless never ends: it has neither train.steps nor train.tokens"),
        ("{job: adapters.yaml}", "model.job: adapters trains LoRA adapters, not a whole model"),
        ("{job: broken.yaml}", "broken.yaml:5: cluster: "),
        ("{job: first.yaml}", "a member that owns itself: first.yaml → second.yaml → first.yaml"),
    ],
)
def test_a_mistake_in_the_job_of_a_model_is_one_line(model: str, says: str, tmp_path: Path) -> None:
    write(tmp_path, base="", first="{job: second.yaml}", second="{job: first.yaml}")
    (tmp_path / "command.yaml").write_text("{kind: command, command: 'true', cluster: local}")
    (tmp_path / "swept.yaml").write_text(f"{BASE}sweep: {{train.seed: [1]}}")
    (tmp_path / "endless.yaml").write_text(BASE.replace(", steps: 10", ""))
    (tmp_path / "adapters.yaml").write_text(BASE.replace("steps: 10", "steps: 10, lora: {rank: 4}"))
    (tmp_path / "broken.yaml").write_text(BASE.replace("cluster: local", "cluster: [local]"))
    with pytest.raises(ContentError) as caught:
        parse_job(BASE.replace(BASE.splitlines()[1], f"model: {model}"), folder=tmp_path)
    (problem,) = caught.value.problems
    assert says.format(folder=tmp_path) in problem


def test_a_job_that_starts_from_itself_is_refused(tmp_path: Path) -> None:
    write(tmp_path, job="{job: job.yaml}")
    with pytest.raises(ContentError, match=r"job.yaml:2: model.job: a member that owns itself: job.yaml → job.yaml"):
        load_job(tmp_path / "job.yaml")


def test_a_long_chain_is_refused(tmp_path: Path) -> None:
    write(tmp_path, **{f"job-{number}": f"{{job: job-{number + 1}.yaml}}" for number in range(9)})
    with pytest.raises(ContentError, match="at most 4 jobs may start from each other"):
        load_job(tmp_path / "job-0.yaml")


def test_random_weights_and_the_weights_of_a_job_exclude_each_other(tmp_path: Path) -> None:
    write(tmp_path, base="")
    text = BASE.replace(BASE.splitlines()[1], "model: {job: base.yaml}")
    text = text.replace("steps: 10", "steps: 10, initialize: random")
    with pytest.raises(ContentError, match=r"job.yaml:4: train.initialize random ignores the weights of base"):
        parse_job(text, folder=tmp_path)


def test_a_sweep_may_start_from_the_weights_of_a_job_but_not_change_its_model(tmp_path: Path) -> None:
    write(tmp_path, base="")
    text = BASE.replace(BASE.splitlines()[1], "model: {job: base.yaml}")
    job = parse_job(f"{text}sweep: {{train.seed: [1, 2]}}", folder=tmp_path)
    assert all(member.job.weights_job == job.weights_job for member in sweep_jobs(job))
    with pytest.raises(ContentError, match=r"model.hidden: the model is that of base; sweep it there"):
        parse_job(f"{text}sweep: {{model.hidden: [64, 128]}}", folder=tmp_path)
