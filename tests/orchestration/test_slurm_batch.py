"""One start of a job on Slurm, from its pre-flight to its end: who asked it to leave, and what that costs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from slurm_runs import chain_job, no_code

from craton.agent import read_launch, write_launch
from craton.job import Job, parse_job
from craton.orchestration.backend import Submission, write_submission
from craton.orchestration.changes.resize import among_nodes
from craton.orchestration.draft import draft_run
from craton.orchestration.slurm import batch, life
from craton.orchestration.slurm.batch import SlurmBatch
from craton.orchestration.slurm.checks import check_seconds
from craton.orchestration.slurm.records import JobRecord
from craton.orchestration.slurm.starts import read_starts
from craton.orchestration.slurm.step import SlurmStep, complaint_of
from craton.telemetry import RunDirectory
from craton.telemetry.node import Heartbeat, write_heartbeat
from craton.telemetry.rank import Recorder

NONCE = "0123456789abcdef"
LEFT = "leaving for Slurm: the time limit is near, or another job takes the nodes\n"
SILENT = "kind: command\ncommand: [sleep, '1000']\ncluster: local x 1\nrun: {on: slurm, restarts: 2}\n"
TOLD = f"{SILENT}progress: {{pattern: 'step (?P<step>[0-9]+)'}}\n"
ASKED = f"{SILENT}progress: {{prometheus: {{address: 'http://127.0.0.1:8000/metrics', names: {{a: requests}}}}}}\n"
SERVER = """kind: serve
model: llama-3.1-8b
serve: {initialize: random}
cluster: p5.48xlarge x 1
run: {on: slurm, restarts: 2}
"""


def job_of_text(text: str) -> Job:
    return parse_job(f"name: served\n{text}", folder=no_code())


class Stage:
    """A run whose starts are made here, one after the other: what Slurm and the agents would do is said by the test."""

    def __init__(self, root: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = RunDirectory.create(root, job.name)
        for name, text in draft_run(job, self.run.path).files().items():
            (self.run.path / name).write_text(text)
        self.seen: list[str] = []  # the STOP marker, as the agents of each start found it
        self.requeued: list[str] = []
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(batch, "read_nodes", lambda hosts: [])
        monkeypatch.setattr(batch, "read_switches", list)
        monkeypatch.setattr(batch, "REQUEUE_SECONDS", 0.0)
        monkeypatch.setattr(batch, "LOOK_SECONDS", 0.01)
        monkeypatch.setattr(batch, "ask", lambda *words: self.requeued.append(" ".join(words)))
        monkeypatch.setattr(batch.signal, "signal", lambda *told: None)

    def start(
        self,
        checks: Callable[[SlurmBatch], object] = lambda start: None,
        works: Callable[[SlurmBatch], object] = lambda start: None,
        agents: Sequence[str] = ("true",),
        hosts: str = "g1",
    ) -> int:
        """Runs one start: what happens while its nodes are checked, then while its agents work."""

        def unfit(start: SlurmBatch, *told: object) -> dict[str, str]:
            checks(start)
            return {}

        def command(*told: object) -> list[str]:
            self.seen.append(self.run.marker_text("STOP"))
            works(started)
            return list(agents)

        self._monkeypatch.setattr(SlurmBatch, "_unfit", unfit)
        self._monkeypatch.setattr(batch, "agents_command", command)
        started = SlurmBatch(self.run, NONCE, {"SLURM_JOB_ID": "812", "SLURM_JOB_NODELIST": hosts})
        return started.run()


def warned(start: SlurmBatch) -> None:
    start._on_warning(signal.SIGUSR1, None)


def ended(start: SlurmBatch) -> None:
    start._on_end(signal.SIGTERM, None)


@pytest.fixture
def stage(root: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(root, chain_job("chain", 1, run="restarts: 2"), monkeypatch)


def test_a_stop_while_the_nodes_are_checked_is_heard(stage: Stage) -> None:
    code = stage.start(checks=lambda start: stage.run.mark("STOP", "craton stop"))
    assert (code, stage.seen, stage.requeued) == (0, [], [])
    assert stage.run.marker_text("STOP") == "craton stop\n"


def test_a_stop_between_the_checks_and_the_agents_is_heard(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.run.mark("STOP", LEFT)
    write = batch.write_allocation

    def stopped(*told: object) -> None:
        stage.run.mark("STOP", "craton stop")
        write(*told)  # type: ignore[arg-type]

    monkeypatch.setattr(batch, "write_allocation", stopped)
    assert stage.start() == 0
    assert stage.seen == ["craton stop\n"], "the agents find it, and not what the start before left"
    assert stage.requeued == []


def test_what_the_start_before_left_does_not_stop_this_one(stage: Stage) -> None:
    stage.run.mark("STOP", LEFT)
    stage.start(works=warned)
    assert stage.seen == [""]
    assert [path.name for path in stage.run.path.glob(".STOP*")] == []


def test_a_warning_while_the_nodes_are_checked_requeues_and_costs_nothing(stage: Stage) -> None:
    for _ in range(4):
        assert stage.start(checks=warned) == 1
        assert stage.run.marker_text("STOP").startswith(LEFT), "or it would look like a run that is done"
    assert stage.seen == []
    assert stage.requeued == ["scontrol requeue 812"] * 4
    assert not stage.run.has("FATAL")


def test_slurm_ends_a_job_whose_nodes_are_checked(stage: Stage) -> None:
    assert stage.start(checks=ended) == 1
    assert (stage.seen, stage.requeued) == ([], []), "what comes next is Slurm's business"
    starts = read_starts(stage.run)
    assert starts is not None
    assert starts.spent(0) == 0


@pytest.mark.parametrize("leaves", [warned, ended])
@pytest.mark.parametrize(
    ("text", "given_up"),
    [(SERVER, False), (SILENT, False), (ASKED, False), (TOLD, True)],
    ids=["server", "silent", "asked", "told"],
)
def test_slices_of_what_shows_no_steps_are_not_counted(
    text: str, given_up: bool, leaves: Callable[[SlurmBatch], None], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody can see the progress of may be preempted as often as it takes; what has steps comes on or is given
    up."""
    stage = Stage(root, job_of_text(text), monkeypatch)
    for _ in range(6):
        stage.start(works=leaves)
    assert (len(stage.seen) == 6) != given_up
    starts = read_starts(stage.run)
    assert starts is not None
    assert (starts.spent(0) > 2) == given_up


def test_a_command_that_records_steps_itself_is_given_up_when_it_comes_no_further(stage: Stage) -> None:
    Recorder("node-0", 0, 0, run=stage.run).metrics(5, run_step_seconds=0.1)
    for _ in range(6):
        stage.start(works=warned)
    assert len(stage.seen) == 3


def test_a_run_that_is_not_started_again_says_so_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(root, job_of_text(TOLD), monkeypatch)
    for _ in range(3):
        stage.start(works=warned)
    first, *others = stage.run.marker_text("STOP").splitlines()
    assert first == (
        "saved and stopped; not requeued: 3 starts failed or made no progress, run.restarts is 2; `craton resume "
        "served` resumes it"
    )
    assert others == LEFT.splitlines()
    assert not stage.run.has("FATAL")
    stage.run.mark("STOP", "by somebody else")
    stage.start()
    assert stage.run.marker_text("STOP").startswith("it stopped; not requeued: "), "nor by Slurm itself"


def test_a_preemption_that_only_the_agents_hear_of_is_not_counted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(root, job_of_text(SERVER), monkeypatch)
    for _ in range(6):
        stage.start(works=lambda start: stage.run.mark("STOP", "SIGTERM to the agent of node-0"))
    assert stage.requeued == ["scontrol requeue 812"] * 6


@pytest.mark.parametrize("words", ["as requested", "as asked"])
def test_a_run_that_reached_its_stop_step_is_not_requeued(stage: Stage, words: str) -> None:
    """Rank 0 writes the first words; run directories of earlier versions have the second."""
    code = stage.start(works=lambda start: stage.run.mark("STOP", f"stopped after step 5, {words}"))
    assert (code, stage.requeued) == (0, [])


def test_a_server_that_fails_is_given_up(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(root, job_of_text(SERVER), monkeypatch)
    for _ in range(3):
        stage.start()
    assert stage.requeued == ["scontrol requeue 812"] * 2
    assert "3 starts failed or made no progress" in stage.run.marker_text("FATAL")


def test_a_step_that_starts_no_agent_says_why(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(root, job_of_text(SILENT), monkeypatch)
    output = stage.run.path / "logs" / "slurm-812.out"
    output.write_text("srun: error: of a start before\n")

    def complain(start: SlurmBatch) -> None:
        with open(output, "a") as file:
            file.write(
                "srun: unrecognized option '--container-image=a.sqsh'\nTry \"srun --help\" for more information\n"
            )

    for _ in range(3):
        stage.start(works=complain)
    why = "no agent could start (srun: unrecognized option '--container-image=a.sqsh'); not requeued: "
    assert stage.run.marker_text("FATAL").startswith(why)


def test_agents_that_began_and_ended_are_not_said_not_to_have_started(stage: Stage) -> None:
    def beat(start: SlurmBatch) -> None:
        write_heartbeat(stage.run, "node-0", Heartbeat(read_launch(stage.run).generation, "failed", 1, 0))

    for _ in range(3):
        stage.start(works=beat)
    assert stage.run.marker_text("FATAL").startswith("the agents ended; not requeued: ")


@pytest.mark.parametrize(
    ("cause", "after"),
    [
        (
            "/usr/bin/python3: Error while finding module specification for 'craton.orchestration.slurm.node' "
            "(ModuleNotFoundError: No module named 'craton')",
            ["srun: error: g1: task 0: Exited with exit code 1", "srun: Terminating StepId=812.0"],
        ),
        (
            "slurmstepd: error: pyxis:     [ERROR] URL https://registry/v2/manifests/a returned error code: 401",
            [
                "slurmstepd: error: pyxis: couldn't start container",
                "slurmstepd: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1",
                "slurmstepd: error: Failed to invoke spank plugin stack",
                "srun: error: g[1-2]: tasks 0-1: Exited with exit code 1",
            ],
        ),
        ("srun: error: g1: task 0: Exited with exit code 1", []),
        ("", []),
    ],
    ids=["no Craton in it", "no image", "nothing more", "nothing"],
)
def test_the_line_that_says_why_a_step_started_nothing(cause: str, after: list[str]) -> None:
    before = [
        "pyxis: importing docker image: registry#a",
        "slurmstepd: error: pyxis:     [INFO] Fetching image manifest",
    ]
    assert complaint_of("\n".join([*(before if after else []), cause, *after])) == cause


@pytest.mark.parametrize(("heard", "avoided"), [([], ""), (["node-0"], "g2")])
def test_nodes_are_avoided_for_silence_only_where_others_were_heard(
    heard: list[str], avoided: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image that no node has yet is not the nodes' fault."""
    stage = Stage(root, chain_job("chain", 2), monkeypatch)
    monkeypatch.setattr(life, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(batch, "SLURM_SEES_SECONDS", 0.0)
    monkeypatch.setattr(batch, "_excluded", lambda number: "")

    def beat(start: SlurmBatch) -> None:
        for node in heard:
            write_heartbeat(stage.run, node, Heartbeat(read_launch(stage.run).generation, "running", 1, 0))

    assert stage.start(works=beat, agents=["sleep", "60"], hosts="g[1-2]") == 1
    exclusions = [each for each in stage.requeued if "ExcNodeList" in each]
    assert exclusions == ([f"scontrol update JobId=812 ExcNodeList={avoided}"] if avoided else [])
    assert stage.requeued[0] == "scontrol requeue 812"


def test_with_an_image_nodes_have_long_to_come_and_agents_wait_as_long(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Stage(root, chain_job("plain", 1), monkeypatch)
    inside = Stage(root, chain_job("inside", 1, run="image: /fsx/train.sqsh"), monkeypatch)
    limits: list[float] = []
    for stage in (plain, inside):
        stage.start(works=lambda start: limits.append(life.first_seconds(start._has_image(read_launch(start._run)))))
    assert limits == [life.FIRST_SECONDS, life.FIRST_SECONDS + life.IMAGE_SECONDS]
    assert limits[1] > 7 * 60, "what unpacking a large one takes"
    assert read_launch(plain.run).give_up_seconds == 600
    assert read_launch(inside.run).give_up_seconds > limits[1], "or a late node would be the run's end"
    quick, slow = (check_seconds(SlurmStep(stage.run.path, "python", image), True) for image in ("", "/fsx/a.sqsh"))
    assert slow == quick + life.IMAGE_SECONDS


def test_a_run_that_was_resized_needs_fewer_of_its_nodes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(root, chain_job("chain", 2), monkeypatch)
    before, needed = read_launch(stage.run), []

    def resized(start: SlurmBatch) -> None:
        write_launch(stage.run, among_nodes(read_launch(stage.run), 1))
        needed.append(start._needed_nodes(before))

    stage.start(works=resized, hosts="g[1-2]")
    assert needed == [1], "the node without work may be lost"


def test_a_task_of_an_array_keeps_its_own_excluded_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [JobRecord("812_1", "RUNNING", excluded="g1"), JobRecord("812_3", "RUNNING", excluded="g7")]
    monkeypatch.setattr(batch, "read_jobs", lambda numbers: jobs)
    assert batch._excluded("812_3") == "g7"
    assert batch._excluded("812_4") == ""
    jobs.append(JobRecord("812", "PENDING", excluded="g8", tasks="4-9"))
    assert batch._excluded("812_4") == "g8", "a task that waits is part of the array"


def test_a_run_goes_on_where_its_number_cannot_be_written_down(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_submission(stage.run, Submission("slurm", "", {"nonce": NONCE}))

    def full(*told: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("craton.orchestration.slurm.handover.write_submission", full)
    monkeypatch.setattr(SlurmBatch, "run", lambda start: 0)
    monkeypatch.setenv("SLURM_JOB_ID", "812")
    assert batch.main([str(stage.run.path), NONCE]) == 0
    assert "the job ID 812 cannot be recorded" in capsys.readouterr().err
    assert not stage.run.has("FATAL")
