"""What ranks report about their own end outranks what is inferred: pure, over events and snapshots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_snapshots import MOMENT, healthy, with_gpu, with_host, with_log, with_rank, with_run
from reported_tracebacks import ENDINGS, Ending
from sick_runs import NODE, RANK, dead, reported, restarted

from craton.observability.diagnosis import diagnose
from craton.observability.diagnosis.collect.errors import read_errors
from craton.observability.diagnosis.snapshot import RankError, Snapshot, SnapshotXid
from craton.observability.diagnosis.tables import causes, error_kinds
from craton.telemetry.error_reports import read_error

WORLD = 2


def event(name: str, rank: int, at: float, generation: int = 0, **fields: Any) -> dict[str, Any]:
    line = {"time": MOMENT + at, "generation": generation, "rank": rank, "node": f"node-{rank}", "event": name}
    return {**line, "step": 12, **fields}


def error(kind: str = "ValueError", message: str = "bad row", **fields: Any) -> dict[str, Any]:
    return {"type": kind, "message": message, "user_frame": "/home/me/source.py:7 in sample", "phase": "data", **fields}


ECHO = error("RuntimeError", "gloo: Connection closed by peer", is_echo=True, user_frame="")


def of_events(*events: dict[str, Any], state: str = "failed", kind: str = "pretrain") -> Snapshot:
    """A run of two ranks with these events."""
    newest = max(line["generation"] for line in events)
    run = with_run(healthy(2, 1), state=state, generation=newest, kind=kind, message="rank 0 on node-0 failed")
    for line in events:
        if line["event"] == "rank_ended" and line["generation"] == newest:
            ended = {"is_alive": False, "exit_code": line["code"], "ended_at": line["time"]}
            run = with_rank(run, line["rank"], **ended)
    return replace(run, moment=MOMENT + 60.0, errors=read_errors(events, 0, state == "failed"))


@pytest.mark.parametrize("ending", [ending for ending in ENDINGS if ending.cause], ids=lambda ending: ending.name)
def test_the_cause_of_an_issue(ending: Ending) -> None:
    report = read_error(ending.text)
    assert report is not None
    verdict = diagnose(of_events(event("rank_ended", 1, 0.0, code=ending.code, error=report.to_fields())))
    assert (verdict.condition, verdict.cause) == ("dead", ending.cause), verdict.sentence
    assert (verdict.node, verdict.rank) == ("node-1", 1)
    assert verdict.is_first_hand
    assert verdict.confidence >= 0.8
    if ending.user_frame and ending.type:
        assert ending.user_frame in verdict.sentence


def test_every_row_of_the_table_names_a_cause() -> None:
    assert {kind.cause for kind in error_kinds()} <= set(causes())
    assert all(kind.type or kind.errno or kind.message for kind in error_kinds())
    names = [kind.name for kind in error_kinds()]
    assert len(names) == len(set(names))


def test_one_rank_raises_and_the_other_loses_its_connection() -> None:
    snapshot = of_events(
        event("broken", 0, 0.1, echo=True, error=ECHO),
        event("failed", 1, 0.0, error=error()),
        event("rank_ended", 1, 0.2, code=3, error=error()),
    )
    verdict = diagnose(snapshot)
    assert (verdict.layer, verdict.cause, verdict.rank) == ("framework", "user_code_failed", 1), verdict.sentence
    assert "rank 1 on node-1 raised ValueError: bad row (/home/me/source.py:7 in sample)" in verdict.sentence
    assert "Fix /home/me/source.py:7, then run" in verdict.sentence
    assert "rank 0 only lost the connection to another rank" in verdict.evidence
    assert verdict.confidence == 0.95


def test_what_all_ranks_raise_names_no_rank() -> None:
    snapshot = of_events(
        event("failed", 0, 0.0, error=error(message="no row 200")),
        event("failed", 1, 0.1, error=error(message="no row 204")),
        event("rank_ended", 0, 0.2, code=3, error=error(message="no row 200")),
        event("rank_ended", 1, 0.3, code=-15, sent=["SIGTERM"]),
    )
    verdict = diagnose(snapshot)
    assert (verdict.cause, verdict.node, verdict.rank) == ("user_code_failed", "", None), verdict.sentence
    assert "all 2 ranks raised ValueError: no row 200" in verdict.sentence


def test_of_different_errors_the_first_counts() -> None:
    snapshot = of_events(
        event("failed", 1, 0.0, error=error("OSError", "[Errno 28] No space left on device", errno=28)),
        event("failed", 0, 0.5, error=error("KeyError", "'x'")),
    )
    verdict = diagnose(snapshot)
    assert (verdict.layer, verdict.cause, verdict.rank) == ("storage", "storage_full", 1), verdict.sentence


def test_a_rank_that_exits_with_0_before_the_run_is_done() -> None:
    lines = [
        line
        for generation in range(3)
        for line in (
            event("rank_ended", 1, generation, generation, code=0, during="data"),
            event("broken", 0, generation + 0.1, generation, echo=True, error=ECHO),
            event("generation_started", 0, generation + 0.2, generation + 1, reason="rank 0 lost its connection"),
        )
    ]
    verdict = diagnose(of_events(*lines[:-1]))
    assert (verdict.cause, verdict.node, verdict.rank) == ("exited_early", "node-1", 1), verdict.sentence
    assert "rank 1 on node-1 exited with code 0 at step 12 in phase data before the run was done" in verdict.sentence
    assert "in each of the last 3 generations" in verdict.sentence


def test_a_command_that_is_done_before_another_fails_is_not_blamed() -> None:
    done = event("rank_ended", 1, 0.0, code=0, during="productive")
    failed = event("rank_ended", 0, 5.0, code=1, error=error("", "cannot upload the result", user_frame=""))
    verdict = diagnose(of_events(done, failed, kind="command"))
    assert (verdict.cause, verdict.rank) == ("rank_failed", 0), verdict.sentence
    assert "exited with code 1 at step 12 in phase data: cannot upload the result" in verdict.sentence


@pytest.mark.parametrize("fields", [{"during": "idle"}, {"during": "productive", "sent": ["SIGTERM"]}])
def test_ranks_that_are_done_or_were_asked_to_end_are_no_errors(fields: dict[str, Any]) -> None:
    assert read_errors([event("rank_ended", 1, 0.0, code=0, **fields)], 0, True) == ()
    assert read_errors([event("rank_ended", 1, 0.0, code=-15, sent=["SIGTERM"])], 0, True) == ()


def test_errors_of_an_earlier_start_do_not_count() -> None:
    lines = [event("failed", 1, 0.0, 0, error=error()), event("failed", 0, 1.0, 3, error=error("KeyError", "'x'"))]
    assert [found.type for found in read_errors(lines, 3, True)] == ["KeyError"]


def test_a_run_that_moves_again_has_no_alarm() -> None:
    old = event("broken", 1, -100.0, 0, error=error())
    run = of_events(old, event("rank_started", 1, -90.0, 1), state="running")
    assert diagnose(replace(run, moment=MOMENT)).condition == "healthy"


def test_a_loop_names_its_error() -> None:
    reasons = [f"rank {RANK} on {NODE} failed at step 5000: ValueError: bad row"] * 5
    same = {"node": NODE, "rank": RANK, "ranks": (RANK,), "type": "ValueError", "message": "bad row", "step": 5000}
    errors = tuple(
        RankError(MOMENT - 300.0 + 60.0 * number, number, user_frame="/home/me/source.py:7 in sample", **same)
        for number in range(5)
    )
    verdict = diagnose(replace(restarted(*reasons), errors=errors))
    assert (verdict.condition, verdict.cause, verdict.rank) == ("slow", "user_code_failed", RANK), verdict.sentence
    assert "ValueError: bad row (/home/me/source.py:7 in sample), at step 5000" in verdict.sentence
    assert "in each of the last 5 generations" in verdict.sentence
    assert "Read the end of the logs" not in verdict.sentence


def test_a_gpu_error_explains_the_exception_that_it_causes() -> None:
    raised = reported("RuntimeError", "CUDA error: unspecified launch failure")
    fell = with_gpu(raised, NODE, 3, xids=(SnapshotXid(79, MOMENT - 6.0),))
    assert diagnose(fell).cause == "gpu_lost"
    assert diagnose(raised).cause == "program_crashed"


def test_a_report_outranks_a_line_of_the_log() -> None:
    raised = with_log(reported("ValueError", "bad row"), "host_out_of_memory", "warning: MemoryError handled", RANK)
    assert diagnose(raised).cause == "user_code_failed"


@pytest.mark.parametrize(
    ("kind", "message", "changes", "layer", "cause"),
    [
        ("FileNotFoundError", "[Errno 2]", {"errno": 2, "path": "/fsx/run/a"}, "storage", "storage_error"),
        ("FileNotFoundError", "[Errno 2]", {"errno": 2, "path": "/fsx/data/a"}, "framework", "missing_file"),
        ("PermissionError", "[Errno 13]", {"errno": 13, "path": "/fsx/data/a"}, "storage", "permission_denied"),
        ("torch.OutOfMemoryError", "CUDA out of memory.", {}, "framework", "gpu_out_of_memory"),
        ("MemoryError", "", {}, "host", "out_of_memory"),
        ("craton.ml.training.guard.TrainingStoppedError", "step 9: the loss is nan", {}, "framework", "not_a_number"),
        ("craton.ml.data.errors.DataError", "/x: does not exist on this machine", {}, "framework", "bad_data"),
        (
            "craton.ml.training.build.SetupError",
            "optimizer x cannot be trained",
            {},
            "framework",
            "wrong_configuration",
        ),
        ("xgrammar.OddError", "no", {"user_frame": ""}, "framework", "rank_failed"),
        ("Fatal Python error", "Segmentation fault", {"code": -11}, "framework", "program_crashed"),
        ("", "", {"code": -9, "out_of_memory": "the memory limit is 4 GiB"}, "host", "out_of_memory"),
        ("", "", {"code": -9, "source": "exit"}, "host", "rank_killed"),
    ],
)
def test_the_layer_follows_from_the_kind(kind: str, message: str, changes: Any, layer: str, cause: str) -> None:
    paths = {"run": ("/fsx/run",), "data": ("/fsx/data",)}
    verdict = diagnose(with_run(reported(kind, message, **changes), paths=paths))
    assert (verdict.layer, verdict.cause, verdict.rank) == (layer, cause, RANK), verdict.sentence


def test_a_bus_error_with_a_full_shared_memory() -> None:
    crashed = reported("Fatal Python error", "Bus error", code=-7)
    assert diagnose(crashed).cause == "bus_error"
    assert diagnose(with_host(crashed, NODE, shared_memory_full_share=1.0)).cause == "shared_memory_full"


def test_old_events_and_snapshots_are_read() -> None:
    old = [
        event("broken", 1, 0.0, reason="ValueError: bad row", echo=False),
        event("rank_ended", 0, 1.0, code=1, during="data"),
    ]
    errors = read_errors(old, 0, True)
    assert [(found.type, found.message, found.code) for found in errors] == [
        ("ValueError", "bad row", None),
        ("", "", 1),
    ]
    saved = dead().to_json().replace(',"errors":[]', "")
    assert '"errors":' not in saved
    assert Snapshot.from_json(saved).errors == ()


def test_many_ranks_are_one_error() -> None:
    lines = [event("failed", rank, rank / 100.0, error=error(message=f"row {rank}")) for rank in range(500)]
    (found,) = read_errors(lines, 0, True)
    assert (found.num_ranks, found.rank, len(found.ranks)) == (500, 0, 16)
