"""Scripts that know nothing of Craton on a real Slurm, on 2 nodes × 2 processes: one of their processes is killed at
once, they go on by themselves, and end with the numbers of the same script that nothing happened to.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import yaml
from foreign_scripts import EXAMPLES, SAVED_EVERY, STEPS, beginnings, example, losses, processes
from slurm_lab import SlurmLab
from slurm_runs import events_of, hosts_of, submit, wait, wait_for_run, wait_for_step

from craton.telemetry import RunDirectory


def submitted(root: Path, script: str, name: str) -> RunDirectory:
    settings = yaml.safe_load((EXAMPLES / f"{script}.yaml").read_text()).get("run", {})
    return submit(root, example(script, name=name, run={**settings, "on": "slurm"}))


def victim_of(run: RunDirectory) -> psutil.Process:
    """A worker of the second node: of a launcher its child, else the last process that the agent has started."""
    *_, last = processes(run, "node-1")
    children = last.children()
    return children[-1] if children else last


@pytest.mark.slow
@pytest.mark.parametrize(("script", "package"), [("command-accelerate", "accelerate"), ("command-jax", "jax")])
def test_a_killed_script_ends_as_if_nothing_had_happened(
    script: str, package: str, root: Path, slurm: SlurmLab
) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    calm, killed = submitted(root, script, "calm"), submitted(root, script, "killed")
    wait_for_step(killed, SAVED_EVERY + 2)
    assert len({*hosts_of(calm).values(), *hosts_of(killed).values()}) == 4
    victim = victim_of(killed)
    assert victim.environ()["SLURMD_NODENAME"] == hosts_of(killed)["node-1"]
    os.kill(victim.pid, signal.SIGKILL)
    wait(lambda: len(beginnings(killed)) == 2, "the script has begun again", killed)
    began = beginnings(killed)[1]
    assert began >= SAVED_EVERY
    assert began % SAVED_EVERY == 0
    ends = [wait_for_run(run, "done") for run in (killed, calm)]
    assert [(each.step, each.generation) for each in ends] == [(STEPS, 1), (STEPS, 0)]
    found, expected = losses(killed), losses(calm)
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert all(len(each) == 1 for each in expected.values())
    assert found == expected
    assert len(events_of(killed, "allocated")) == 1, "the same nodes went on, and Slurm was not asked"
