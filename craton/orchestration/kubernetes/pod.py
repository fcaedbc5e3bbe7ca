"""`python -m craton.orchestration.kubernetes.pod RUN`: the program in a pod, one pod per node of a run.

The first pod creates the run directory, or takes it over for a new submission. The others wait for it and report their
cluster nodes, by which it orders the run's nodes. Then each pod starts the agent of its node, forwards the kubelet's
signals, copies the ranks' output to its own (for `kubectl logs`), and turns the run's markers into an exit code for the
owner of the pods.

A stop by the scheduler (a drained node, a preempted job) is not the user's: the ranks save a checkpoint and exit, but
the pods come back, and the first starts the next generation once all have left the last one.
"""

from __future__ import annotations

import os
import signal

from craton.formatting import setting

if __name__ == "__main__":
    # A signal without a handler does not end a container's first process: the kubelet would wait for the whole grace
    # period. The imports below take a second or two, during which there is nothing to save.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(os.EX_TEMPFAIL))  # EXIT_AGAIN

import argparse
import contextlib
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from craton.agent import Launch, LaunchError, next_number, parse_launch, read_launch, write_launch
from craton.agent.coordination import forget_avoided
from craton.orchestration.kubernetes.codepack import unpack_code
from craton.orchestration.kubernetes.gathering import answer, gather, in_order, node_of, record_event, sentences
from craton.orchestration.kubernetes.places import read_places
from craton.orchestration.kubernetes.podfile import (
    TimeLimit,
    call_of,
    submission_of,
    used_seconds,
    write_pod_file,
    write_whole,
)
from craton.orchestration.kubernetes.podlogs import LogCopier
from craton.orchestration.kubernetes.pods import EXIT_AGAIN, EXIT_DONE, EXIT_FAILED, EXIT_FATAL
from craton.orchestration.placement import layout_of
from craton.orchestration.preflight import preflight
from craton.orchestration.run_files import disarm
from craton.telemetry import MARKERS, RunDirectory, RunError, read_json
from craton.telemetry.members import living_manager
from craton.telemetry.node import read_heartbeat

UNFIT_FOLDER = "unfit"  # of the run directory: a file for every pod whose node failed pre-flight
INDEX_VARIABLES = ("JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "LWS_WORKER_INDEX")
LOOK_SECONDS = 0.2
ASIDE_LOOK_SECONDS = 1.0
UNFIT_SECONDS = 600.0  # after which an idle pod checks its node again
SAY_SECONDS = 60.0  # between two log lines about the same wait


@dataclass(frozen=True)
class Pod:
    """The settings of a pod."""

    run: RunDirectory
    index: int
    submission: str
    files: Path | None  # of the run, where the first pod creates its directory
    code: Path | None  # packed code of a command, likewise
    drafted_at: str  # the run directory's path in those files
    first: str  # host name of the first pod
    metrics_port: int
    give_up_seconds: float | None
    stop_after_seconds: float | None
    host: str = ""  # the cluster node that it runs on
    places: Path | None = None  # file with the topology of the cluster's nodes
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, run: RunDirectory, environment: Mapping[str, str]) -> Pod:
        index = next((environment[name] for name in INDEX_VARIABLES if environment.get(name, "").isdecimal()), None)
        if index is None:
            raise RunError(
                f"none of {', '.join(INDEX_VARIABLES)} gives this pod's index; `craton run --on kubernetes` starts "
                "pods that have one"
            )
        files, seconds = environment.get("CRATON_RUN_FILES"), environment.get("CRATON_STOP_AFTER")
        give_up, code = environment.get("CRATON_GIVE_UP_SECONDS"), environment.get("CRATON_RUN_CODE")
        return cls(
            run=run,
            index=int(index),
            submission=environment.get("CRATON_SUBMISSION", ""),
            files=Path(files) if files else None,
            code=Path(code) if code else None,
            drafted_at=environment.get("CRATON_DRAFTED_AT", ""),
            first=environment.get("CRATON_FIRST_POD", "127.0.0.1"),
            metrics_port=int(environment.get("CRATON_METRICS_PORT", "0")),
            give_up_seconds=float(give_up) if give_up else None,
            stop_after_seconds=float(seconds) if seconds else None,
            host=environment.get("CRATON_HOST_NAME", ""),
            places=Path(environment["CRATON_RUN_NODES"]) if environment.get("CRATON_RUN_NODES") else None,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m craton.orchestration.kubernetes.pod")
    parser.add_argument("run", metavar="RUN", help="the run directory")
    options = parser.parse_args(arguments)
    signals = Signals()
    try:
        if folder := os.environ.get("CRATON_SECRETS"):
            os.environ.update(read_secrets(Path(folder)))
        pod = Pod.of(RunDirectory(options.run), os.environ)
        code = prepare(pod, signals) if pod.index == 0 else follow(pod, signals)
        while code is None and not is_healthy(pod):
            code = stand_aside(pod, signals)
    except (RunError, LaunchError) as error:
        say(str(error))
        return EXIT_FATAL
    except OSError as error:
        say(f"{options.run} cannot be prepared: {error}")
        return EXIT_FAILED
    if code == EXIT_FATAL:  # logged by every pod: the first one may be gone, with its log
        say(f"the run has failed: {pod.run.marker_text('FATAL')}")
    return supervise(pod, signals) if code is None else code


def read_secrets(folder: Path) -> dict[str, str]:
    """Return variable → value, for the ranks. Error messages never contain values."""
    values = {name: (folder / name).read_bytes() for name in config_files(folder)}
    wrong = [name for name, value in values.items() if b"\0" in value]
    if wrong:
        raise RunError(f"the secret {', '.join(wrong)} holds a zero byte, invalid in a variable; store it as text")
    return {name: os.fsdecode(value) for name, value in values.items()}


class Signals:
    """Record the kubelet's signal to end this pod, and forward it to the agent."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.agent: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if self.agent is not None and self.agent.poll() is None:
            self.agent.send_signal(number)


def prepare(pod: Pod, signals: Signals) -> int | None:
    """Prepare the run directory in the first pod. Return an exit code if there is nothing left to do."""
    run = pod.run
    if submission_of(run) != pod.submission:
        take_over(pod)
        return place(pod, signals)
    ended = verdict(run)
    if ended is None and call_of(run):  # its predecessor was killed during the call
        return place(pod, signals)
    if ended != EXIT_AGAIN:
        return ended
    launch = read_launch(run)
    waiting = PodWaiting()
    while living := [node for node in launch.nodes if _lives(run, node)]:
        if signals.received is not None:
            return EXIT_AGAIN
        waiting.say(f"waiting for the last generation to end on {', '.join(living)}")
        time.sleep(LOOK_SECONDS)
    write_launch(run, replace(launch, generation=max(next_number(run), launch.generation + 1)))
    write_pod_file(run, pod.submission, used_seconds(run), call=secrets.token_hex(8))
    run.unmark("STOP")
    return place(pod, signals)


def place(pod: Pod, signals: Signals) -> int | None:
    """Order the nodes by the topology of their pods, log the placement, and let the others start. Return an exit code
    if too few pods come."""
    run = pod.run
    launch, places = read_launch(run), read_places(pod.places)
    if len(launch.nodes) > 1 and pod.places is not None:
        names: list[str] = []
        if places.addresses:
            hosts = call_together(pod, signals, launch)
            if isinstance(hosts, int):
                return hosts
            launch = in_order(launch, hosts, places, layout_of(read_json(run.plan_path)))
            write_launch(run, launch)
            names = [f"rank order: {', '.join(f'{node} on {hosts[node]}' for node in launch.nodes if node in hosts)}"]
            names += sentences(run, launch, hosts, places)
        else:
            names = [f"nodes are in pod order, because their topology is unknown: {places.why}"]
        record_event(run, launch.generation, "placed", "; ".join(names))
        say("; ".join(names))
    write_pod_file(run, pod.submission, used_seconds(run))
    return None


def call_together(pod: Pod, signals: Signals, launch: Launch) -> dict[str, str] | int:
    """Return node of the run → node of the cluster, or the exit code of a run that cannot start."""
    run, call = pod.run, call_of(pod.run)
    answer(run, pod.index, call, pod.host)
    began, notice = time.monotonic(), PodWaiting()

    def goes_on(there: int, needed: int) -> bool:
        notice.say(f"{there} of {len(launch.nodes)} pods have started; the run needs {needed}")
        is_late = there < needed and time.monotonic() - began > launch.give_up_seconds
        return not is_late and signals.received is None and verdict(run) is None

    hosts = gather(run, launch, call, goes_on)
    if hosts is not None:
        return hosts
    if signals.received is not None:
        return EXIT_AGAIN
    if (ended := verdict(run)) is not None:
        return ended
    text = (
        f"too few of the {len(launch.nodes)} pods started within {setting(launch.give_up_seconds)} (recover.give_up); "
        f"`craton resume {run.name}` tries again, `craton ps` shows why a pod waits"
    )
    run.mark("FATAL", text)
    return EXIT_FATAL


def follow(pod: Pod, signals: Signals) -> int | None:
    """Wait in any other pod until the first has prepared the run, and answer its call with this pod's node."""
    waiting = PodWaiting()
    answered = ""
    while True:
        if submission_of(pod.run) == pod.submission:
            ended, call = verdict(pod.run), call_of(pod.run)
            if ended not in (None, EXIT_AGAIN) or (ended is None and not call):
                return ended
            if call and call != answered:
                answer(pod.run, pod.index, call, pod.host)
                answered = call
        if signals.received is not None:
            return EXIT_AGAIN
        waiting.say(f"waiting for the first pod, {pod.first}, to prepare {pod.run.path}")
        time.sleep(LOOK_SECONDS)


def take_over(pod: Pod) -> None:
    """Take over the run directory for a new submission: the first one of the run, or a resume."""
    run, files = pod.run, pod.files
    # The kubelet mounts a ConfigMap as links, which no one else can write.
    launch = parse_launch(RunDirectory(files), (files / "launch.json").read_bytes()) if files else read_launch(run)
    exists = run.looks_like_a_run()
    if files is not None and exists and launch.generation == 0:
        raise RunError(
            f"{run.path} is another run of this name; `craton resume {run.name}` resumes it, `craton run --name` "
            "starts one under another name"
        )
    if not exists:
        run = RunDirectory.create(run.path.parent, run.path.name)
    if files is not None:
        for name in config_files(files):
            if name != "launch.json":
                write_whole(run.path / name, (files / name).read_text(encoding="utf-8"))
    if pod.code is not None:
        unpack_code(pod.code, run.path)
    for marker in MARKERS:
        run.unmark(marker)
    run.resize_path.unlink(missing_ok=True)
    forget_avoided(run)
    disarm(run)
    write_launch(run, adapted(launch, run, pod))
    write_pod_file(run, pod.submission, call=secrets.token_hex(8))


def config_files(folder: Path) -> list[str]:
    """List the files of a mounted ConfigMap: links into a folder with a `..` prefix, which is swapped atomically."""
    files = []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [item for item in folders if not item.startswith("..")]
        files += [os.path.relpath(os.path.join(place, name), folder) for name in names if not name.startswith("..")]
    return sorted(files)


def adapted(launch: Launch, run: RunDirectory, pod: Pod) -> Launch:
    """Adapt a launch that was drafted elsewhere to this image's Python and this run directory."""

    def here(words: list[str]) -> list[str]:
        if len(words) < 4 or words[1] != "-m" or not words[2].startswith("craton."):
            return words  # a user's own command
        return [sys.executable, *words[1:3], str(run.path), *words[4:]]

    workdir = launch.workdir
    if pod.drafted_at and (workdir + "/").startswith(pod.drafted_at + "/"):
        workdir = str(run.path) + workdir.removeprefix(pod.drafted_at)
    return replace(
        launch,
        generation=max(launch.generation, next_number(run)),
        command=here(launch.command),
        nursery=here(launch.nursery),
        standby=here(launch.standby),
        members=here(launch.members),
        agent_command=[],  # Kubernetes restarts a dead agent
        workdir=workdir,
        master_address=pod.first,
        metrics_port=pod.metrics_port,
        cards={},
        give_up_seconds=launch.give_up_seconds if pod.give_up_seconds is None else pod.give_up_seconds,
    )


def supervise(pod: Pod, signals: Signals) -> int:
    """Run the agent until it ends, and return the pod's exit code."""
    run = pod.run
    launch = read_launch(run)
    if signals.received is not None:
        return EXIT_AGAIN
    node = node_of(launch, pod.index)
    assert node is not None, "pre-flight has checked it"
    command = [sys.executable, "-m", "craton.agent", str(run.path), "--node", str(launch.nodes.index(node))]
    if pod.host:  # also without a call, or after a move: healing needs the current node
        answer(run, pod.index, "", pod.host)
    limit = TimeLimit(run, pod.submission, pod.stop_after_seconds, since=pod.began, is_first=pod.index == 0)
    with LogCopier(run, node, sys.stdout), limit:
        signals.agent = subprocess.Popen(command)
        if signals.received is not None:  # between the check above and now
            signals.agent.send_signal(signals.received)
        code = signals.agent.wait()
        if verdict(run) is not None:
            wait_for_manager(run)
    return exit_code(run, launch, code, was_signalled=signals.received is not None)


def wait_for_manager(run: RunDirectory) -> None:
    """Wait until the member manager in this pod has stopped the members of a run that has ended."""
    waiting = PodWaiting()
    while (manager := living_manager(run)) is not None and manager.is_alive_here:
        waiting.say("waiting for the members of the run to end")
        with contextlib.suppress(ChildProcessError):  # a container's first process inherits what its agent left
            os.waitpid(-1, os.WNOHANG)
        time.sleep(LOOK_SECONDS)


def exit_code(run: RunDirectory, launch: Launch, agent_code: int, was_signalled: bool) -> int:
    """Return the exit code of a pod whose agent, started with this launch, has ended."""
    ended = verdict(run)
    if ended is not None:
        return ended
    if was_signalled:  # so early that the agent could not stop the run cleanly
        return EXIT_AGAIN
    if read_launch(run).generation != launch.generation:
        return EXIT_AGAIN  # the others have already resumed, and removed the marker by which this pod ended
    return EXIT_DONE if agent_code == 0 else EXIT_FAILED


def verdict(run: RunDirectory) -> int | None:
    """Return the exit code by the run's markers; None if the run continues."""
    if run.has("DONE"):
        return EXIT_DONE
    if run.has("FATAL"):
        return EXIT_FATAL
    if run.has("STOP"):
        return EXIT_AGAIN if is_schedulers(run.marker_text("STOP")) else EXIT_DONE
    return None


def is_schedulers(stop: str) -> bool:
    """Whether a stop came only from the kubelet's signals to agents."""
    lines = [line for line in stop.splitlines() if line.strip()]
    return bool(lines) and all(line.startswith("SIG") and " to the agent of " in line for line in lines)


def is_healthy(pod: Pod) -> bool:
    """Run pre-flight: a node that fails it is left out before it costs the gang a step."""
    launch = read_launch(pod.run)
    host = pod.host or f"pod {pod.index}"
    node = node_of(launch, pod.index)
    if node is None:
        raise RunError(f"pod {pod.index} is beyond the {len(launch.nodes)} nodes of the run")
    bad = [item for item in preflight(pod.run, launch, node) if item.severity == "fail"]
    for finding in bad:
        say(f"pre-flight: {host} is not fit for this run: {finding.what}: {finding.evidence}; {finding.remedy}")
    if not bad:
        unfit_path(pod).unlink(missing_ok=True)
    return not bad


def stand_aside(pod: Pod, signals: Signals) -> int | None:
    """Keep a pod on an unfit node idle, without an agent, if the run has a spare or is elastic: its owner may put a new
    pod on the same node, and fails the whole run for a pod that keeps failing. Return its exit code, or None to check
    the node again."""
    run, launch = pod.run, read_launch(pod.run)
    write_whole(unfit_path(pod), f"{pod.host}\n")
    waiting, until = PodWaiting(), time.monotonic() + UNFIT_SECONDS
    while time.monotonic() < until:
        if (ended := verdict(run)) is not None:
            return ended
        if signals.received is not None or read_launch(run).generation != launch.generation:
            return EXIT_AGAIN
        if pod.index not in spared_pods(run, launch):
            return EXIT_FAILED
        waiting.say("idle as an unused spare, because its node failed pre-flight")
        time.sleep(ASIDE_LOOK_SECONDS)
    return None


def spared_pods(run: RunDirectory, launch: Launch) -> list[int]:
    """Return the indices of the first unfit pods, as many as the run can do without."""
    unfit = sorted(int(path.name) for path in (run.path / UNFIT_FOLDER).glob("[0-9]*"))
    spares = len(launch.nodes) - (launch.min_nodes or launch.working_nodes)
    return [index for index in unfit if index < len(launch.nodes)][:spares]


def unfit_path(pod: Pod) -> Path:
    return pod.run.path / UNFIT_FOLDER / str(pod.index)


class PodWaiting:
    """Log now and then why the pod waits."""

    def __init__(self) -> None:
        self._next = time.monotonic() + 2 * LOOK_SECONDS

    def say(self, text: str) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + SAY_SECONDS
            say(text)


def say(text: str) -> None:
    print(f"craton pod: {text}", file=sys.stderr, flush=True)


def _lives(run: RunDirectory, node: str) -> bool:
    beat = read_heartbeat(run, node)
    return beat is not None and beat.state in ("running", "spare") and not beat.is_lost()


if __name__ == "__main__":
    sys.exit(main())
