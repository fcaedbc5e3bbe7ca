"""`python -m craton.orchestration.slurm.batch RUN`: the whole batch script of a run, on the first node it was given.

It says which host is which node, starts an agent on each (`srun`), and decides at the end whether Slurm is to start the
job again. What the run's own markers say counts, not exit codes:

- DONE: exit 0. FATAL: exit 1, and never again. STOP by a user: exit 0.
- SIGUSR1 (the time limit is near, or a preemption that warns): the ranks save and leave, then the job is requeued.
- Nodes are lost and the agents cannot go on with those that are left: requeued without them, by Slurm once it has
  seen it too, else by us.
- Everything else that ends the agents: requeued. All of that at most `run.restarts` times.
- SIGTERM: Slurm ends the job itself (scancel, preemption, its limit), and decides itself what comes after.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, TypeVar

from craton.agent import Launch, next_number, read_launch, write_launch
from craton.infrastructure import expand_hosts, resolve_cluster
from craton.job import CratonError, Job, Layout, load_job
from craton.orchestration.errors import SchedulerError
from craton.orchestration.placement import Audit, audit
from craton.orchestration.slurm.allocation import Allocation, allocate, write_allocation
from craton.orchestration.slurm.checks import failed_hosts
from craton.orchestration.slurm.script import signal_seconds
from craton.orchestration.slurm.step import HYPERPOD, Step, agents_command
from craton.orchestration.slurm.tools import ask, read_jobs, read_nodes, read_switches
from craton.orchestration.state import stopped_by_user
from craton.telemetry import LOST_SECONDS, LineWriter, RunDirectory, read_heartbeat, read_json

LEAVE = "leaving for Slurm:"
LOOK_SECONDS = 0.5
FIRST_SECONDS = 180.0  # from the start of the step to the first sign of life of a node
LEAVE_SECONDS = 5.0  # from an agent's last word to the end of its process
SPARED_SECONDS = 20.0  # before the time limit, by which the job must be requeued, saved or not
SLURM_SEES_SECONDS = 330.0  # Slurm gives a node five minutes by default (SlurmdTimeout)
SLURM_ENDS_SECONDS = 10.0  # from seeing that a node is down to ending its jobs
REQUEUE_SECONDS = 120.0  # from being requeued to being ended by Slurm
CONTROLLER_SECONDS, AGAIN_SECONDS = 300.0, 5.0  # that an answer of the controller is waited for; between two tries
MOST_EXCLUDED = 32  # hosts that a job avoids; more is a cluster's trouble, not a node's
Answer = TypeVar("Answer")
EXIT_DONE, EXIT_FAILED, EXIT_WRONG = 0, 1, 2


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m craton.orchestration.slurm.batch RUN", file=sys.stderr)
        return EXIT_WRONG
    run = RunDirectory(arguments[0])
    try:
        return Batch(run, os.environ).run()
    except SchedulerError as error:  # the run itself is well, and `craton resume` goes on with it
        print(f"craton: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    except (CratonError, OSError) as error:
        print(f"craton: {error}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            run.mark("FATAL", f"the batch script of Slurm could not start the run: {error}")
        return EXIT_FAILED


class Batch:
    """One start of a job, from its allocation to its end."""

    def __init__(self, run: RunDirectory, environment: Mapping[str, str]) -> None:
        self._run, self._environment = run, environment
        array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
        self._job_id = f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"]
        self._restarts = int(environment.get("SLURM_RESTART_COUNT") or 0)
        self._events = LineWriter(run.events_path("slurm"))
        self._generation = 0
        self._leave_by = float("inf")  # monotonic: when it must be requeued, since SIGUSR1 came
        self._is_ended = False  # Slurm has sent SIGTERM
        self._job: Job = load_job(run.job_path)

    def run(self) -> int:
        signal.signal(signal.SIGUSR1, self._on_warning)
        signal.signal(signal.SIGTERM, self._on_end)
        verdict = self._verdict_before()
        if verdict is not None:
            return verdict
        launch = read_launch(self._run)
        allocation = self._allocate(launch)
        bad = self._unfit(launch, allocation)
        if bad and not self._is_ended:
            for host, why in bad.items():
                self._tell("preflight_failed", f"{host}: {why}")
            return self._again(f"pre-flight failed on {', '.join(bad)}", exclude=list(bad))
        self._begin(launch, allocation)
        lost = self._watch(launch, allocation)
        return self._verdict_after(lost)

    # -- before ---------------------------------------------------------------------------------------------------

    def _verdict_before(self) -> int | None:
        """What is over already; None: it goes on."""
        if (verdict := self._said()) is not None:
            return verdict
        if self._restarts > self._job.run.restarts:  # by Slurm itself, after lost nodes
            return self._give_up("its nodes were lost")
        return None

    def _allocate(self, launch: Launch) -> Allocation:
        hosts = expand_hosts(self._environment["SLURM_JOB_NODELIST"])
        return allocate(
            self._job_id,
            self._restarts,
            launch.nodes,
            hosts,
            patiently(lambda: read_nodes(self._environment["SLURM_JOB_NODELIST"])),
            patiently(read_switches),
            layout_of(read_json(self._run.plan_path)),
            launch.ranks_per_node,
        )

    def _unfit(self, launch: Launch, allocation: Allocation) -> dict[str, str]:
        """Host → why its pre-flight failed. Nodes without GPUs of which nothing is written have nothing to fail."""
        cluster = self._job.cluster
        if cluster.is_local and not launch.gpus:
            return {}
        known = "" if cluster.is_local or (cluster.file and cluster.file.hardware) else cluster.instance
        return failed_hosts(self._step(launch), allocation.hosts, self._run, known)

    def _begin(self, launch: Launch, allocation: Allocation) -> None:
        """Who is who, and the number of the generation that the agents begin with."""
        again = max(next_number(self._run), launch.generation + 1)
        self._generation = again if self._restarts else launch.generation
        write_allocation(self._run, allocation)
        write_launch(
            self._run,
            replace(
                launch,
                generation=self._generation,
                master_address=allocation.nodes[0].address,
                leaves=allocation.leaves,
                # Longer than until this job leaves: a save that is not done by then is broken off, and not a failure.
                stop_grace_seconds=max(launch.stop_grace_seconds, signal_seconds(self._job)),
            ),
        )
        self._run.unmark("STOP")  # not before: without it what the last start left would look like a run that is done
        hosts = ", ".join(f"{node.name} is {node.host}" for node in allocation.nodes)
        self._tell("allocated", f"job {self._job_id}, start {self._restarts + 1}: {hosts}")
        self._tell("placed", "; ".join(self._audit(launch, allocation).sentences()))

    def _audit(self, launch: Launch, allocation: Allocation) -> Audit:
        """The placement that was asked for beside the one that was got."""
        job, layout = self._job, layout_of(read_json(self._run.plan_path))
        working = allocation.nodes[: launch.working_nodes]
        return audit(
            {node.host: node.path for node in working},
            job.placement,
            layout,
            launch.ranks_per_node,
            job=job,
            cluster=None if job.cluster.is_local or layout is None else resolve_cluster(job.cluster, job.price),
        )

    def _step(self, launch: Launch) -> Step:
        job = self._job
        file = job.cluster.file
        places = [place for place in (file.storage.nvme, file.storage.shared) if place] if file else []
        scheduler = file.scheduler if file else None
        gpus = launch.gpus_per_node or launch.ranks_per_node
        return Step(
            run=self._run.path,
            python=sys.executable,
            image=job.run.image or (scheduler.image if scheduler else None) or "",
            mounts=tuple(place.path for place in places if place.path),
            gpus=launch.gpus,
            cpus_per_task=0 if job.run.exclusive else gpus * launch.threads_per_rank,
            auto_resume=HYPERPOD.exists(),
        )

    # -- while it runs --------------------------------------------------------------------------------------------

    def _watch(self, launch: Launch, allocation: Allocation) -> list[str]:
        """Until the agents have ended. Hosts that were lost, when it was ended because the others cannot go on."""
        life = SignsOfLife(self._run, launch, self._generation)
        step = subprocess.Popen(agents_command(self._step(launch), allocation.hosts), stdin=subprocess.DEVNULL)
        hosts = {node.name: node.host for node in allocation.nodes}
        while step.poll() is None:
            time.sleep(LOOK_SECONDS)
            now = time.monotonic()
            if now > self._leave_by:
                self._tell("leaves", "the time to save is over")
                _end(step)
            if self._is_ended or self._run.has("STOP") or self._run.has("DONE") or self._run.has("FATAL"):
                if life.is_over(now):  # srun would wait for ever for a node that is gone
                    _end(step)
                continue
            lost = life.lost(now)
            if lost and len(launch.nodes) - len(lost) < (launch.min_nodes or launch.working_nodes):
                self._tell("nodes_lost", f"{', '.join(f'{node} ({hosts[node]})' for node in lost)}: too few are left")
                _end(step)
                return [hosts[node] for node in lost]
        return []

    def _on_warning(self, number: int, frame: FrameType | None) -> None:
        """The agents learn it from the marker, and so do those of other nodes."""
        if self._leave_by == float("inf"):
            self._leave_by = time.monotonic() + max(1.0, signal_seconds(self._job) - SPARED_SECONDS)
            with contextlib.suppress(OSError):
                self._run.mark("STOP", f"{LEAVE} the time limit is near, or another job takes the nodes")

    def _on_end(self, number: int, frame: FrameType | None) -> None:
        self._is_ended = True

    # -- after ----------------------------------------------------------------------------------------------------

    def _verdict_after(self, lost: list[str]) -> int:
        if (verdict := self._said()) is not None:
            return verdict
        if self._is_ended:
            return EXIT_FAILED
        if self._run.has("STOP") and self._leave_by == float("inf") and _asked_by_itself(self._run):
            return EXIT_DONE
        why = f"{', '.join(lost)} lost" if lost else "saved and left" if self._run.has("STOP") else "the agents ended"
        if lost and self._slurm_requeues(lost):
            return EXIT_FAILED
        return self._again(why, exclude=lost)

    def _slurm_requeues(self, lost: Sequence[str]) -> bool:
        """Waits for Slurm to see for itself that nodes are gone, and whether it then ends and requeues this job.

        A job that is requeued before cannot start sooner, for Slurm still waits for the word of the lost nodes; and
        with 22.05 its GPUs are lost to it, when that wait ends after the job was given others.
        """
        deadline = time.monotonic() + SLURM_SEES_SECONDS
        while not self._is_ended and time.monotonic() < deadline:
            with contextlib.suppress(SchedulerError):
                if all("DOWN" in node.states for node in read_nodes(",".join(lost))):
                    deadline = min(deadline, time.monotonic() + SLURM_ENDS_SECONDS)
            time.sleep(LOOK_SECONDS)
        return self._is_ended

    def _said(self) -> int | None:
        """What the run's own markers say; None: nothing that ends the job."""
        if self._run.has("DONE"):
            return EXIT_DONE
        if self._run.has("FATAL"):
            return EXIT_FAILED
        return EXIT_DONE if stopped_by_user(self._run) else None

    def _again(self, why: str, exclude: Sequence[str] = ()) -> int:
        """Asks Slurm to start the job again, and waits for the end that this means for this process."""
        if self._restarts >= self._job.run.restarts:
            return self._give_up(why)
        self._tell("requeued", why)
        # From here on Slurm ends everything of this job; what is still to be done must outlive its SIGTERM.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        patiently(lambda: ask("scontrol", "requeue", self._job_id))
        if exclude:
            self._exclude(exclude)
        time.sleep(REQUEUE_SECONDS)
        return EXIT_FAILED

    def _give_up(self, why: str) -> int:
        """A run that saved and left is stopped; any other has failed."""
        text = (
            f"{why}, and Slurm has started the job again {self._restarts} times already (run.restarts); "
            f"`craton resume {self._run.name}` goes on"
        )
        self._tell("not_requeued", text)
        if not self._run.has("STOP"):
            self._run.mark("FATAL", text)
        return EXIT_FAILED

    def _exclude(self, hosts: Sequence[str]) -> None:
        """Not on these hosts again; only a pending job can be told so."""
        known = expand_hosts(_excluded(self._job_id))
        avoided = list(dict.fromkeys([*known, *hosts]))[-MOST_EXCLUDED:]
        try:
            ask("scontrol", "update", f"JobId={self._job_id}", f"ExcNodeList={','.join(avoided)}")
        except SchedulerError as error:
            self._tell("not_excluded", f"{', '.join(hosts)} cannot be avoided: {error}")

    def _tell(self, event: str, message: str) -> None:
        print(f"craton: {event.replace('_', ' ')}: {message}", flush=True)
        line = {
            "time": time.time(),
            "step": 0,
            "generation": self._generation,
            "node": "slurm",
            "rank": None,
            "event": event,
            "message": message,
        }
        self._events.append([json.dumps(line).encode()])


class SignsOfLife:
    """Which nodes of this start have fallen silent, by this machine's own clock."""

    def __init__(self, run: RunDirectory, launch: Launch, generation: int) -> None:
        self._run, self._nodes, self._generation = run, list(launch.nodes), generation
        self._began = time.monotonic()
        self._over_since: float | None = None
        self._seen: dict[str, tuple[float, float]] = {}  # node → its last heartbeat, and when it was new here

    def lost(self, now: float) -> list[str]:
        return [node for node in self._nodes if self._is_lost(node, now)]

    def is_over(self, now: float) -> bool:
        """Whether no agent is at work any more, and has not been for a while."""
        beats = [read_heartbeat(self._run, node) for node in self._nodes]
        lost = self.lost(now)
        at_work = [
            node
            for node, beat in zip(self._nodes, beats, strict=True)
            if beat and beat.generation == self._generation and beat.state in ("running", "spare") and node not in lost
        ]
        if at_work:
            self._over_since = None
        elif self._over_since is None:
            self._over_since = now
        return self._over_since is not None and now - self._over_since > LEAVE_SECONDS

    def _is_lost(self, node: str, now: float) -> bool:
        beat = read_heartbeat(self._run, node)
        if beat is None or beat.generation != self._generation:
            return now - self._began > FIRST_SECONDS
        if beat.state not in ("running", "spare"):
            return False
        moment, since = self._seen.get(node, (0.0, now))
        if beat.moment != moment:
            self._seen[node] = (beat.moment, now)
            since = now
        return now - since > LOST_SECONDS


def patiently(question: Callable[[], Answer], seconds: float = CONTROLLER_SECONDS) -> Answer:
    """Asks Slurm again while its controller does not answer, as when another takes its place."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return question()
        except SchedulerError as error:
            if time.monotonic() > deadline:
                raise
            print(f"craton: {error}; asking again", file=sys.stderr, flush=True)
            time.sleep(AGAIN_SECONDS)


def layout_of(plan: Mapping[str, Any]) -> Layout | None:
    """The layout in plan.json, by which nodes are put in order."""
    try:
        return Layout(**plan["layout"])
    except (KeyError, TypeError, ValueError):
        return None


def _asked_by_itself(run: RunDirectory) -> bool:
    """Whether the job was to stop where it did (`--stop-at`), as rank 0 wrote."""
    return "as asked" in run.marker_text("STOP")


def _excluded(job_id: str) -> str:
    with contextlib.suppress(SchedulerError):
        return next((job.excluded for job in read_jobs([job_id])), "")
    return ""


def _end(step: subprocess.Popen[bytes]) -> None:
    """Ends a step whose nodes may be gone: srun is told twice, for at the first time it only asks."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            step.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            step.wait(0.5)
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
