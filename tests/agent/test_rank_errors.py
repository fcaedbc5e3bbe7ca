"""What is left when a rank fails: its own words in the events, in FATAL and in the verdict, with real agents."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from agent_gang import PREAMBLE, Gang

from craton.observability.diagnosis import Verdict, diagnose
from craton.observability.diagnosis.collect import take_snapshot
from craton.telemetry.files import read_lines

WAITS = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say("ready")
def work():
    FAULT
if RANK == 1:
    wait_for("ready-0")
    work()
wait_for("never")
"""
LINE = PREAMBLE.count("\n") + 5  # of FAULT


def failed(gang: Gang, fault: str, program: str = WAITS) -> tuple[Verdict, dict[int, dict[str, Any]]]:
    """Run two ranks to their end; return the verdict and rank → event of its end."""
    path = gang.folder / "train.py"
    path.write_text(PREAMBLE + program.replace("FAULT", fault))
    gang.launch("", command=[sys.executable, str(path)], ranks_per_node=2, failure_grace_seconds=0.5, tries=0)
    assert gang.finish() == 1, gang.errors()
    lines, _ = read_lines(gang.run.events_path("node-0"))
    ends = {line["rank"]: line for line in lines if line["event"] == "rank_ended"}
    return diagnose(take_snapshot(gang.run, look_here=False)), ends


@pytest.mark.parametrize(
    ("fault", "kind", "cause", "layer"),
    [
        ("raise ValueError('no such row')", "ValueError", "user_code_failed", "framework"),
        pytest.param(
            "import no_such_package", "ModuleNotFoundError", "missing_package", "framework", marks=pytest.mark.slow
        ),
        ("open('/dev/full', 'w').write('x' * 100000)", "OSError", "storage_full", "storage"),
        pytest.param("bytearray(1 << 60)", "MemoryError", "out_of_memory", "host", marks=pytest.mark.slow),
        ("import ctypes; ctypes.string_at(0)", "Fatal Python error", "program_crashed", "framework"),
    ],
    ids=["raises", "module", "disk", "memory", "crash"],
)
def test_a_rank_that_fails(gang: Gang, fault: str, kind: str, cause: str, layer: str) -> None:
    verdict, ends = failed(gang, fault)
    place = f"{gang.folder / 'train.py'}:{LINE}"
    assert (verdict.condition, verdict.cause, verdict.layer) == ("dead", cause, layer), verdict.sentence
    assert (verdict.node, verdict.rank) == ("node-0", 1)
    assert verdict.confidence == 0.95
    assert ends[1]["error"]["type"] == kind
    assert ends[1]["error"]["user_frame"] == f"{place} in work"
    assert "error" not in ends[0], "its agent ended it"
    assert ends[0]["sent"]
    assert place in gang.run.marker_text("FATAL").splitlines()[0]
    assert place in verdict.sentence


def test_a_program_that_says_why_and_exits(gang: Gang) -> None:
    verdict, ends = failed(gang, "print('disk check failed: giving up', file=sys.stderr); sys.exit(3)")
    assert ends[1]["code"] == 3
    assert ends[1]["error"] == {"message": "disk check failed: giving up", "source": "log"}
    assert (verdict.cause, verdict.rank) == ("rank_failed", 1)
    assert "exited with code 3 in phase productive: disk check failed: giving up" in verdict.sentence
    assert "disk check failed: giving up" in gang.run.marker_text("FATAL").splitlines()[0]


def test_what_all_ranks_raise_names_none(gang: Gang) -> None:
    together = WAITS.replace("if RANK == 1:\n", "if True:\n").replace(
        'wait_for("ready-0")', 'wait_for("ready-0"); wait_for("ready-1")'
    )
    verdict, ends = failed(gang, "raise KeyError(f'row {RANK}')", together)
    assert {rank: end["error"]["type"] for rank, end in ends.items()} == {0: "KeyError", 1: "KeyError"}
    assert (verdict.cause, verdict.node, verdict.rank) == ("user_code_failed", "", None), verdict.sentence
    assert "all 2 ranks raised KeyError: " in verdict.sentence


def test_a_rank_that_exits_with_0_while_another_needs_it(gang: Gang) -> None:
    program = """
if RANK == 1:
    say("gone")
    os._exit(0)
wait_for("gone-1")
time.sleep(0.5)  # the agent sees the end of rank 1 first
raise RuntimeError("gloo: Connection closed by peer [127.0.0.1]:6031")
"""
    verdict, ends = failed(gang, "", program)
    assert {rank: end["code"] for rank, end in ends.items()} == {0: 1, 1: 0}
    assert ends[0]["error"]["is_echo"] is True
    assert (verdict.cause, verdict.rank) == ("exited_early", 1), verdict.sentence
    assert "rank 1 on node-0 exited with code 0 in phase productive before the run was done" in verdict.sentence
