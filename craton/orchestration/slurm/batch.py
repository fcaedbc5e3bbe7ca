"""`python -m craton.orchestration.slurm.batch RUN NONCE`: the batch program of a run, on the first allocated node.

It assigns hosts to nodes, starts an agent on each (`srun`), and decides at the end whether Slurm requeues the job. The
run's markers decide, not exit codes:

- DONE: exit 0. FATAL: exit 1, no requeue. STOP by a user: exit 0.
- SIGUSR1 (the time limit is near, or a preemption with a warning): the ranks save and exit, then the job is requeued.
- Lost nodes, too few left to continue: requeued without them, by Slurm once it notices them too, else by this program.
- No node sends a heartbeat, for example because an image cannot be pulled: requeued, without excluding nodes.
- Any other end of the agents: requeued. `run.restarts` limits starts that failed or made no progress; starts that
  Slurm ended and that report no steps are not counted (starts.py). After the last one the marker first says why the run
  is not requeued.
- Pre-flight fails: requeued without the unfit nodes. A software failure that every node reports is the job's own, and
  fails the run.
- SIGTERM: Slurm ends the job itself (scancel, preemption, time limit), and decides whether to requeue it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import FrameType

from craton.agent import Launch, LaunchError, next_number, read_launch, write_launch
from craton.agent.coordination import forget_avoided
from craton.errors import CratonError
from craton.formatting import setting
from craton.infrastructure import resolve_cluster
from craton.infrastructure.topology import expand as expand_hosts
from craton.job import Job, load_job
from craton.orchestration.errors import SchedulerError
from craton.orchestration.placement import Audit, audit, layout_of
from craton.orchestration.run_files import SCHEDULER_STOP, stopped_by_user, write_whole
from craton.orchestration.slurm.allocation import Allocation, allocate, job_number, write_allocation
from craton.orchestration.slurm.checks import failed_hosts, gang_in_words, software_failure
from craton.orchestration.slurm.handover import claim
from craton.orchestration.slurm.life import SignsOfLife, first_seconds, give_up_seconds
from craton.orchestration.slurm.manager_process import ManagerOfBatch
from craton.orchestration.slurm.mounts import image_of
from craton.orchestration.slurm.records import job_of
from craton.orchestration.slurm.script import signal_seconds
from craton.orchestration.slurm.starts import may_start_again, next_start, read_starts, write_starts
from craton.orchestration.slurm.step import agents_command, complaint_of, end_step, slurm_step
from craton.orchestration.slurm.tools import ask, patiently, read_jobs, read_nodes, read_switches
from craton.telemetry import MARKERS, RunDirectory, read_json, summarize
from craton.telemetry.files import LineWriter, read_regular
from craton.telemetry.members import member_runs, read_members

LOOK_SECONDS = 0.5
SPARED_SECONDS = 20.0  # before the time limit: the job must be requeued by then, saved or not
SLURM_SEES_SECONDS = 330.0  # Slurm marks a node down after five minutes by default (SlurmdTimeout)
SLURM_ENDS_SECONDS = 10.0  # from marking a node down to ending its jobs
REQUEUE_SECONDS = 120.0  # from the requeue to the end of this process by Slurm
MEMBERS_SECONDS = 600.0  # for the last checkpoints of members, one after the other
MAX_EXCLUDED = 32  # hosts that a job excludes; more is a problem of the cluster, not of nodes
EXIT_DONE, EXIT_FAILED, EXIT_WRONG = 0, 1, 2


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m craton.orchestration.slurm.batch RUN NONCE", file=sys.stderr)
        return EXIT_WRONG
    run, nonce = RunDirectory(arguments[0]), arguments[1]
    if stale := claim(run, job_number(os.environ), nonce):
        print(f"craton: {stale}", file=sys.stderr, flush=True)
        return EXIT_WRONG
    try:
        return SlurmBatch(run, nonce, os.environ).run()
    except SchedulerError as error:  # the run itself is fine, and `craton resume` resumes it
        print(f"craton: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    except (CratonError, OSError) as error:
        print(f"craton: {error}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            run.mark("FATAL", f"the Slurm batch program could not start the run: {error}")
        return EXIT_FAILED


class SlurmBatch:
    """One start of a job, from allocation to end."""

    def __init__(self, run: RunDirectory, nonce: str, environment: Mapping[str, str]) -> None:
        self._run, self._environment = run, environment
        self._job_id = job_number(environment)
        self._starts = next_start(read_starts(run), nonce, _progress(run))
        self._restarts = int(environment.get("SLURM_RESTART_COUNT") or 0)
        self._events = LineWriter(run.events_path("slurm"))
        self._generation = 0
        self._leave_by = float("inf")  # monotonic: deadline for the requeue after SIGUSR1
        self._is_ended = False  # Slurm has sent SIGTERM
        self._has_begun = self._is_excused = False  # the agents were started; whether this start counts is decided
        self._why_ended = "the agents ended"
        # Text of the previous start's STOP; anything beyond it was added since.
        self._left_over = run.marker_text("STOP") if run.has("STOP") else None
        self._job: Job = load_job(run.job_path)

    def run(self) -> int:
        signal.signal(signal.SIGUSR1, self._on_warning)
        signal.signal(signal.SIGTERM, self._on_end)
        verdict = self._verdict_before()
        if verdict is not None:
            return verdict
        write_starts(self._run, self._starts)
        launch = read_launch(self._run)
        allocation = self._allocate(launch)
        verdict = self._verdict_checked(self._unfit(launch, allocation))
        if verdict is not None:
            return verdict
        self._begin(launch, allocation)
        members = ManagerOfBatch(self._run, launch.members)
        try:
            lost = self._watch(launch, allocation, members)
            self._wait_for_members(members)
        finally:
            members.end()
        return self._verdict_after(lost)

    # -- before ---------------------------------------------------------------------------------------------------

    def _verdict_before(self) -> int | None:
        """Return the exit code if the run is already over; None to continue."""
        if (verdict := self._verdict_of_markers()) is not None:
            return verdict
        if self._starts.number > 1 and not may_start_again(self._starts.fruitless, self._job.run.restarts):
            # Slurm itself requeued it.
            why = "it stopped" if self._run.has("STOP") else "its nodes were lost"
            return self._give_up(why, self._starts.fruitless)
        return None

    def _verdict_checked(self, bad: Mapping[str, str]) -> int | None:
        """Return the exit code after pre-flight and signals during it; None to continue."""
        if (verdict := self._verdict_of_markers()) is not None:
            return verdict
        if self._is_asked:
            self._excuse()
        if self._is_ended:
            return EXIT_FAILED
        if bad and (why := software_failure(self._run)):
            return self._refuse(why)
        for host, why in bad.items():
            self._record("preflight_failed", f"{host}: {why}")
        if bad or self._is_asked:
            why = f"pre-flight failed on {', '.join(bad)}" if bad else "Slurm ended it before it started"
            return self._again(why, exclude=list(bad))
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
        """Return host → why its pre-flight failed. Local clusters without GPUs have nothing to check."""
        asked = self._job.run.preflight
        has_gpus = launch.gpus or any(member.gpus for member in read_members(self._run).members)
        if self._job.cluster.is_local and not has_gpus and asked != "compute":
            return {}
        compute = asked == "compute" or (asked == "auto" and has_gpus)
        step = slurm_step(self._job, self._run, launch)
        bad = failed_hosts(step, allocation.all_hosts, self._run, compute, job=self._job_id)
        if words := gang_in_words(self._run):
            self._record("preflight", words)
        return bad

    def _begin(self, launch: Launch, allocation: Allocation) -> None:
        """Write the allocation, and the launch with the generation that the agents start with."""
        again = max(next_number(self._run), launch.generation + 1)
        self._generation = again if self._restarts else launch.generation
        write_allocation(self._run, allocation)
        forget_avoided(self._run)
        write_launch(
            self._run,
            replace(
                launch,
                generation=self._generation,
                master_address=allocation.nodes[0].address,
                leaves=allocation.leaves,
                # Longer than until this job exits: a save that is not done by then is aborted, and not a failure.
                stop_grace_seconds=max(launch.stop_grace_seconds, signal_seconds(self._job)),
                give_up_seconds=give_up_seconds(launch, self._has_image(launch)),
            ),
        )
        self._forget_left_over()  # not earlier: until here the STOP marker keeps the run from looking done
        self._has_begun = True
        hosts = ", ".join(f"{node.name} is {node.host}" for node in allocation.nodes)
        if allocation.others:
            hosts += f"; for members: {', '.join(node.host for node in allocation.others)}"
        self._record("allocated", f"job {self._job_id}, start {self._restarts + 1}: {hosts}")
        self._record("placed", "; ".join(self._audit(launch, allocation).sentences()))

    def _forget_left_over(self) -> None:
        """Remove the STOP of the previous start; one that a user or Slurm has set since stays."""
        if self._left_over is None:
            return
        aside = self._run.path / ".STOP.before"
        os.replace(self._run.path / "STOP", aside)
        if since := read_regular(aside).decode(errors="replace").removeprefix(self._left_over):
            self._run.mark("STOP", since)
        aside.unlink()

    def _audit(self, launch: Launch, allocation: Allocation) -> Audit:
        """Compare the requested placement with the actual one."""
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

    # -- while it runs --------------------------------------------------------------------------------------------

    def _watch(self, launch: Launch, allocation: Allocation, members: ManagerOfBatch) -> list[str]:
        """Wait until the agents have ended, and keep the member manager alive. Return the lost hosts if too few others
        are left to continue; empty if no host ever sent a heartbeat, because then no host is to blame."""
        seconds = first_seconds(self._has_image(launch))
        life = SignsOfLife(self._run, launch, self._generation, seconds)
        begin = len(self._printed())
        step = subprocess.Popen(
            agents_command(slurm_step(self._job, self._run, launch), allocation.hosts), stdin=subprocess.DEVNULL
        )
        hosts = {node.name: node.host for node in allocation.nodes}
        while step.poll() is None:
            time.sleep(LOOK_SECONDS)
            now = time.monotonic()
            if self._is_ended:
                members.end()  # Slurm ends the steps of members too: none may come back
            elif trouble := members.tend():
                self._record("manager_ended", trouble)
            if self._is_asked:
                self._excuse()  # immediately: Slurm may end this process before the ranks have saved
            if now > self._leave_by:
                self._record("leaves", "the time to save is over")
                end_step(step)
            if self._is_ended or self._run.has("STOP") or self._run.has("DONE") or self._run.has("FATAL"):
                if life.is_over(now):  # srun would wait forever for a lost node
                    end_step(step)
                continue
            lost = life.lost(now)
            if lost and len(launch.nodes) - len(lost) < self._needed_nodes(launch):
                have_begun = self._have_begun(life, begin)
                names = ", ".join(f"{node} ({hosts[node]})" for node in lost)
                why = (
                    "too few nodes are left" if have_begun else f"no heartbeat from any node within {setting(seconds)}"
                )
                self._record("nodes_lost", f"{names}: {why}")
                end_step(step)
                return [hosts[node] for node in lost] if have_begun else []
        self._have_begun(life, begin)
        return []

    def _wait_for_members(self, members: ManagerOfBatch) -> None:
        """Wait until the manager has stopped the members of an ended run. A run without a marker is requeued: Slurm
        tells its members to save and exit."""
        if self._is_ended or not any(self._run.has(marker) for marker in MARKERS):
            return
        if not members.wait(min(self._leave_by, time.monotonic() + MEMBERS_SECONDS)):
            self._record("leaves", "the time for members to save is over")

    def _has_image(self, launch: Launch) -> bool:
        return bool(image_of(self._job, launch))

    def _have_begun(self, life: SignsOfLife, begin: int) -> bool:
        """Whether any agent sent a heartbeat. If none did, only the step's output says why."""
        if life.have_begun():
            return True
        complaint = complaint_of(self._printed()[begin:].decode(errors="replace"))
        self._why_ended = "no agent could start" + (f" ({complaint})" if complaint else "")
        return False

    def _printed(self) -> bytes:
        """Return this job's output so far, over all its starts (script.py)."""
        with contextlib.suppress(OSError):
            return read_regular(self._run.path / "logs" / f"slurm-{self._job_id.partition('_')[0]}.out")
        return b""

    def _needed_nodes(self, launch: Launch) -> int:
        """Return the minimum number of nodes to continue; `craton resize` may have changed it since the start."""
        with contextlib.suppress(LaunchError):
            launch = read_launch(self._run)
        return launch.min_nodes or launch.working_nodes

    def _on_warning(self, number: int, frame: FrameType | None) -> None:
        """Set the STOP marker, from which the agents of all nodes learn of the warning."""
        if self._leave_by == float("inf"):
            self._leave_by = time.monotonic() + max(1.0, signal_seconds(self._job) - SPARED_SECONDS)
            with contextlib.suppress(OSError):
                self._run.mark("STOP", f"{SCHEDULER_STOP} the time limit is near, or another job takes the nodes")

    def _on_end(self, number: int, frame: FrameType | None) -> None:
        self._is_ended = True

    @property
    def _is_asked(self) -> bool:
        """Whether Slurm has signalled this start to end."""
        return self._is_ended or self._leave_by < float("inf")

    def _excuse(self) -> None:
        """Do not count this start, which Slurm ended, if it reports no steps or the agents were not started yet."""
        if self._is_excused:
            return
        self._is_excused = True
        if not self._has_begun or not self._shows_steps():
            self._starts = replace(self._starts, is_excused=True)
            write_starts(self._run, self._starts)

    def _shows_steps(self) -> bool:
        """Whether the run reports steps. A command may record steps itself, without `progress:`."""
        if self._job.kind != "command":
            return self._job.kind != "serve"
        progress = self._job.progress
        return (progress is not None and progress.has_steps) or summarize(self._run).step > 0

    # -- after ----------------------------------------------------------------------------------------------------

    def _verdict_after(self, lost: list[str]) -> int:
        if (verdict := self._verdict_of_markers()) is not None:
            return verdict
        if self._is_asked and not lost:
            self._excuse()
        if self._is_ended:
            return EXIT_FAILED
        if self._run.has("STOP") and self._leave_by == float("inf") and _asked_by_itself(self._run):
            return EXIT_DONE
        if lost and self._slurm_requeues(lost):
            return EXIT_FAILED
        if lost or self._run.has("STOP"):
            if not lost:
                self._excuse()  # a preemption may signal only the agents
            return self._again(f"{', '.join(lost)} lost" if lost else "saved and stopped", exclude=lost)
        self._starts = replace(self._starts, has_failed=True)
        write_starts(self._run, self._starts)
        return self._again(self._why_ended)

    def _slurm_requeues(self, lost: Sequence[str]) -> bool:
        """Wait until Slurm notices the lost nodes, and return whether it then ends and requeues this job.

        A job requeued earlier cannot start sooner, because Slurm still waits for the lost nodes; and in 22.05 it loses
        its GPUs when that wait ends after the job got other nodes.
        """
        deadline = time.monotonic() + SLURM_SEES_SECONDS
        while not self._is_ended and time.monotonic() < deadline:
            with contextlib.suppress(SchedulerError):
                if all("DOWN" in node.states for node in read_nodes(",".join(lost))):
                    deadline = min(deadline, time.monotonic() + SLURM_ENDS_SECONDS)
            time.sleep(LOOK_SECONDS)
        return self._is_ended

    def _verdict_of_markers(self) -> int | None:
        """Return the exit code by the run's markers; None if none of them ends the job."""
        if self._run.has("DONE"):
            return EXIT_DONE
        if self._run.has("FATAL"):
            return EXIT_FAILED
        return EXIT_DONE if stopped_by_user(self._run) else None

    def _again(self, why: str, exclude: Sequence[str] = ()) -> int:
        """Requeue the job, and wait for Slurm to end this process."""
        spent = self._starts.spent(_progress(self._run))
        if not may_start_again(spent, self._job.run.restarts):
            return self._give_up(why, spent)
        self._record("requeued", why)
        # From here on Slurm ends all processes of this job; the rest of this method must survive its SIGTERM.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        patiently(lambda: ask("scontrol", "requeue", self._job_id))
        if exclude:
            self._exclude(exclude)
        time.sleep(REQUEUE_SECONDS)
        return EXIT_FAILED

    def _give_up(self, why: str, spent: int) -> int:
        """Give up: a run that saved is stopped, with the reason first in its marker; any other has failed."""
        text = (
            f"{why}; not requeued: {spent} start{'' if spent == 1 else 's'} failed or made no progress, "
            f"run.restarts is {self._job.run.restarts}; `craton resume {self._run.name}` resumes it"
        )
        self._record("not_requeued", text)
        if self._run.has("STOP"):
            write_whole(self._run.path / "STOP", f"{text}\n{self._run.marker_text('STOP')}")
        else:
            self._run.mark("FATAL", text)
        return EXIT_FAILED

    def _refuse(self, why: str) -> int:
        """Fail the run: other nodes would report the same."""
        text = (
            f"pre-flight found a problem in the job's software on every node: {why}; fix it, then run `craton resume`"
        )
        self._record("preflight_failed", text)
        self._run.mark("FATAL", text)
        return EXIT_FAILED

    def _exclude(self, hosts: Sequence[str]) -> None:
        """Exclude these hosts; Slurm accepts this only for a pending job."""
        excluded = expand_hosts(_excluded(self._job_id))
        avoided = avoided_hosts(expand_hosts(",".join(self._job.run.exclude)), [*excluded, *hosts])
        try:
            ask("scontrol", "update", f"JobId={self._job_id}", f"ExcNodeList={','.join(avoided)}")
        except SchedulerError as error:
            self._record("not_excluded", f"{', '.join(hosts)} cannot be excluded: {error}")

    def _record(self, event: str, message: str) -> None:
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


def _progress(run: RunDirectory) -> int:
    """Return the steps of a run and of its members."""
    return sum(summarize(item).step for item in [run, *member_runs(run)])


def _asked_by_itself(run: RunDirectory) -> bool:
    """Whether the job stopped at its `--stop-at` step, by rank 0's marker text."""
    text = run.marker_text("STOP")
    return "as requested" in text or "as asked" in text  # the latter: written by earlier versions


def avoided_hosts(own: Sequence[str], learned: Sequence[str]) -> list[str]:
    """Return all hosts that the user excludes, and the newest ones that the run excluded."""
    return [*own, *[host for host in dict.fromkeys(learned) if host not in own][-MAX_EXCLUDED:]]


def _excluded(job_id: str) -> str:
    with contextlib.suppress(SchedulerError):
        record = job_of({job.id: job for job in read_jobs([job_id])}, job_id)
        return record.excluded if record else ""
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
