"""Whether the OOM killer ended a process, by counters laid out as the kernel does."""

from __future__ import annotations

from pathlib import Path

import pytest

from craton.agent.processes.oom import LOOK_SECONDS, RECENT_SECONDS, OomWatch

PID = 700
CGROUPS = {
    "v2": ("0::/job\n", "sys/fs/cgroup/job/memory.events", "low 0\noom_kill {}\n"),
    "v1": (
        "4:memory:/job\n0::/\n",
        "sys/fs/cgroup/memory/job/memory.oom_control",
        "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
    ),
    "machine": ("0::/\n", "proc/vmstat", "nr_free_pages 5\noom_kill {}\n"),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / f"proc/{PID}").mkdir(parents=True)
    return tmp_path


def count(root: Path, kind: str, number: int) -> None:
    """Put the process into a cgroup that has counted this."""
    listed, file, text = CGROUPS[kind]
    (root / f"proc/{PID}/cgroup").write_text(listed)
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(text.format(number))


def looked(watch: OomWatch, begin: float, seconds: float, state: str = "S") -> float:
    moment = begin
    while moment < begin + seconds:
        moment += LOOK_SECONDS
        watch.look(moment, state)
    return moment


@pytest.mark.parametrize("kind", CGROUPS)
def test_only_a_kill_in_the_last_seconds_counts(root: Path, kind: str) -> None:
    count(root, kind, 3)
    watch = OomWatch(PID, 0.0, root)
    assert not watch.has_killed
    now = looked(watch, 0.0, 60.0)
    count(root, kind, 4)
    assert watch.has_killed
    now = looked(watch, now, RECENT_SECONDS / 2)
    assert watch.has_killed, "its memory is still being given back"
    looked(watch, now, 2 * RECENT_SECONDS)
    assert not watch.has_killed, "that was another process, long ago"


def test_other_containers_do_not_count(root: Path) -> None:
    count(root, "machine", 1)
    count(root, "v2", 0)
    watch = OomWatch(PID, 0.0, root)
    count(root, "machine", 2)
    count(root, "v2", 0)
    assert not watch.has_killed


def test_a_process_is_followed_into_another_cgroup_but_not_beyond_its_end(root: Path) -> None:
    count(root, "machine", 5)
    watch = OomWatch(PID, 0.0, root)
    count(root, "v2", 0)
    now = looked(watch, 0.0, 4.0)
    count(root, "v2", 1)
    (root / f"proc/{PID}/cgroup").write_text("0::/\n")
    looked(watch, now, 4.0, state="Z")
    assert watch.has_killed
