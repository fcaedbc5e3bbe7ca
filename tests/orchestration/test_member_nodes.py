"""The nodes of members in a scheduler's job: how many are requested, which one each gets, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from member_runs import counting

from craton.api import preview
from craton.job import Job, parse_job
from craton.orchestration import RunStateError, StartError
from craton.orchestration.draft.members import Members
from craton.orchestration.member_nodes import NodeZones, choose_hosts, node_zones
from craton.orchestration.slurm import sbatch_script
from craton.orchestration.slurm.allocation import AllocatedHost, Allocation, read_allocation, write_allocation
from craton.orchestration.slurm.member_steps import submit_member
from craton.orchestration.slurm.step import SlurmStep, agents_command
from craton.orchestration.start.runs import draft_resume
from craton.telemetry import RunDirectory
from craton.telemetry.members import MemberSpec, MembersSpec, write_members

BASE = """\
kind: pretrain
model: {layers: 2, hidden: 64, ffn_hidden: 128, heads: 4, vocab: 512}
data: {source: "samples:draw", sequence: 64}
train: {global_batch_sequences: 64, steps: 10, precision: bf16}
"""
SWEEP = MembersSpec([MemberSpec(name, nodes=2) for name in "abc"], 2, "sweep")


def directives(job: Job, members: Members | None = None) -> set[str]:
    start = preview(job, on="slurm", members=members)
    script = sbatch_script(start.draft, start.run)
    return {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}


def test_a_sweep_requests_the_nodes_and_gpus_of_the_members_that_run_at_a_time(root: Path) -> None:
    job = parse_job(f"name: lr\n{BASE}cluster: p5.48xlarge x 2\nsweep: {{train.seed: [1, 2, 3], parallel: 2}}\n")
    assert {"--nodes=4", "--ntasks-per-node=1", "--gres=gpu:8"} <= directives(job)
    draft = preview(job, on="slurm").draft
    alone = preview(job.model_copy(update={"sweep": None}), on="slurm").draft
    assert draft.dollars_per_hour == pytest.approx(2 * (alone.dollars_per_hour or 0.0))
    assert draft.launch.dollars_per_day == pytest.approx(24 * (draft.dollars_per_hour or 0.0))
    assert draft.launch.nodes == ["node-0"]
    assert not draft.launch.starts_manager
    assert draft.launch.agent_command == []


def test_a_job_that_trains_its_weights_first_uses_the_same_nodes(root: Path, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(f"{BASE}cluster: p5.48xlarge x 3\n")
    text = f"name: next\n{BASE}cluster: p5.48xlarge x 2\n".replace(BASE.splitlines()[1], "model: {job: base.yaml}")
    assert "--nodes=3" in directives(parse_job(text, folder=tmp_path))


def test_members_beside_their_owner_have_nodes_of_their_own(root: Path) -> None:
    spec = MembersSpec([MemberSpec("base", gate="done"), MemberSpec("judge", gate="ready")])
    jobs = {"base": counting("base", 3), "judge": counting("judge")}
    assert "--nodes=4" in directives(counting("owner", 2), Members(spec, jobs))
    assert node_zones(spec, 2) == NodeZones(2, 1)


def test_hosts_are_divided_between_members_that_run_at_once() -> None:
    hosts = ["g1", "g2", "g3", "g4"]
    assert node_zones(SWEEP, 1) == NodeZones(0, 4)
    assert choose_hosts(SWEEP, "a", 1, hosts, set()) == ["g1", "g2"]
    assert choose_hosts(SWEEP, "b", 1, hosts, {"g1", "g2"}) == ["g3", "g4"]
    assert choose_hosts(SWEEP, "a", 1, hosts, set(), before=["g4", "g3"]) == ["g3", "g4"], "where its files may be"
    assert choose_hosts(SWEEP, "c", 1, hosts, set(hosts)) == []
    mixed = MembersSpec([MemberSpec("base", gate="done"), MemberSpec("judge", gate="ready")])
    assert choose_hosts(mixed, "base", 2, hosts[:3], set()) == ["g1"]
    assert choose_hosts(mixed, "judge", 2, hosts[:3], set()) == ["g3"], "not a node of its owner"


def test_the_allocation_of_a_member_is_a_part_of_its_owners(tmp_path: Path) -> None:
    hosts = [AllocatedHost(f"node-{number}", f"g{number}", f"10.0.0.{number}", "leaf1") for number in range(3)]
    whole = Allocation("7", 1, tuple(hosts[:1]), tuple(hosts[1:]))
    run = RunDirectory.create(tmp_path, "owner")
    write_allocation(run, whole)
    assert read_allocation(run) == whole
    assert whole.all_hosts == ["g0", "g1", "g2"]
    part = whole.part(["node-0"], ["g2"])
    assert part.nodes == (AllocatedHost("node-0", "g2", "10.0.0.2", "leaf1"),)
    assert (part.job, part.restarts, part.others) == ("7", 1, ())


def test_the_step_of_a_member_shares_its_nodes_and_has_its_options() -> None:
    step = SlurmStep(Path("/fsx/runs/lr/members/a"), "/venv/python", "nvcr.io#a/b", ("/fsx/runs",), name="a")
    words = agents_command(step, ["g1", "g2"])
    assert {"--overlap", "--job-name=a", "--nodes=2", "--nodelist=g1,g2", "--ntasks-per-node=1"} <= set(words)
    assert {"--container-image=nvcr.io#a/b", "--container-mounts=/fsx/runs:/fsx/runs"} <= set(words)
    own = agents_command(SlurmStep(Path("/fsx/runs/lr"), "/venv/python"), ["g1"])
    assert not [word for word in own if word.startswith(("--overlap", "--job-name"))]


def test_what_a_scheduler_cannot_do_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(f"{BASE}cluster: local\n")
    text = f"name: next\n{BASE}cluster: local\n".replace(BASE.splitlines()[1], "model: {job: base.yaml}")
    nested = Members(MembersSpec([MemberSpec("next")]), {"next": parse_job(text, folder=tmp_path)})
    with pytest.raises(StartError, match=r"member next: it would own runs itself, which slurm cannot do yet"):
        preview(counting("owner"), on="slurm", members=nested)


def test_members_that_were_planned_for_this_machine_stay_there(root: Path) -> None:
    run = RunDirectory.create(root, "owner")
    job = counting("owner")
    for name, text in preview(job).draft.files().items():
        (run.path / name).write_text(text)
    write_members(run, MembersSpec([MemberSpec("a")]))
    with pytest.raises(RunStateError, match="planned for this machine, so it cannot be resumed on slurm"):
        draft_resume(run, job, on="slurm")


def test_outside_the_job_the_start_of_a_member_is_left_to_its_manager(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    owner = RunDirectory.create(root, "owner")
    (owner.path / "backend.json").write_text('{"on": "slurm", "job": "7", "details": {}}')
    run = RunDirectory.create(owner.path / "members", "a")
    submission = submit_member(preview(counting("a")).draft, run)
    assert (submission.on, submission.job, submission.details) == ("slurm", "7", {"step": "a", "asked": "true"})
