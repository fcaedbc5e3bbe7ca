"""The verbs of a run on a real Slurm: run, ps, why, logs, stop, resume, and what is refused before anything is sent."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chain import losses
from slurm_lab import LEAVES, SlurmLab
from slurm_runs import (
    CHAIN,
    chain_job,
    events_of,
    expect_whole_chain,
    hosts_of,
    look,
    losses_of,
    standing,
    submit,
    wait,
    wait_for_run,
)

from craton.cli import main
from craton.orchestration.draft import draft_run
from craton.orchestration.errors import SchedulerError
from craton.orchestration.start import kill_run, stop_run
from craton.orchestration.start.copies import start_copies
from craton.orchestration.watching import settled_summaries
from craton.telemetry import find_run, summarize


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


class Craton:
    """`craton("ps")` does what `craton ps` does in a shell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], folder: Path) -> None:
        self._monkeypatch, self._capfd, self._folder = monkeypatch, capfd, folder
        monkeypatch.chdir(folder)

    def __call__(self, *words: object) -> Said:
        self._monkeypatch.setattr(sys, "argv", ["craton", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = self._capfd.readouterr()
        return Said(int(ended.value.code or 0), said.out, said.err)

    def json(self, *words: object) -> Any:
        said = self(*words, "--json")
        assert said.code == 0, said.err
        return json.loads(said.out)

    def job(self, name: str, nodes: int = 2, steps: int = 10, run: str = "", more: str = "") -> Path:
        path = self._folder / name / f"{name}.yaml"  # a folder of its own, for the code beside it is kept
        path.parent.mkdir(exist_ok=True)
        options = f"{run}, " if run else ""
        path.write_text(
            f"kind: command\ncommand: [{sys.executable}, {CHAIN}]\ncluster: local x {nodes}\n"
            f"run: {{{options}env: {{STEPS: '{steps}', STEP_SECONDS: '0.05'}}}}\n{more}"
        )
        return path


@pytest.fixture
def craton(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, root: Path) -> Craton:
    return Craton(monkeypatch, capfd, tmp_path)


def test_a_run_waits_and_says_why_is_taken_back_and_goes_on(
    craton: Craton, slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAB_TOKEN", "very-secret-words")
    first = slurm.occupy(*LEAVES["leaf1"][:1], minutes=30)
    second = slurm.occupy(*LEAVES["leaf2"], minutes=20)
    job = craton.job("waits", 4, run="secrets: [LAB_TOKEN]", more="placement: {within: leaf}\n")
    said = craton("run", job, "--on", "slurm", "--detach")
    assert said.code == 0, said.err
    run = find_run("waits")
    wait(lambda: "leaf" in standing(run).sentence, "Slurm has looked at it", run)

    sentence = "needs 4 nodes on one leaf; leaf1 has 3 free; earliest "
    (listed,) = craton.json("ps")
    assert (listed["name"], listed["state"]) == ("waits", "waiting")
    assert listed["message"].startswith(sentence)
    assert listed["message"].endswith(f" when job {second} ends")
    assert f"waits: {sentence}" in craton("ps").out
    assert f"waits waits as job {standing(run).job}: {sentence}" in craton("why", "waits").out
    assert craton.json("why", "waits")["condition"] == "waiting"
    assert f"waits waits: {sentence}" in craton("logs", "waits").err
    assert "cancels it" in craton("resume", "waits").err
    assert "nothing to resize" in craton("resize", "waits", "2").err

    assert craton("stop", "waits").code == 0
    assert look(run).state == "stopped"
    slurm("scancel", first, second)
    said = craton("resume", "waits")
    assert said.code == 0, said.err
    assert "waits is done" in said.out
    expect_whole_chain(run, 10)
    assert craton.json("ps")[0]["state"] == "done"
    assert "rank 0 leaves after step 10" in craton("logs", "waits", "--rank", "0").out
    assert "a token of 17 letters" in craton("logs", "waits", "--rank", "3").out, "secrets reach the ranks"
    kept = [path for path in run.path.rglob("*") if path.is_file() and b"very-secret-words" in path.read_bytes()]
    assert kept == [], "and are written nowhere"
    assert "allocated: job" in craton("logs", "waits", "--agent").out
    leaves = {next(leaf for leaf, nodes in LEAVES.items() if host in nodes) for host in hosts_of(run).values()}
    assert len(leaves) == 1
    (placed,) = [str(event["message"]) for event in events_of(run, "placed")]
    assert placed == f"requested one leaf, got 4 nodes on {leaves.pop()} x 4: satisfied"


def test_a_running_run_stops_with_a_checkpoint_and_resumes(craton: Craton, slurm: SlurmLab, root: Path) -> None:
    run = submit(root, chain_job("stops", 2, 200, 0.05))
    wait(lambda: summarize(run).step >= 12, "it runs", run)
    assert "is running (node-0 on g" in craton("resume", "stops").err
    said = craton("stop", "stops")
    assert said.code == 0, said.err
    stopped_at = summarize(run).step
    assert f"stops stopped after step {stopped_at}; checkpoint of step {stopped_at} saved" in said.out
    assert standing(run).condition == "ended"
    assert craton("resume", "stops", "--detach").code == 0
    wait(lambda: summarize(run).step > stopped_at, "it goes on", run)
    kill_run(run)
    wait(lambda: look(run).state == "stopped", "it is gone at once", run)
    found = losses_of(run)
    assert found == {step: losses(max(found))[step] for step in found}


@pytest.mark.slow
def test_copies_are_an_array_and_each_is_a_run(slurm: SlurmLab, root: Path) -> None:
    job = chain_job("copied", 1, 10, run="copies: 3")
    runs = start_copies(draft_run(job, root / job.name), root)
    assert [run.name for run in runs] == ["copied-1", "copied-2", "copied-3"]
    for run in runs:
        wait_for_run(run, "done")
        expect_whole_chain(run, 10)
    assert len({next(iter(hosts_of(run).values())) for run in runs}) == 3, "at the same time, on nodes of their own"


def test_fifty_runs_at_once_are_one_question(slurm: SlurmLab, root: Path) -> None:
    slurm.occupy(*(node for nodes in LEAVES.values() for node in nodes))
    job = chain_job("many", 1)
    drafts = [
        draft_run(job.model_copy(update={"name": f"many-{number}"}), root / f"many-{number}") for number in range(50)
    ]
    from craton.orchestration.start import start_run

    runs = [start_run(draft, root) for draft in drafts]
    questions = job_questions(slurm)
    summaries = settled_summaries(summarize(run) for run in runs)
    assert {summary.state for summary in summaries} == {"waiting"}
    assert job_questions(slurm) - questions <= 2, "squeue once for all, and scontrol once for why they wait"
    for run in runs[:3]:
        stop_run(run)
    assert {summary.state for summary in settled_summaries(summarize(run) for run in runs[:3])} == {"stopped"}


def job_questions(slurm: SlurmLab) -> int:
    """How often the controller was asked about jobs since it started."""
    counted = [line.split() for line in slurm("sdiag").splitlines() if "REQUEST_JOB_INFO" in line]
    return sum(int(word.removeprefix("count:")) for words in counted for word in words if word.startswith("count:"))


@pytest.mark.slow
def test_small_jobs_fill_the_gaps(slurm: SlurmLab, root: Path) -> None:
    """Slurm's backfill: a short run starts before a large one that waits, a long one does not."""
    slurm.occupy(*LEAVES["leaf1"], *LEAVES["leaf2"][:3], minutes=10)
    large = submit(root, chain_job("large", 8, 10, run="time_limit: 10m"))
    wait(lambda: standing(large).reason == "Resources", "Slurm has looked at it", large)
    long = submit(root, chain_job("long", 1, 10, run="time_limit: 10h"))
    short = submit(root, chain_job("short", 1, 10, run="time_limit: 2m"))
    wait_for_run(short, "done")
    assert look(large).state == "waiting"
    told = look(long)
    assert told.state == "waiting"
    assert "1 job has precedence in train" in told.message


def test_what_slurm_refuses_leaves_no_run(slurm: SlurmLab, root: Path, craton: Craton) -> None:
    with pytest.raises(SchedulerError, match=r"invalid partition.*`run:` in the job"):
        submit(root, chain_job("refused", 2, run="partition: nowhere"))
    assert not (root / "refused").exists(), "the name is free again"
    said = craton("run", craton.job("refused", run="partition: nowhere"), "--on", "slurm")
    assert (said.code, said.err.count("\n")) == (2, 1 + said.err.count("warning"))


def test_a_dry_run_prints_what_would_be_sent(craton: Craton, root: Path) -> None:
    job = craton.job("dry", more="placement: {within: leaf}\n")
    document = craton.json("run", job, "--on", "slurm", "--dry-run")
    assert "#SBATCH --switches=1@365-00:00:00\n" in document["files"]["job.sbatch"]
    assert document["commands"] == [["sbatch", "--parsable", str(root / "dry" / "job.sbatch")]]
    assert not (root / "dry").exists()
    assert "# commands to submit to slurm" in craton("run", job, "--on", "slurm", "--dry-run").out


def test_runs_of_a_cluster_are_kept_where_its_file_says(
    craton: Craton, slurm: SlurmLab, root: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "fsx" / "runs"
    more = (
        "cluster:\n  name: lab\n  instance: local\n  nodes: 1\n"
        f"  scheduler: {{kind: slurm, partition: short}}\n  runs: {shared}\n"
        f"  storage: {{shared: {{path: {tmp_path}/fsx}}}}\n"
    )
    job = craton.job("kept", steps=100_000)  # it must not end before it is cancelled
    job.write_text(job.read_text().replace("cluster: local x 2\n", more))
    said = craton("run", job, "--detach")
    assert said.code == 0, said.err
    assert "warning" not in said.out, "the file says that this folder is shared"
    assert (root / "kept").resolve() == shared / "kept"
    assert [listed["name"] for listed in craton.json("ps")] == ["kept"]
    kill_run(find_run("kept"))
