"""Whatever happens while a run is handed to a cluster, nothing is left there that no verb reaches, nor a hollow run."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
from kubernetes_jobs import cluster, draft, job
from kubernetes_standin import StandIn

from craton.orchestration import RunStateError, read_submission
from craton.orchestration.backend import BACKEND_FILE
from craton.orchestration.draft import Draft
from craton.orchestration.errors import SchedulerError
from craton.orchestration.kubernetes import KubernetesBackend, handover
from craton.orchestration.kubernetes.api import Connection, KubernetesApiError
from craton.orchestration.kubernetes.backend import MANIFEST_FILE, read_manifests
from craton.orchestration.start import start_run, stop_run
from craton.orchestration.start.runs import resume_run, resumed_job
from craton.orchestration.watching import settled, standing_of
from craton.telemetry import RunDirectory, list_runs, summarize

JOBSETS = ("jobset.x-k8s.io/v1alpha2", "jobsets")


@pytest.fixture
def server(server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A cluster, a folder with the code of a command, and Ctrl-C as a terminal has it."""
    (tmp_path / "code").mkdir()
    monkeypatch.chdir(tmp_path / "code")
    handler = signal.signal(signal.SIGINT, on_interrupt)
    yield server
    signal.signal(signal.SIGINT, handler)


def drafted(folder: Path, generation: int = 0) -> Draft:
    place = cluster(scheduler={"gang": "kueue", "queue": "research"})
    wanted = job("command", place, run={"secrets": ["HF_TOKEN"]})
    return replace(draft(wanted, folder / "runs" / "llm", generation), on="kubernetes")


def at_answer(wanted: str, act: Callable[[], None]) -> Callable[[str], None]:
    """Does something before the first such request is answered; `wanted` is `POST jobsets`."""
    method, _, plural = wanted.partition(" ")
    seen: list[str] = []

    def before_answer(request: str) -> None:
        if not seen and request.startswith(method) and f"/{plural}" in request:
            seen.append(request)
            act()

    return before_answer


INTERRUPTED = threading.Event()


def on_interrupt(number: int, frame: FrameType | None) -> None:
    INTERRUPTED.set()
    signal.default_int_handler(number, frame)


def interrupt() -> None:
    """Ctrl-C, which has arrived when this returns. One that comes in the instant before the main thread begins to wait
    does not wake it; people press again."""
    INTERRUPTED.clear()
    for _ in range(10):
        os.kill(os.getpid(), signal.SIGINT)
        if INTERRUPTED.wait(1.0):
            return
    raise AssertionError("nobody hears Ctrl-C")


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """Python ignores a KeyboardInterrupt that is raised in a callback of the garbage collector; Hypothesis has one."""
    gc.disable()
    yield
    gc.enable()


def cut_off() -> None:
    raise ConnectionResetError


@pytest.mark.parametrize("plural", ["jobsets", "secrets", "configmaps"])
def test_ctrl_c_leaves_nothing_on_the_cluster_and_the_name_free(server: StandIn, tmp_path: Path, plural: str) -> None:
    """The cluster has made the object by then."""
    server.before_answer = at_answer(f"POST {plural}", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start_run(drafted(tmp_path), tmp_path / "runs")
    assert server.objects == {}
    assert list_runs() == []
    start_run(drafted(tmp_path), tmp_path / "runs")
    assert len(server.of("jobsets")) == 1


def test_a_second_ctrl_c_leaves_a_run_that_can_be_seen_and_stopped(server: StandIn, tmp_path: Path) -> None:
    """While what was made is being removed; the command does not wait for that, and it may be over by then."""
    at_creation, at_removal = at_answer("POST jobsets", interrupt), at_answer("DELETE jobsets", interrupt)

    def at_both(request: str) -> None:
        at_creation(request)
        at_removal(request)

    server.before_answer = at_both
    with pytest.raises(KeyboardInterrupt):
        start_run(drafted(tmp_path), tmp_path / "runs")
    assert list_runs() or server.objects == {}
    for run in list_runs():
        assert read_submission(run).job == "JobSet/llm"
        assert (run.path / MANIFEST_FILE).exists()


def test_ctrl_c_at_a_resume_leaves_the_run_as_it_was(server: StandIn, tmp_path: Path) -> None:
    run = start_run(drafted(tmp_path), tmp_path / "runs")
    [owner] = server.of("jobsets")
    owner["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "FailedJobs"}]}
    before = {path.name: path.read_text() for path in run.path.iterdir() if path.is_file()}
    server.before_answer = at_answer("POST configmaps", interrupt)
    with pytest.raises(KeyboardInterrupt):
        resume_run(run, drafted(tmp_path, generation=1))
    assert {path.name: path.read_text() for path in run.path.iterdir() if path.is_file()} == before
    assert server.of("jobsets") == []
    resume_run(run, drafted(tmp_path, generation=1))
    assert standing_of(run).condition == "waiting"


def test_a_resume_waits_for_the_pods_of_an_owner_that_is_gone(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would still save in the run directory that the new ones take over."""
    run = start_run(drafted(tmp_path), tmp_path / "runs")
    server.remove((*JOBSETS, "train", "llm"))
    pod = {"metadata": {"name": "llm-0", "labels": {"app.kubernetes.io/instance": "llm"}}, "status": {}}
    server.put("v1", "pods", pod)
    monkeypatch.setattr(handover, "LEAVE_SECONDS", 0.0)
    with pytest.raises(RunStateError, match=r"the pods of llm did not terminate within 0 s"):
        KubernetesBackend().submit(drafted(tmp_path, generation=1), run)
    assert server.of("jobsets") == []
    server.objects.clear()
    KubernetesBackend().submit(drafted(tmp_path, generation=1), run)
    assert len(server.of("jobsets")) == 1


def test_an_owner_that_was_made_without_an_answer_is_found(server: StandIn, tmp_path: Path) -> None:
    server.before_answer = at_answer("POST jobsets", cut_off)
    run = start_run(drafted(tmp_path), tmp_path / "runs")
    [owner] = server.of("jobsets")
    assert server.of("secrets")[0]["metadata"]["ownerReferences"][0]["uid"] == owner["metadata"]["uid"]
    assert not handover.is_pending(read_submission(run))


@pytest.fixture
def unanswered(server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run of which nobody can tell whether the cluster will have it."""

    def lose() -> None:
        server.objects.clear()
        cut_off()

    monkeypatch.setattr(handover, "LOOK_UP_SECONDS", 0.0)
    server.before_answer = at_answer("POST jobsets", lose)
    with pytest.raises(RunStateError, match=r"was created, so the run is kept: .*`craton resume llm`"):
        start_run(drafted(tmp_path), tmp_path / "runs")
    [run] = list_runs()
    return run


def test_what_nobody_answered_for_is_kept_and_stopped_when_it_turns_up(
    server: StandIn, unanswered: RunDirectory
) -> None:
    assert standing_of(unanswered).sentence == "it was just submitted, and Kubernetes does not list it yet"
    server.put(*JOBSETS, read_manifests(unanswered)[0])
    assert standing_of(unanswered).condition == "waiting"
    assert not handover.is_pending(read_submission(unanswered)), "it is known from now on"
    stop_run(unanswered)
    assert server.objects == {}
    assert standing_of(unanswered).reason == "Gone"


def test_what_the_cluster_never_had_is_handed_in_again(
    server: StandIn, tmp_path: Path, unanswered: RunDirectory
) -> None:
    os.utime(unanswered.path / BACKEND_FILE, (0, 0))
    seen = settled(summarize(unanswered), standing_of(unanswered))
    assert (seen.state, seen.message) == ("lost", "Kubernetes never received it")
    assert resumed_job(unanswered).name == "llm"
    resume_run(unanswered, drafted(tmp_path, generation=1))
    assert standing_of(unanswered).condition == "waiting"


def test_an_object_of_the_same_name_is_not_taken_for_the_runs_own(server: StandIn, tmp_path: Path) -> None:
    run = start_run(drafted(tmp_path), tmp_path / "runs")
    [owner] = server.of("jobsets")
    owner["metadata"]["annotations"]["craton/submission"] = "of another machine"
    assert standing_of(run).reason == "Gone"
    with pytest.raises(RunStateError, match="is not running"):
        stop_run(run)
    assert len(server.of("jobsets")) == 1


def test_what_cannot_be_removed_again_is_kept(server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: object) -> bool:
        raise SchedulerError("the Kubernetes cluster does not respond")

    server.forbidden = {"configmaps"}
    with monkeypatch.context() as patch:
        patch.setattr(Connection, "delete", silent)
        with pytest.raises(RunStateError, match=r"configmaps is forbidden.*could not be deleted .*`craton stop llm`"):
            start_run(drafted(tmp_path), tmp_path / "runs")
    [run] = list_runs()
    assert (run.path / MANIFEST_FILE).exists()
    stop_run(run)
    assert server.objects == {}


@pytest.mark.parametrize(("status", "is_kept"), [(403, False), (500, False), (504, True)])
def test_only_an_answer_that_leaves_it_open_keeps_a_run(
    status: int, is_kept: bool, server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise KubernetesApiError("no", status)

    monkeypatch.setattr(handover, "LOOK_UP_SECONDS", 0.0)
    monkeypatch.setattr(Connection, "create", refuse)
    with pytest.raises(RunStateError if is_kept else SchedulerError):
        start_run(drafted(tmp_path), tmp_path / "runs")
    assert len(list_runs()) == is_kept


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({"app.kubernetes.io/managed-by": "helm"}, "belongs to another run; choose another name with `--name`"),
        ({}, "has not ended; `kubectl delete jobset llm -n train` ends it"),
    ],
)
def test_a_name_that_is_taken_on_the_cluster_leaves_no_run(
    labels: dict[str, str], words: str, server: StandIn, tmp_path: Path
) -> None:
    lost = start_run(drafted(tmp_path), tmp_path / "runs")
    [owner] = server.of("jobsets")
    owner["metadata"]["labels"] |= labels
    lost.path.rename(tmp_path / "elsewhere")
    with pytest.raises(RunStateError, match=words):
        start_run(drafted(tmp_path), tmp_path / "runs")
    assert list_runs() == []
    assert server.of("jobsets") == [owner]
