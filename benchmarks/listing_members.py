"""Time of `craton ps` over runs that own runs: `python benchmarks/listing_members.py [RUNS]`.

Compares RUNS runs that have ended with RUNS runs of MEMBERS members each, then again while LIVE of them
run. Both folders are timed in turn, so that other load slows both. Prints medians of wall time and CPU time, and the
median ratio of each.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import tempfile
from pathlib import Path

from launching import make_ended_run, ps_seconds

from craton.telemetry import RunDirectory
from craton.telemetry.members import (
    MEMBERS_FOLDER,
    MemberSpec,
    MembersSpec,
    MembersStatus,
    MemberStatus,
    write_members,
    write_members_status,
)
from craton.telemetry.node import Heartbeat, process_start, write_heartbeat

MEMBERS = 4
STEPS = 60  # of every run
TIMES = 9
LIVE = 10  # runs that have not ended, the second time


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    with tempfile.TemporaryDirectory(prefix="members-") as folder:
        plain, owners = Path(folder) / "plain", Path(folder) / "owners"
        for number in range(count):
            make_ended_run(plain, f"run-{number:03d}", STEPS)
            make_owner(owners, f"run-{number:03d}")
        print(f"craton ps, {count} runs, and with {count * MEMBERS:,} members: {compared(plain, owners)}")
        for number in range(min(LIVE, count)):
            for root in (plain, owners):
                go_on(RunDirectory(root / f"run-{number:03d}"))
        print(f"the same while {min(LIVE, count)} of the {count} run: {compared(plain, owners)}")


def make_owner(root: Path, name: str) -> None:
    make_ended_run(root, name, STEPS)
    owner = RunDirectory(root / name)
    names = [f"member-{number}" for number in range(MEMBERS)]
    for member in names:
        make_ended_run(owner.path / MEMBERS_FOLDER, member, STEPS)
    write_members(owner, MembersSpec([MemberSpec(member) for member in names], purpose="sweep"))
    write_members_status(owner, MembersStatus(dict.fromkeys(names, MemberStatus("done")), is_open=True))


def go_on(run: RunDirectory) -> None:
    """Make this process the agent of a run."""
    run.unmark("DONE")
    pid = os.getpid()
    write_heartbeat(
        run, "node-0", Heartbeat(0, "running", pid, 0, "127.0.0.1:1", socket.gethostname(), process_start(pid))
    )


def compared(plain: Path, owners: Path) -> str:
    for root in (plain, owners, owners):
        ps_seconds(root)  # writes the caches of runs and members, then those of owners
    pairs = [(ps_seconds(plain), ps_seconds(owners)) for _ in range(TIMES)]
    words = []
    for place, name in enumerate(("wall time", "CPU time")):
        before, after = ([times[side][place] for times in pairs] for side in (0, 1))
        ratio = statistics.median(owning / alone for alone, owning in zip(before, after, strict=True))
        words.append(f"{name} {statistics.median(before):.2f} and {statistics.median(after):.2f} s, ratio {ratio:.2f}")
    return "; ".join(words)


if __name__ == "__main__":
    main()
