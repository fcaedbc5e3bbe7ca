"""Members and their owners: a member whose owner is gone stops, a report ends with the last member, servers are ready
when they answer, shares of the machine."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from counting import wait_for_state
from member_runs import check_nothing_is_left, counting, member, owned_report, states
from waiting import wait_until

from craton.agent import Launch, write_launch
from craton.agent.owner import OwnerWatch
from craton.agent.processes import free_port
from craton.infrastructure import MEMORY_FRACTION, Accelerator
from craton.job import parse_job
from craton.orchestration import StartError, living_agents
from craton.orchestration.draft import Draft, draft, draft_run
from craton.orchestration.machine_share import machine_share, share_of
from craton.orchestration.member_nodes import num_shares
from craton.orchestration.member_places import LocalPlace
from craton.orchestration.members.look import MemberLook
from craton.orchestration.start import start_run, stop_run
from craton.telemetry import RunDirectory, RunError, summarize
from craton.telemetry.members import (
    MEMBERS_FOLDER,
    MemberSpec,
    MembersSpec,
    MembersStatus,
    MemberStatus,
    member_addresses,
    write_member_addresses,
    write_members,
    write_members_status,
)
from craton.telemetry.node import Heartbeat, process_start, write_heartbeat

ANSWERING = Path(__file__).with_name("answering.py")
TINY = "{name: tiny, layers: 2, hidden: 64, ffn_hidden: 128, heads: 4, kv_heads: 2, vocab: 512, max_sequence: 2048}"


@pytest.fixture
def owner(root: Path) -> RunDirectory:
    """A run with a member, none of whose processes lives."""
    run = RunDirectory.create(root, "owner")
    write_launch(run, Launch(generation=0, nodes=["node-0"], ranks_per_node=1, command=["true"]))
    write_members(run, MembersSpec([MemberSpec("served")]))
    (run.path / MEMBERS_FOLDER).mkdir()
    return run


def start_member_of(owner: RunDirectory, made: Draft, **launch: object) -> RunDirectory:
    """Start a member without a manager."""
    changed = replace(made.launch, owner=str(owner.path), **launch)  # type: ignore[arg-type]
    return start_run(replace(made, launch=changed), owner.path / MEMBERS_FOLDER)


def test_a_member_without_an_owner_saves_and_stops(owner: RunDirectory) -> None:
    place = owner.path / MEMBERS_FOLDER / "alone"
    made = draft_run(counting("alone", STEPS=100_000), place, port=free_port())
    manager = {"pid": os.getpid(), "host": os.uname().nodename}
    write_members_status(owner, MembersStatus(started=process_start(os.getpid()), **manager))  # type: ignore[arg-type]
    run = start_member_of(owner, made, owner_seconds=0.5)
    wait_until(lambda: summarize(run).step, "there is something to save")
    write_members_status(owner, MembersStatus(started="0", **manager))  # type: ignore[arg-type]
    assert wait_for_state(run, "stopped", "failed", "done").state == "stopped"
    assert run.marker_text("STOP").startswith(
        "owner gone: no agent and no member manager of owner has lived for 500 ms"
    )
    wait_until(lambda: not living_agents(run))
    assert list(run.checkpoints("shared").glob("step-*/COMPLETE"))


def test_an_owner_lives_as_long_as_its_agent_or_its_manager(owner: RunDirectory) -> None:
    me = {"pid": os.getpid(), "started": process_start(os.getpid()), "host": os.uname().nodename}
    watch = OwnerWatch(Launch(1, ["node-0"], 1, ["true"], owner=str(owner.path), owner_seconds=20.0))

    def reason_after(seconds: float) -> str:
        start = watch_clock[0]
        texts = [watch.reason_to_stop(start + second) for second in range(1, int(seconds) + 1)]
        watch_clock[0] += seconds
        return next((text for text in texts if text), "")

    watch_clock = [0.0]
    write_members_status(owner, MembersStatus(**me))  # type: ignore[arg-type]
    assert reason_after(100) == "", "its manager lives"
    write_members_status(owner, MembersStatus(**{**me, "started": "0"}))  # type: ignore[arg-type]
    write_heartbeat(owner, "node-0", Heartbeat(0, "running", metrics_port=0, **me))  # type: ignore[arg-type]
    assert reason_after(100) == "", "its agent lives"
    write_heartbeat(owner, "node-0", Heartbeat(0, "running", metrics_port=0, **{**me, "started": "0"}))  # type: ignore[arg-type]
    assert reason_after(12) == ""
    assert watch.reason_to_stop(watch_clock[0] + 1000.0) == "", "a machine that was frozen"
    watch_clock[0] += 1000.0
    assert "has lived for 20 s; `craton resume owner` resumes both" in reason_after(60)
    owner.mark("DONE")
    again = OwnerWatch(Launch(1, ["node-0"], 1, ["true"], owner=str(owner.path)))
    reasons = [again.reason_to_stop(float(second)) for second in range(8)]
    assert reasons[:5] == [""] * 5
    assert "owner gone: owner is done" in reasons[-1]
    assert OwnerWatch(Launch(1, ["node-0"], 1, ["true"])).reason_to_stop(1e9) == ""


def test_a_report_ends_with_its_last_member_and_counts_them(root: Path) -> None:
    run = owned_report(
        counting("grid"),
        MembersSpec([MemberSpec(name) for name in "abc"], parallel=2, purpose="sweep"),
        {"a": counting("a"), "b": counting("b", FAIL_RANK=0), "c": counting("c")},
    )
    summary = run.wait()
    assert (summary.state, summary.step, summary.steps) == ("done", 3, 3)
    assert states(run) == {"a": "done", "b": "failed", "c": "done"}
    text = run.directory.log_path(0).read_text()
    assert "2 of 3 members done" in text
    assert "b: failed (rank 0 on node-0 exited with code 1" in text
    assert member(run, "c").summary().step == 5
    check_nothing_is_left(run.path)


def test_a_server_is_ready_when_it_answers_and_its_key_is_for_its_owner_only(
    owner: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft, "rank_command", lambda job, run, python: [python, str(ANSWERING), str(run)])
    monkeypatch.setenv("SERVE_KEYS", "first-key, second-key")
    port = free_port()
    job = parse_job(
        f"name: served\nkind: serve\nmodel: {TINY}\ncluster: local\n"
        f"serve: {{port: {port}, initialize: random, api_keys: SERVE_KEYS}}\n"
    )
    run = start_member_of(owner, draft_run(job, owner.path / MEMBERS_FOLDER / "served", port=free_port()))
    look = MemberLook.of(owner, "served", LocalPlace())
    view = wait_until(lambda: (seen := look.view()).is_ready and seen)
    assert (view.condition, view.serves) == ("alive", True)
    assert look.address is not None
    write_member_addresses(owner, {"served": look.address})
    assert member_addresses(owner)["served"].url == f"http://127.0.0.1:{port}"
    assert member_addresses(owner)["served"].api_key == "first-key"
    assert "first-key" not in repr(member_addresses(owner))
    path = owner.path / MEMBERS_FOLDER / "addresses.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(RunError, match="holds API keys and is open to other users"):
        member_addresses(owner)
    stop_run(run)
    wait_until(lambda: look.view().condition == "stopped")
    assert look.address is None


def cards(count: int, gigabytes: float = 80.0) -> list[Accelerator]:
    return [Accelerator(str(index), f"GPU-{index}", "NVIDIA H100", gigabytes * 2**30) for index in range(count)]


@pytest.mark.parametrize(
    ("parts", "slot", "count", "visible"),
    [
        (1, 0, 8, None),
        (2, 1, 8, "GPU-4,GPU-5,GPU-6,GPU-7"),
        (3, 2, 8, "GPU-4,GPU-5"),
        (2, 0, 0, None),
        (4, 3, 2, "GPU-1"),
    ],
)
def test_members_divide_the_gpus(parts: int, slot: int, count: int, visible: str | None) -> None:
    environment = dict(share_of(parts, slot, cards(count)).environment)
    assert environment.get("CUDA_VISIBLE_DEVICES") == visible
    assert (MEMORY_FRACTION in environment) == (parts > count > 0), "two members on one GPU"


def test_members_divide_the_cores_and_their_share_is_undone(
    owner: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_members(owner, MembersSpec([MemberSpec(name) for name in "abcd"], parallel=2))
    write_members_status(owner, MembersStatus({"b": MemberStatus(slot=1)}))
    monkeypatch.setattr("craton.orchestration.machine_share.visible_accelerators", lambda: cards(4))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    launch = Launch(0, ["node-0"], 1, ["true"], threads_per_rank=8)
    with machine_share(RunDirectory.create(owner.path / MEMBERS_FOLDER, "b")) as share:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-2,GPU-3"
        assert share.divide(launch).threads_per_rank == 4
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    with machine_share(owner) as share:
        assert share.divide(launch) == launch
    write_members_status(
        owner, MembersStatus({"b": MemberStatus("stopped", slot=1), "c": MemberStatus("running", slot=1)})
    )
    with (
        pytest.raises(StartError, match=r"member c runs on the share .* that b had; stop it first"),
        machine_share(RunDirectory(owner.path / MEMBERS_FOLDER / "b")),
    ):
        pass
    assert num_shares(MembersSpec([MemberSpec("a"), MemberSpec("b", is_kept=True)])) == 1
    with pytest.raises(StartError, match="9 members at a time are too many for the GPUs here"):
        share_of(9, 0, cards(1, 4.0))
