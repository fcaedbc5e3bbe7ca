"""Members of a job, and the result of a sweep: names, needs, kept results; rows, the best member, table and page."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from html_pages import HOSTILE, Reader, check_in_browser, needs_browser

from craton.job import Job, dump_job, load_job, parse_job
from craton.orchestration import RunStateError, StartError
from craton.orchestration.draft import draft_run
from craton.orchestration.draft.members import is_result_of, member_jobs
from craton.orchestration.members import (
    SweepResult,
    SweepRow,
    best_row,
    read_sweep,
    sweep_json,
    sweep_plot_html,
    sweep_rows,
    sweep_table_text,
    write_sweep,
)
from craton.orchestration.members.result import SweepCurve, metric_of
from craton.orchestration.start import draft_resumption
from craton.telemetry import RunDirectory
from craton.telemetry.members import (
    MemberSpec,
    MembersSpec,
    MembersStatus,
    MemberStatus,
    read_members,
    write_members,
    write_members_status,
)

BASE = """\
kind: pretrain
model: {layers: 2, hidden: 64, ffn_hidden: 128, heads: 4, vocab: 512}
data: {source: "craton.ml.data.patterns:walks", sequence: 64}
train: {global_batch_sequences: 8, steps: 10, precision: fp32}
cluster: local
"""
FROM_BASE = BASE.replace(BASE.splitlines()[1], "model: {job: base.yaml}")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "runs"))
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path / "runs"


def from_base(folder: Path, more: str = "") -> Job:
    (folder / "next.yaml").write_text(FROM_BASE + more)
    return load_job(folder / "next.yaml")


def finished(root: Path, name: str, job: Job, step: int = 10) -> RunDirectory:
    run = RunDirectory.create(root, name)
    run.job_path.write_text(dump_job(job))
    run.mark("DONE")
    marker = run.checkpoints("shared") / f"step-{step:08}" / "COMPLETE"
    marker.parent.mkdir(parents=True)
    marker.touch()
    return run


# --- which members a job has


def test_a_job_without_a_sweep_or_the_weights_of_another_has_no_members() -> None:
    assert member_jobs(parse_job(BASE)) is None


def test_members_of_a_sweep(root: Path) -> None:
    members = member_jobs(parse_job(f"{BASE}sweep: {{train.seed: [1, 2]}}"))
    assert members is not None
    assert members.spec == MembersSpec(
        [MemberSpec("seed-1", values={"train.seed": 1}), MemberSpec("seed-2", values={"train.seed": 2})], 1, "sweep"
    )
    assert list(members.jobs) == ["seed-1", "seed-2"]
    wide = member_jobs(parse_job(f"{BASE}sweep: {{train.seed: [1, 2], parallel: 2}}"))
    assert wide is not None
    assert wide.spec.parallel == 2


def test_the_member_that_trains_the_weights_opens_the_gate(root: Path, tmp_path: Path) -> None:
    members = member_jobs(from_base(tmp_path))
    assert members is not None
    assert members.spec == MembersSpec([MemberSpec("base", gate="done")], purpose="weights")
    assert members.owner.trained_run == root / "next" / "members" / "base"
    again = member_jobs(members.owner)
    assert again is not None
    assert again.spec == members.spec, "a resumed run has the same member"


def test_a_sweep_trains_its_weights_once(root: Path, tmp_path: Path) -> None:
    members = member_jobs(from_base(tmp_path, "sweep: {train.seed: [1, 2], parallel: 2}"), root / "mine")
    assert members is not None
    assert [(member.name, member.needs, member.gate) for member in members.spec.members] == [
        ("base", {}, None),
        ("seed-1", {"base": "done"}, None),
        ("seed-2", {"base": "done"}, None),
    ]
    place = root / "mine" / "members" / "base"
    assert {members.jobs[name].trained_run for name in ("seed-1", "seed-2")} == {place}
    assert member_jobs(members.jobs["seed-1"], root / "mine" / "members" / "seed-1") is None


def test_a_chain_of_jobs_nests(root: Path, tmp_path: Path) -> None:
    from_base(tmp_path)
    (tmp_path / "last.yaml").write_text(BASE.replace(BASE.splitlines()[1], "model: {job: next.yaml}"))
    outer = member_jobs(load_job(tmp_path / "last.yaml"))
    assert outer is not None
    inner = member_jobs(outer.jobs["next"], root / "last" / "members" / "next")
    assert inner is not None
    assert inner.owner.trained_run == root / "last" / "members" / "next" / "members" / "base"


def test_a_result_is_kept_until_its_job_file_changes(root: Path, tmp_path: Path) -> None:
    job = from_base(tmp_path)
    run = finished(root, "base", load_job(tmp_path / "base.yaml"))
    members = member_jobs(job)
    assert members is not None
    assert members.spec.members == [MemberSpec("base", gate="done", is_kept=True, result=str(run.path))]
    assert members.owner.trained_run == run.path
    (tmp_path / "base.yaml").write_text(BASE.replace("steps: 10", "steps: 10, seed: 3"))
    changed = member_jobs(load_job(tmp_path / "next.yaml"))
    assert changed is not None
    assert not changed.spec.members[0].is_kept


def test_a_result_of_the_user_s_own_code_is_not_kept(root: Path, tmp_path: Path) -> None:
    text = BASE.replace("craton.ml.data.patterns:walks", "samples:draw")
    (tmp_path / "base.yaml").write_text(text)
    job = load_job(tmp_path / "base.yaml")
    assert not is_result_of(finished(root, "base", job), job), "samples.py may have changed"


def test_the_result_of_a_member_elsewhere_is_kept(root: Path, tmp_path: Path) -> None:
    RunDirectory.create(root, "other")
    run = finished(root / "other" / "members", "base", load_job(tmp_path / "base.yaml"))
    members = member_jobs(from_base(tmp_path))
    assert members is not None
    assert members.spec.members[0].result == str(run.path)


def test_steps_of_a_sweep_are_those_of_its_members(root: Path, tmp_path: Path) -> None:
    sweep = parse_job(f"{BASE}sweep: {{train.seed: [1, 2]}}")
    with pytest.raises(StartError, match=r"is a sweep, whose steps are those of its members; remove --stop-at"):
        draft_run(sweep, root / "swept", stop_at=3)
    run = RunDirectory.create(root, "swept")
    write_members(run, MembersSpec([MemberSpec("seed-1")], purpose="sweep"))
    for option, given in (("--steps", {"steps": 20}), ("--cluster", {"cluster": "local x 2"})):
        with pytest.raises(RunStateError, match=f"swept is a sweep, and {option} is for one run"):
            draft_resumption(run, **given)


def test_only_a_whole_result_is_kept(root: Path, tmp_path: Path) -> None:
    job = load_job(tmp_path / "base.yaml")
    assert not is_result_of(RunDirectory(root / "base"), job)
    run = finished(root, "other-name", job)
    assert is_result_of(run, job)
    assert not is_result_of(finished(root, "short", job, step=5), job)
    run.unmark("DONE")
    assert not is_result_of(run, job)
    run.mark("DONE")
    shutil.rmtree(run.path / "checkpoints")
    assert not is_result_of(run, job)
    run.job_path.write_text("{")
    assert not is_result_of(run, job)


def test_a_result_of_text_is_found_by_the_tokens_made_of_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from craton.ml.data import prepare

    monkeypatch.setenv("CRATON_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 50)
    text = BASE.replace('source: "craton.ml.data.patterns:walks"', 'path: text.txt, tokenizer: "bpe:300"')
    job = parse_job(text, folder=tmp_path)
    (folder,) = prepare(job).values()
    run = finished(root, "base", parse_job(text.replace("text.txt", str(folder)).replace(', tokenizer: "bpe:300"', "")))
    assert is_result_of(run, job)
    (tmp_path / "text.txt").write_text("changed\n" * 300)
    assert not is_result_of(run, job)


def test_a_member_of_a_sweep_may_not_have_the_name_of_the_weights(root: Path, tmp_path: Path) -> None:
    job = from_base(tmp_path, "sweep: {list: [{name: base, train.seed: 1}]}")
    with pytest.raises(StartError, match=r"next.yaml:6: a member of the sweep has the name of the job .* base; rename"):
        member_jobs(job)


def test_a_kept_result_survives_the_file(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "owner")
    spec = MembersSpec([MemberSpec("base", is_kept=True, result="/runs/base")], purpose="weights")
    write_members(run, spec)
    assert read_members(run) == spec
    document = json.loads((run.path / "members.json").read_text())
    del document["members"][0]["result"]
    (run.path / "members.json").write_text(json.dumps(document))
    assert read_members(run).members[0].result == ""


# --- the result of a sweep


def plant(
    owner: RunDirectory,
    name: str,
    losses: list[float | None],
    state: str = "done",
    evaluation: float | None = None,
    reason: str = "",
    rewards: list[float] | None = None,
) -> None:
    """Write the directory of a member that has recorded these losses."""
    run = RunDirectory.create(owner.path / "members", name)
    run.job_path.write_text(BASE)
    run.launch_path.write_text(json.dumps({"nodes": ["node-0"], "ranks_per_node": 1, "dollars_per_day": 24.0}))
    run.plan_path.write_text(json.dumps({"steps": 10, "sequence": 64, "global_batch_sequences": 8}))
    lines = [
        {"time": 1.0, "step": step, "generation": 0, "rank": 0, "run_loss": loss, "run_tokens_per_second": 2000.0}
        for step, loss in enumerate(losses, start=1)
    ]
    for line, reward in zip(lines, rewards or (), strict=False):
        line["run_reward"] = reward
    if evaluation is not None:
        lines.append({"time": 2.0, "step": 10, "generation": 0, "rank": 0, "run_evaluation_loss": evaluation})
    path = run.metrics_path("node-0")
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if state == "done":
        run.mark("DONE")
    elif state == "failed":
        run.mark("FATAL", reason)


@pytest.fixture
def owner(tmp_path: Path) -> RunDirectory:
    """Six members: three done, one of them with NaN; one that failed, one that was stopped, one that waits."""
    run = RunDirectory.create(tmp_path, "six")
    names = [f"learning_rate-{rate}" for rate in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)]
    rates = {name: {"train.learning_rate": float(name.rpartition("-")[2])} for name in names}
    write_members(run, MembersSpec([MemberSpec(name, values=values) for name, values in rates.items()], 2, "sweep"))
    plant(run, names[0], [6.0, 5.0, 4.0])
    plant(run, names[1], [6.0, 4.0, 3.0])
    plant(run, names[2], [6.0, None, None])
    plant(run, names[3], [6.0, 2.0], "failed", reason="rank 0: out of memory\nTraceback")
    plant(run, names[4], [6.0, 1.0], "stopped")
    status = {names[5]: MemberStatus("waiting", "a free place (2 of 2 in use)")}
    (run.path / "members").mkdir(exist_ok=True)
    write_members_status(run, MembersStatus(status))
    return run


def test_rows_have_state_numbers_and_reason(owner: RunDirectory) -> None:
    rows = {row.name: row for row in sweep_rows(owner)}
    best = rows["learning_rate-0.003"]
    assert (best.state, best.step, best.steps, best.tokens_per_second) == ("done", 3, 10, 2000.0)
    assert best.loss == pytest.approx(13 / 3)
    assert math.isnan(rows["learning_rate-0.01"].loss or 0.0)
    assert (rows["learning_rate-0.03"].state, rows["learning_rate-0.03"].message) == ("failed", "rank 0: out of memory")
    assert (rows["learning_rate-0.3"].state, rows["learning_rate-0.3"].message) == (
        "waiting",
        "a free place (2 of 2 in use)",
    )
    assert best_row(list(rows.values())) is best


def test_the_table_ranks_members_and_names_the_best(owner: RunDirectory) -> None:
    text = sweep_table_text(read_sweep(owner))
    lines = text.splitlines()
    assert lines[0].split() == ["MEMBER", "STATE", "STEP", "LOSS", "TOK/S", "TIME", "REASON"]
    assert lines[2].split()[:4] == ["★", "learning_rate-0.003", "done", "3/10"]
    assert [line.split()[0] for line in lines[3:5]] == ["learning_rate-0.001", "learning_rate-0.01"]
    assert "NaN" in lines[4]
    assert any("failed" in line and "rank 0: out of memory" in line for line in lines)
    assert lines[-1] == "best: learning_rate-0.003 with the lowest loss, 4.33 (train.learning_rate 0.003)"


def test_results_are_written_beside_the_members(owner: RunDirectory) -> None:
    write_sweep(owner)
    document = json.loads((owner.path / "sweep.json").read_text())
    assert (document["best"], document["compared_by"]) == ("learning_rate-0.003", "loss")
    assert [member["state"] for member in document["members"]][:4] == ["done", "done", "done", "failed"]
    assert document["members"][2]["loss"] is None
    page = Reader((owner.path / "sweep.html").read_text(encoding="utf-8"))
    assert page.plots == ["curves", "value-0"]
    assert "Best: learning_rate-0.003 with the lowest loss, 4.33" in page.text
    assert "rank 0: out of memory" in page.text


def row(name: str, loss: float | None = None, state: str = "done", **more: Any) -> SweepRow:
    return SweepRow(name, {"train.seed": name}, state, loss=loss, **more)


def test_the_best_member_is_done_and_has_the_smallest_finite_loss() -> None:
    assert best_row([]) is None
    assert best_row([row("a", math.nan), row("b", math.inf), row("c", 1.0, "failed")]) is None
    first, second = row("a", 2.0), row("b", 2.0)
    assert best_row([row("z", 3.0), first, second, row("c", 1.0, "stopped")]) is first
    evaluated = row("c", 9.0, evaluation_loss=1.5)
    assert best_row([first, evaluated]) is evaluated, "with evaluation, losses of training do not count"


def test_rewards_and_accuracies_decide_before_losses(tmp_path: Path) -> None:
    """Of reinforcement learning the loss says nothing, of preferences with different betas little."""
    wins = row("b", 5.0, reward=0.7)
    assert best_row([row("a", 0.1, reward=0.4), wins, row("c", 0.1, reward=math.nan)]) is wins
    validated = row("a", 0.1, reward=0.4, validation_reward=0.6)
    assert best_row([validated, wins]) is validated, "held-out prompts say more"
    preferred = row("d", 0.7, evaluation_loss=0.7, validation_accuracy=0.9)
    assert best_row([row("e", 0.1, evaluation_loss=0.1, validation_accuracy=0.8), preferred]) is preferred
    solves = row("f", 0.9, evaluation_loss=0.9, suite_accuracy=0.5)
    assert best_row([row("g", 0.1, evaluation_loss=0.1, suite_accuracy=0.4), solves]) is solves
    assert metric_of([solves]).text(solves) == "0.50"

    run = RunDirectory.create(tmp_path, "rewards")
    members = {"low": [0.1, 0.2], "high": [0.1, 0.6]}
    write_members(run, MembersSpec([MemberSpec(name, values={"train.seed": name}) for name in members], 1, "sweep"))
    for name, rewards in members.items():
        plant(run, name, [0.5, 0.4 if name == "low" else 0.6], rewards=rewards)
    write_sweep(run)
    document = json.loads((run.path / "sweep.json").read_text())
    assert (document["best"], document["compared_by"]) == ("high", "reward")
    text = sweep_table_text(read_sweep(run))
    assert text.splitlines()[0].split() == ["MEMBER", "STATE", "STEP", "LOSS", "REWARD", "TOK/S", "TIME"]
    assert text.endswith("best: high with the highest reward, 0.35 (train.seed high)")
    page = Reader((run.path / "sweep.html").read_text(encoding="utf-8"))
    for words in ("Reward over tokens", "the highest reward is at high", "Final reward by train.seed"):
        assert words in page.text
    assert read_sweep(run).curves["high"].values == (0.1, 0.6)


def test_a_sweep_without_members_or_data_is_shown(tmp_path: Path) -> None:
    empty = SweepResult("none", (), ())
    assert sweep_table_text(empty).endswith("the sweep has no members")
    assert "No member has recorded a loss yet." in Reader(sweep_plot_html(empty)).text
    waiting = SweepResult("one", ("train.seed",), (row("a", state="waiting"),))
    assert sweep_table_text(waiting).endswith("no best member: none is done")
    assert sweep_json(waiting)["best"] is None


def test_a_damaged_member_is_a_row_that_says_so(owner: RunDirectory) -> None:
    folder = owner.path / "members" / "learning_rate-0.001"
    (folder / "plan.json").write_text("{")
    (folder / "job.yaml").write_text("{")
    rows = {row.name: row for row in sweep_rows(owner)}
    assert rows["learning_rate-0.001"].state == "unreadable"
    assert rows["learning_rate-0.003"].state == "done"


def many(number: int) -> SweepResult:
    rows = tuple(
        SweepRow(
            f"seed-{seed}-hidden-{hidden}",
            {"train.seed": seed, "model.hidden": hidden},
            "done" if seed % 7 else "failed",
            100,
            100,
            3.0 + 1 / (1 + seed) + hidden / 1000,
            tokens_per_second=1e4,
            seconds=60.0,
        )
        for seed in range(number // 2)
        for hidden in (64, 128)
    )
    curves = {
        each.name: SweepCurve(
            tuple(float(step * 512) for step in range(1, 21)),
            tuple((each.loss or 0) + 3 / step for step in range(1, 21)),
        )
        for each in rows
    }
    return SweepResult("many", ("train.seed", "model.hidden"), rows, curves)


def test_a_thousand_members_make_a_short_table_and_few_traces() -> None:
    sweep = many(1000)
    lines = sweep_table_text(sweep).splitlines()
    assert len(lines) == 2 + 40 + 1 + 2
    assert lines[-3] == "and 960 more members, in sweep.json and sweep.html"
    page = sweep_plot_html(sweep)
    figures = json.loads(page.split('id="figures">')[1].split("</script>")[0])
    assert len(figures["curves"]["data"]) == 3  # a trace for each colour, and the best member
    assert len(Reader(page).tags) > 1000


@needs_browser
def test_pages_are_drawn_by_a_browser(owner: RunDirectory, tmp_path: Path) -> None:
    hostile = SweepResult(
        HOSTILE,
        ("data.path",),
        (SweepRow("a", {"data.path": HOSTILE}, "done", loss=1.0), SweepRow("b", {"data.path": "b"}, "done", loss=2.0)),
        {"a": SweepCurve((512.0,), (1.0,)), "b": SweepCurve((512.0, 1024.0), (None, 2.0))},
    )
    pages = {
        "six": (sweep_plot_html(read_sweep(owner)), 1100),
        "hostile": (sweep_plot_html(hostile), 1100),
    }
    plots = check_in_browser(pages, tmp_path, turned=("six",))
    assert plots["six"] == ["curves", "value-0"]
    assert plots["hostile"] == ["curves", "value-0"]
