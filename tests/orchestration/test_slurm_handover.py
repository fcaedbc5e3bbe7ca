"""A run and its job know each other by a nonce: whatever happens around `sbatch`, no run is lost and none is started by
a job that is not its own."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_lab import SlurmLab
from slurm_runs import chain_job, expect_whole_chain, look, standing, submit, wait, wait_for_run

from craton.orchestration import NoAnswerError, RunStateError, read_submission
from craton.orchestration.backend import BACKEND_FILE, Submission, write_submission
from craton.orchestration.draft import draft_run
from craton.orchestration.errors import SchedulerError
from craton.orchestration.slurm import (
    SCRIPT_FILE,
    ScriptOptions,
    SlurmBackend,
    batch,
    handover,
    sbatch_script,
    submit_array,
    tools,
)
from craton.orchestration.slurm.handover import claim, hand_over, is_fresh, number_of
from craton.orchestration.slurm.records import JobRecord
from craton.orchestration.slurm.starts import STARTS_FILE, Starts, write_starts
from craton.orchestration.start import start_run, stop_run
from craton.orchestration.start.runs import draft_resume, resume_run, resumed_job
from craton.orchestration.watching import settled
from craton.telemetry import RunDirectory, summarize

NONCE = "0123456789abcdef"
REFUSAL = SchedulerError("sbatch --parsable: Batch job submission failed: Invalid qos")


def made(root: Path, name: str = "chain") -> RunDirectory:
    """A run with all that is written before it is handed over."""
    run = RunDirectory.create(root, name)
    draft = draft_run(chain_job(name, 1), run.path)
    files = {**draft.files(), SCRIPT_FILE: sbatch_script(draft, run, ScriptOptions(nonce=NONCE))}
    for file, text in files.items():
        (run.path / file).write_text(text)
    return run


def saying(error: Exception) -> Callable[[Sequence[str]], str]:
    def say(words: Sequence[str]) -> str:
        raise error

    return say


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[JobRecord]:
    """What squeue would show."""
    jobs: list[JobRecord] = []
    monkeypatch.setattr(handover, "read_jobs_of", lambda users: list(jobs))
    monkeypatch.setattr(
        "craton.orchestration.slurm.backend.read_jobs", lambda numbers: [job for job in jobs if job.id in numbers]
    )
    monkeypatch.setattr(handover, "LOOK_UP_SECONDS", 0.0)
    return jobs


def test_what_slurm_refuses_leaves_the_record_as_it_was(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(root)
    monkeypatch.setattr(handover, "submit", saying(REFUSAL))
    with pytest.raises(SchedulerError, match=r"Invalid qos; the requested values are under `run:`"):
        hand_over([run], 10)
    assert not (run.path / BACKEND_FILE).exists()
    write_submission(run, old := Submission("slurm", "7", {"nonce": "old"}))
    with pytest.raises(SchedulerError):
        hand_over([run], 10)
    assert read_submission(run) == old


def test_a_job_that_is_there_although_sbatch_did_not_answer_is_found(
    root: Path, listed: list[JobRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(root)
    listed += [
        JobRecord("811", "PENDING", "chain", comment="craton:chain:fedcba9876543210"),
        JobRecord("812", "PENDING", "chain", comment=f"craton:chain:{NONCE}"),
    ]
    monkeypatch.setattr(handover, "submit", saying(NoAnswerError("sbatch did not respond within 30 s")))
    (found,) = hand_over([run], 10)
    assert found.job == "812"
    assert read_submission(run) == found


def test_a_run_that_nobody_answered_for_is_kept_and_found_later(
    root: Path, listed: list[JobRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "submit", saying(NoAnswerError("sbatch did not respond within 30 s")))
    with pytest.raises(
        RunStateError, match=r"unknown whether Slurm has the job, so the run is kept.*`craton resume chain`"
    ):
        submit(root, chain_job("chain", 1))
    run = RunDirectory(root / "chain")
    assert standing(run).condition == "unknown", "it may come yet"
    assert "just submitted" in standing(run).sentence
    monkeypatch.setattr("craton.orchestration.slurm.backend.is_fresh", lambda run: False)
    gone = settled(summarize(run), standing(run))
    assert (gone.state, gone.message) == ("lost", "Slurm never received it")
    nonce = read_submission(run).details["nonce"]
    listed.append(JobRecord("812", "RUNNING", "chain", comment=f"craton:chain:{nonce}"))
    assert (standing(run).condition, standing(run).job) == ("running", "812")
    assert read_submission(run).job == "812", "and is remembered"


def test_a_run_that_slurm_never_had_is_not_looked_for_for_ever(
    root: Path, listed: list[JobRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = made(root), list[list[int]]()

    def asking(users: Iterable[int]) -> list[JobRecord]:
        asked.append(list(users))
        return list(listed)

    monkeypatch.setattr(handover, "read_jobs_of", asking)
    write_submission(run, Submission("slurm", "", {"nonce": NONCE}))
    aged(run, handover.SETTLED_SECONDS - 5)
    assert [SlurmBackend().look([run])["chain"].condition for _ in range(2)] == ["ended", "ended"]
    assert asked == [[os.getuid(), os.getuid()]] * 2, "a slow controller may show it yet"
    aged(run, handover.SETTLED_SECONDS + 5)
    found = [SlurmBackend().look([run])["chain"] for _ in range(3)]
    assert {(each.condition, each.reason) for each in found} == {("ended", "Slurm never received it")}
    assert len(asked) == 3, "asked once more, then never"
    assert claim(run, "812", NONCE) == "", "a job that comes all the same makes itself known"
    assert read_submission(run).job == "812"


def test_a_job_is_looked_for_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [0.0], list[float]()
    monkeypatch.setattr(handover.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(handover.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def asking(users: Iterable[int]) -> list[JobRecord]:
        asked.append(now[0])
        return []

    monkeypatch.setattr(handover, "read_jobs_of", asking)
    assert handover.looked_up(NONCE) == ""
    assert asked == [0.0, 1.0, 3.0, 7.0, 15.0]


def aged(run: RunDirectory, seconds: float) -> None:
    moment = time.time() - seconds
    os.utime(run.path / BACKEND_FILE, (moment, moment))


def test_what_to_do_about_an_array_that_nobody_answered_for(
    root: Path, listed: list[JobRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [made(root, f"chain-{number}") for number in range(1, 5)]
    monkeypatch.setattr(handover, "submit", saying(NoAnswerError("sbatch did not respond within 30 s")))
    with pytest.raises(RunStateError, match=r"its 4 runs are kept.*submits each of them \(chain-1 to chain-4\)"):
        hand_over(runs, 10, is_array=True)


def test_many_may_write_down_a_number_at_once(root: Path) -> None:
    run, wrong = made(root), list[OSError]()

    def write(number: int) -> None:
        try:
            for _ in range(200):
                write_submission(run, Submission("slurm", str(number)))
        except OSError as error:
            wrong.append(error)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert wrong == []
    assert list(run.path.glob(".backend.json*")) == []


def test_what_counts_as_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    tool = tmp_path / "sbatch"
    for words, unclear in {"Socket timed out on send/recv operation": True, "Invalid qos specification": False}.items():
        tool.write_text(f"#!/bin/sh\necho 'sbatch: error: Batch job submission failed: {words}' >&2\nexit 1\n")
        tool.chmod(0o755)
        with pytest.raises(SchedulerError, match=words) as raised:
            tools.submit(["sbatch"])
        assert isinstance(raised.value, NoAnswerError) == unclear
    tool.write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    with pytest.raises(NoAnswerError, match="did not respond"):
        tools.ask("sbatch", seconds=0.2)


def test_copies_are_found_by_the_nonce_of_their_array(
    root: Path, listed: list[JobRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [made(root, f"chain-{number}") for number in (1, 2)]
    draft = draft_run(chain_job("chain-1", 1), runs[0].path)
    monkeypatch.setattr(handover, "submit", lambda words: "812")
    assert submit_array(draft, runs[0], ScriptOptions(copies=2, nonce=NONCE)) == "812"
    assert [read_submission(run).job for run in runs] == ["812_1", "812_2"]
    unheard = [replace(read_submission(run), job="") for run in runs]
    listed.append(JobRecord("812", "PENDING", comment=f"craton:chain-1:{NONCE}", tasks="1-2"))
    assert [number_of(listed, each) for each in unheard] == ["812_1", "812_2"]


def test_a_stale_job_leaves_the_run_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(root)
    write_submission(run, Submission("slurm", "813", {"nonce": NONCE}))
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    monkeypatch.setenv("SLURM_JOB_ID", "812")
    assert batch.main([str(run.path), "fedcba9876543210"]) == 2
    assert "job 812 is not the latest submission" in (said := capsys.readouterr().err)
    assert "now job 813" in said
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_a_job_writes_down_its_own_number(root: Path) -> None:
    run = made(root)
    assert claim(run, "812", NONCE) == "", "its script is in the directory"
    assert read_submission(run) == Submission("slurm", "812", {"nonce": NONCE})
    details = {"nonce": NONCE, "restarts": "3"}
    write_submission(run, Submission("slurm", "", details))
    assert claim(run, "812", NONCE) == ""
    assert read_submission(run) == Submission("slurm", "812", details)


def test_a_run_of_the_same_name_that_is_not_of_slurm_is_not_claimed(root: Path) -> None:
    run = RunDirectory.create(root, "chain")
    assert "is not the latest submission" in claim(run, "812", NONCE)
    write_submission(run, Submission("local"))
    assert "is not the latest submission" in claim(run, "812", NONCE)
    assert "is not the latest submission" in claim(RunDirectory(root / "gone"), "812", NONCE)
    assert not (root / "gone").exists()


def test_how_long_a_submission_is_fresh(root: Path) -> None:
    run = made(root)
    assert not is_fresh(run)
    write_submission(run, Submission("slurm"))
    assert is_fresh(run)
    os.utime(run.path / BACKEND_FILE, (1.0, 1.0))
    assert not is_fresh(run)


def held(restarts: int, released: int = 0) -> Submission:
    return Submission("slurm", "812", {"nonce": NONCE, "restarts": str(restarts), "released": str(released)})


def test_a_held_job_is_let_go_as_often_as_run_restarts(
    root: Path, listed: list[JobRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, freed = made(root), list[str]()
    listed.append(JobRecord("812", "PENDING", reason="launch_failed_requeued_held"))
    monkeypatch.setattr("craton.orchestration.slurm.backend.release", freed.append)
    monkeypatch.setattr("craton.orchestration.slurm.backend.read_snapshot", tools.SlurmState)
    write_submission(run, held(2))
    sentences = [SlurmBackend().look([run])["chain"].sentence for _ in range(3)]
    assert freed == ["812", "812"]
    assert "Craton released it (1 of at most 2 times, run.restarts)" in sentences[0]
    assert "(2 of at most 2 times" in sentences[1]
    assert "`craton resume` releases it" in sentences[2]
    listed[:] = [JobRecord("812", "PENDING", reason="JobHeldUser")]
    write_submission(run, held(2))
    SlurmBackend().look([run])
    assert len(freed) == 2, "what its owner holds stays held"


def test_a_job_whose_script_does_not_begin_is_noticed(root: Path, listed: list[JobRecord]) -> None:
    run = made(root)
    write_submission(run, held(2))
    listed.append(JobRecord("812", "RUNNING", start=time.time() - 40.0))
    found = SlurmBackend().look([run])["chain"]
    assert found.condition == "running"
    assert "Slurm started job 812" in found.sentence
    assert "its prolog still runs" in found.sentence
    assert not found.has_begun
    write_starts(run, Starts(NONCE))
    assert SlurmBackend().look([run])["chain"].has_begun, "it checks its nodes"
    os.utime(run.path / STARTS_FILE, (time.time() - 900.0, time.time() - 900.0))
    assert "has not begun" in SlurmBackend().look([run])["chain"].sentence, "it was the start before"
    listed[:] = [JobRecord("812", "CONFIGURING", start=time.time() - 40.0)]
    assert SlurmBackend().look([run])["chain"].has_begun, "its nodes boot: Slurm itself has not started it"
    (run.path / STARTS_FILE).unlink()
    listed[:] = [JobRecord("812", "CONFIGURING", start=time.time() - 900.0)]
    assert "still configures them" in SlurmBackend().look([run])["chain"].sentence


def test_a_run_is_whole_after_ctrl_c_at_sbatch(root: Path, slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted when Slurm has the job and nobody has written down its number: it is seen, stopped and resumed."""
    slurm.occupy(*(f"g{number}" for number in range(1, 9)))

    def interrupted(words: Sequence[str]) -> str:
        tools.submit(words)
        raise KeyboardInterrupt

    draft = draft_run(chain_job("broken-off", 1, 10), root / "broken-off")
    monkeypatch.setattr(handover, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_run(draft, root)
    monkeypatch.undo()
    monkeypatch.setenv("SLURM_CONF", str(slurm.config))
    run = RunDirectory(root / "broken-off")
    assert json.loads((run.path / BACKEND_FILE).read_text())["job"] == ""
    assert look(run).state == "waiting"
    first = standing(run).job
    assert first.isdecimal()
    stop_run(run)
    wait(lambda: look(run).state == "stopped", "it is taken back", run)
    slurm.cancel_all()
    resume_run(run, draft_resume(run, resumed_job(run)))
    assert read_submission(run).job != first
    wait_for_run(run, "done")
    expect_whole_chain(run, 10)
