"""`python -m craton.orchestration.kubernetes.pod RUN`: what runs in a pod, one for every node of a run.

The first pod makes the run directory, or takes it over for a new submission; the others wait for it. Then each starts
the agent of its node, passes on what the kubelet signals, copies what the ranks print to its own output (so that
`kubectl logs` shows it) and turns the run's markers into an exit code that the owner of the pods understands.

A stop that the scheduler wanted (a node drained, the job preempted) is not the user's: the ranks checkpoint and leave
alike, but the pods come back, and the first of them starts the next generation when all have left the last one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from craton.agent import Launch, LaunchError, next_number, read_launch, write_launch
from craton.orchestration.chaos import disarm
from craton.orchestration.kubernetes.codepack import unpack_code
from craton.orchestration.kubernetes.exits import EXIT_AGAIN, EXIT_DONE, EXIT_FAILED, EXIT_FATAL
from craton.orchestration.kubernetes.podfile import TimeLimit, submission_of, write_pod_file, write_whole
from craton.orchestration.kubernetes.podlogs import LogCopier
from craton.orchestration.preflight import preflight
from craton.telemetry import MARKERS, RunDirectory, RunError, read_heartbeat

INDEX_VARIABLES = ("JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "LWS_WORKER_INDEX")
LOOK_SECONDS = 0.2
SAY_SECONDS = 60.0  # between two lines about the same waiting


@dataclass(frozen=True)
class Pod:
    """What a pod was told."""

    run: RunDirectory
    index: int
    submission: str
    files: Path | None  # the run's, where the first pod makes its directory
    code: Path | None  # a command's, packed, likewise
    drafted_at: str  # what those files call the run directory
    first: str  # host name of the first pod
    metrics_port: int
    give_up_seconds: float | None
    stop_after_seconds: float | None

    @classmethod
    def of(cls, run: RunDirectory, environment: Mapping[str, str]) -> Pod:
        index = next((environment[name] for name in INDEX_VARIABLES if environment.get(name, "").isdecimal()), None)
        if index is None:
            raise RunError(
                f"none of {', '.join(INDEX_VARIABLES)} says which pod this is; `craton run --on kubernetes` starts "
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
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m craton.orchestration.kubernetes.pod")
    parser.add_argument("run", metavar="RUN", help="the run directory")
    given = parser.parse_args(arguments)
    signals = Signals()
    try:
        pod = Pod.of(RunDirectory(given.run), os.environ)
        code = prepare(pod, signals) if pod.index == 0 else follow(pod, signals)
        if code is None and not is_healthy(pod):
            code = EXIT_FAILED
    except (RunError, LaunchError) as error:
        say(str(error))
        return EXIT_FATAL
    except OSError as error:
        say(f"{given.run} cannot be prepared: {error}")
        return EXIT_FAILED
    return supervise(pod, signals) if code is None else code


class Signals:
    """Remembers that the kubelet wants this pod to end, and tells the agent."""

    def __init__(self) -> None:
        self.told: signal.Signals | None = None
        self.agent: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.told = signal.Signals(number)
        if self.agent is not None and self.agent.poll() is None:
            self.agent.send_signal(number)


def prepare(pod: Pod, signals: Signals) -> int | None:
    """The first pod: makes the run directory what this submission needs. An exit code where nothing is left to do."""
    run = pod.run
    if submission_of(run) != pod.submission:
        take_over(pod)
        return None
    ended = verdict(run)
    if ended != EXIT_AGAIN:
        return ended
    launch = read_launch(run)
    waiting = Waiting()
    while living := [node for node in launch.nodes if _lives(run, node)]:
        if signals.told is not None:
            return EXIT_AGAIN
        waiting.say(f"waiting until the last generation has ended on {', '.join(living)}")
        time.sleep(LOOK_SECONDS)
    write_launch(run, replace(launch, generation=max(next_number(run), launch.generation + 1)))
    run.unmark("STOP")
    return None


def follow(pod: Pod, signals: Signals) -> int | None:
    """Any other pod: waits until the first has done that."""
    waiting = Waiting()
    while True:
        if submission_of(pod.run) == pod.submission:
            ended = verdict(pod.run)
            if ended != EXIT_AGAIN:
                return ended
        if signals.told is not None:
            return EXIT_AGAIN
        waiting.say(f"waiting for the first pod, {pod.first}, to prepare {pod.run.path}")
        time.sleep(LOOK_SECONDS)


def take_over(pod: Pod) -> None:
    """A submission that this run directory has not seen: the first of the run, or a resume."""
    run, files = pod.run, pod.files
    source = RunDirectory(files) if files else run
    launch = read_launch(source)
    exists = run.looks_like_a_run()
    if files is not None and exists and launch.generation == 0:
        raise RunError(
            f"{run.path} is another run of this name; `craton resume {run.name}` goes on with it, `craton run --name` "
            "starts one of another name"
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
    disarm(run)
    write_launch(run, adapted(launch, run, pod))
    write_pod_file(run, pod.submission)


def config_files(folder: Path) -> list[str]:
    """The files of a mounted ConfigMap. They are links into a folder of two dots, which is exchanged as a whole."""
    found = []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [each for each in folders if not each.startswith("..")]
        found += [os.path.relpath(os.path.join(place, name), folder) for name in names if not name.startswith("..")]
    return sorted(found)


def adapted(launch: Launch, run: RunDirectory, pod: Pod) -> Launch:
    """A launch as it was drafted elsewhere, for this image's Python and this run directory."""

    def here(words: list[str]) -> list[str]:
        if len(words) != 4 or words[1] != "-m" or not words[2].startswith("craton."):
            return words  # a user's own command
        return [sys.executable, *words[1:3], str(run.path)]

    workdir = launch.workdir
    if pod.drafted_at and (workdir + "/").startswith(pod.drafted_at + "/"):
        workdir = str(run.path) + workdir.removeprefix(pod.drafted_at)
    return replace(
        launch,
        generation=max(launch.generation, next_number(run)),
        command=here(launch.command),
        nursery=here(launch.nursery),
        agent_command=[],  # Kubernetes starts a dead one again
        workdir=workdir,
        master_address=pod.first,
        metrics_port=pod.metrics_port,
        cards={},
        give_up_seconds=launch.give_up_seconds if pod.give_up_seconds is None else pod.give_up_seconds,
    )


def supervise(pod: Pod, signals: Signals) -> int:
    """Runs the agent to its end."""
    run = pod.run
    launch = read_launch(run)
    if signals.told is not None:
        return EXIT_AGAIN
    command = [sys.executable, "-m", "craton.agent", str(run.path), "--node", str(pod.index)]
    limit = TimeLimit(run, pod.submission, pod.stop_after_seconds) if pod.index == 0 else contextlib.nullcontext()
    with LogCopier(run, launch.nodes[pod.index], sys.stdout), limit:
        signals.agent = subprocess.Popen(command)
        if signals.told is not None:  # between the look above and now
            signals.agent.send_signal(signals.told)
        code = signals.agent.wait()
    return exit_code(run, launch, code, was_told=signals.told is not None)


def exit_code(run: RunDirectory, launch: Launch, agent_code: int, was_told: bool) -> int:
    """Of a pod whose agent has ended, which began with this launch."""
    ended = verdict(run)
    if ended is not None:
        return ended
    if was_told:  # so early that the agent had no time to stop the run in order
        return EXIT_AGAIN
    if read_launch(run).generation != launch.generation:
        return EXIT_AGAIN  # the others have gone on already, and with them went the marker by which this one ended
    return EXIT_DONE if agent_code == 0 else EXIT_FAILED


def verdict(run: RunDirectory) -> int | None:
    """What the markers of a run say; None: it goes on."""
    if run.has("DONE"):
        return EXIT_DONE
    if run.has("FATAL"):
        return EXIT_FATAL
    if run.has("STOP"):
        return EXIT_AGAIN if is_schedulers(run.marker_text("STOP")) else EXIT_DONE
    return None


def is_schedulers(stop: str) -> bool:
    """Whether a stop came from a signal to an agent, as the kubelet sends it, and from nobody else."""
    lines = [line for line in stop.splitlines() if line.strip()]
    return bool(lines) and all(line.startswith("SIG") and " to the agent of " in line for line in lines)


def is_healthy(pod: Pod) -> bool:
    """Pre-flight: a node that fails it is left before it costs the gang a step."""
    launch = read_launch(pod.run)
    host = os.environ.get("CRATON_HOST_NAME") or f"pod {pod.index}"
    if pod.index >= len(launch.nodes):
        raise RunError(f"pod {pod.index} has no place among the {len(launch.nodes)} nodes of the run")
    bad = [each for each in preflight(pod.run, launch, launch.nodes[pod.index]) if each.severity == "fail"]
    for finding in bad:
        say(f"pre-flight: {host} is not fit for this run: {finding.what}: {finding.evidence}; {finding.remedy}")
    return not bad


class Waiting:
    """Says now and then what is waited for."""

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
