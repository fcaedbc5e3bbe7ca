"""The pods of slots as the real processes that they are, on one machine with a shared folder, beside the first pod of
the run with its member manager. No cluster is available here: the tests start, signal and replace pods themselves, as
the Job controller and the kubelet would.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from member_runs import check_nothing_is_left, counting
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent import read_launch
from craton.api import Run
from craton.job import Job
from craton.orchestration.backend import write_submission
from craton.orchestration.draft import draft_run
from craton.orchestration.draft.members import Members
from craton.orchestration.errors import RunStateError
from craton.orchestration.kubernetes.members import (
    hand_member,
    is_in_slot,
    member_standing,
    share_cache,
    slots_text,
)
from craton.orchestration.kubernetes.members.slot_files import MemberSlots, SlotGroup, SlotName, read_hand
from craton.orchestration.kubernetes.members.slot_pod import SlotPod, is_spent, is_startable
from craton.orchestration.kubernetes.podfile import write_pod_file
from craton.orchestration.start import start_run
from craton.telemetry import RunDirectory, RunError, summarize
from craton.telemetry.members import MemberSpec, MembersSpec, read_members_status

Start = Callable[..., subprocess.Popen[bytes]]
FIRST = "craton.orchestration.kubernetes.pod"
SLOT = "craton.orchestration.kubernetes.members.slot_pod"


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """`pods(FIRST)` starts the first pod of the run, `pods(SLOT, index=1)` the second pod of slot 0."""
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path))
    started: list[subprocess.Popen[bytes]] = []

    def start(module: str, index: int = 0, number: int = 0) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "JOB_COMPLETION_INDEX": str(index),
            "CRATON_SUBMISSION": "first",
            "CRATON_ADDRESS": "127.0.0.1",
            "CRATON_SLOT": "slot0",
            "CRATON_SLOT_NUMBER": str(number),
        }
        with open(tmp_path / f"{module.rpartition('.')[2]}-{number}-{index}.log", "a") as log:
            command = [sys.executable, "-m", module, str(tmp_path / "owner")]
            pod = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        started.append(pod)
        return pod

    yield start
    for pod in started:
        pod_is_lost(pod)
    check_nothing_is_left(tmp_path / "owner")


def pod_is_lost(pod: subprocess.Popen[bytes]) -> None:
    """As when its node fails: every process of the pod is gone at once."""
    if pod.poll() is None:
        os.killpg(pod.pid, signal.SIGKILL)
        pod.wait(PATIENCE_SECONDS)


def drafted(root: Path, spec: MembersSpec, pods: int = 1, **jobs: Job) -> RunDirectory:
    """The directory of a run with one slot, as `craton run --on kubernetes` leaves it to the first pod."""
    given = {item.name: jobs.get(item.name) or counting(item.name, pods) for item in spec.members}
    run = RunDirectory.create(root, "owner")
    draft = draft_run(counting("owner"), run.path, on="kubernetes", members=Members(spec, given))
    draft = replace(draft, launch=replace(draft.launch, workdir=""))
    names = tuple(item.name for item in spec.members)
    slots = MemberSlots("owner", (SlotGroup("slot0", 1, pods, names),), 0, 60.0)
    for name, text in {**draft.files(), "slots.json": slots_text(slots)}.items():
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).write_text(text)
    return run


def member_of(owner: RunDirectory, name: str) -> RunDirectory:
    return RunDirectory(owner.path / "members" / name)


def log_of(root: Path, pod: str) -> str:
    return (root / f"{pod}.log").read_text()


def test_members_run_one_after_the_other_in_a_slot_and_its_pod_ends_with_them(tmp_path: Path, pods: Start) -> None:
    spec = MembersSpec([MemberSpec("base", gate="done"), MemberSpec("next", {"base": "done"}, gate="done")], parallel=1)
    owner = drafted(tmp_path, spec, base=counting("base", STEPS=60, SAVE_EVERY=1))
    slot = pods(SLOT)
    first = pods(FIRST)
    base = member_of(owner, "base")
    wait_until(lambda: (base.path / "heartbeat" / "node-0").exists() and summarize(base).step > 2)
    assert member_standing(base).condition == "running"
    pod_is_lost(slot)
    slot = pods(SLOT)  # which the Job controller makes; it gets no further member
    assert slot.wait(PATIENCE_SECONDS) == 0, log_of(tmp_path, "slot_pod-0-0")
    assert first.wait(PATIENCE_SECONDS) == 0, log_of(tmp_path, "pod-0-0")
    assert owner.has("DONE")
    assert {name: member.state for name, member in read_members_status(owner).members.items()} == {
        "base": "done",
        "next": "done",
    }
    assert read_members_status(owner).members["base"].restarts == 0, "its pod came back, and with it its agent"
    assert read_hand(owner, SlotName("slot0", 0)).member == "next"
    assert read_launch(base).owner == str(owner.path)
    log = log_of(tmp_path, "slot_pod-0-0")
    assert "[base rank 0] rank 0 leaves after step 60" in log
    assert "[next rank 0] rank 0 leaves after step 5" in log


def handed(owner: RunDirectory, name: str, nodes: int = 1, **environment: object) -> RunDirectory:
    """A member that is started as the manager starts it."""
    (owner.path / "members").mkdir(exist_ok=True)
    draft = draft_run(counting(name, nodes, **environment), member_of(owner, name).path, on="kubernetes")
    return start_run(draft, owner.path / "members")


def test_a_drained_slot_saves_its_member_and_a_killed_member_leaves_the_pod(tmp_path: Path, pods: Start) -> None:
    owner = drafted(tmp_path, MembersSpec([MemberSpec("a"), MemberSpec("b")], parallel=1))
    write_pod_file(owner, "first")
    slot = pods(SLOT)
    a = handed(owner, "a", STEPS=100_000)
    wait_until(lambda: member_standing(a).nodes == ("node-0",), lambda: log_of(tmp_path, "slot_pod-0-0"))
    slot.send_signal(signal.SIGTERM)  # its node is drained
    assert slot.wait(PATIENCE_SECONDS) == 75
    assert a.marker_text("STOP").startswith("SIGTERM to the agent of node-0")
    assert not is_in_slot(a)

    slot = pods(SLOT)
    b = handed(owner, "b", STEPS=100_000)
    wait_until(lambda: member_standing(b).nodes == ("node-0",), lambda: log_of(tmp_path, "slot_pod-0-0"))
    Run("owner/b").stop(now=True)
    wait_until(lambda: member_standing(b).condition == "ended")
    check_nothing_is_left(b.path)
    assert slot.poll() is None, "it waits for the next member"
    owner.mark("STOP", "craton stop")
    assert slot.wait(PATIENCE_SECONDS) == 0


def test_a_hand_is_for_the_pods_that_the_member_needs(tmp_path: Path) -> None:
    owner = drafted(tmp_path, MembersSpec([MemberSpec("a")]), pods=2)
    write_pod_file(owner, "first")
    a, hand = handed(owner, "a"), read_hand(owner, SlotName("slot0", 0))
    first, second = (SlotPod(owner, SlotName("slot0", 0), index, "first") for index in range(2))
    assert (is_startable(first, hand), is_startable(second, hand)) == (True, False), "it has one node"
    assert not is_startable(first, replace(hand, generation=1)), "its launch is not written yet"
    assert not is_startable(replace(first, submission="second"), hand)
    assert not is_spent(first)
    a.mark("FATAL", "broke")
    assert not is_startable(first, hand)
    assert not is_spent(first), "it can be resumed"
    a.unmark("FATAL")
    a.mark("DONE")
    assert is_spent(first)


def test_a_slot_is_given_to_one_member_at_a_time_and_only_in_its_submission(tmp_path: Path) -> None:
    owner = drafted(tmp_path, MembersSpec([MemberSpec("a"), MemberSpec("b")], parallel=1))
    write_pod_file(owner, "first")
    a, b = handed(owner, "a"), RunDirectory.create(owner.path / "members", "b")
    draft = draft_run(counting("b"), b.path, on="kubernetes")
    status = '{"members": {"a": {"state": "running"}}}'
    (owner.path / "members" / "status.json").write_text(status)
    with pytest.raises(RunStateError, match="all 1 slots for members like b are in use; `craton ps owner`"):
        hand_member(draft, b)
    assert (member_standing(a).condition, is_in_slot(a)) == ("waiting", True)
    write_pod_file(owner, "second")  # the run was resumed
    assert (member_standing(a).condition, is_in_slot(a)) == ("ended", False)
    (b.path / "launch.json").write_text((a.path / "launch.json").read_text())
    write_submission(b, hand_member(draft, b))
    assert member_standing(b).condition == "waiting"
    assert read_launch(b).master_address == "127.0.0.1"
    assert not is_in_slot(owner)
    kept = RunDirectory.create(owner.path / "members", "kept")  # has no slot, because it is not started
    assert (member_standing(kept).condition, is_in_slot(kept)) == ("ended", False)


def test_text_of_members_is_tokenized_where_all_pods_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = drafted(tmp_path, MembersSpec([MemberSpec("a")]))
    monkeypatch.setenv("CRATON_CACHE", "")  # so that it is put back as it was
    monkeypatch.delenv("CRATON_CACHE")
    share_cache(RunDirectory.create(tmp_path, "local"))
    assert "CRATON_CACHE" not in os.environ
    share_cache(owner)
    assert os.environ["CRATON_CACHE"] == str(owner.path / "cache")


def test_a_pod_that_does_not_know_its_slot_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="CRATON_SLOT, CRATON_SLOT_NUMBER, JOB_COMPLETION_INDEX do not give"):
        SlotPod.of(RunDirectory(tmp_path), {"CRATON_SLOT": "slot0", "JOB_COMPLETION_INDEX": "0"})
