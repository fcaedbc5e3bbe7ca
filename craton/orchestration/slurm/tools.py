"""Call Slurm's command line tools with a timeout, and turn their output into data or one error.

Nothing goes through a shell. One query covers many jobs: frequent queries slow down the controllers of large clusters.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from craton.formatting import setting
from craton.orchestration.errors import NoAnswerError, SchedulerError, SilentSchedulerError
from craton.orchestration.slurm.records import (
    JobRecord,
    NodeRecord,
    PartitionRecord,
    ReservationRecord,
    SwitchRecord,
    hosts_of,
    jobs_of_json,
    jobs_of_lines,
    jobs_of_text,
    nodes_of_text,
    partitions_of_text,
    reservations_of_text,
    switches_of_text,
)

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
CONTROLLER_SECONDS, AGAIN_SECONDS = 300.0, 5.0  # a batch program's timeout for a response; between two tries
ANSWER_SECONDS = 30.0  # a busy controller takes seconds; a longer one counts as unreachable
# Errors of the tools after a request without a response: the controller may still execute it.
UNREACHABLE = "Unable to contact"
UNANSWERED = ("Socket timed out", "Zero Bytes were transmitted", "Unexpected message received")
KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS")
BUILT_WITHOUT_JSON = ("unrecognized option", "invalid option", "serializer", "JSON support")
FOREIGN_PREFIXES = ("SBATCH_", "SLURM_", "SRUN_", "SQUEUE_", "SINFO_", "SCANCEL_")


COMPETING = ("Resources", "Priority", "ReqNodeNotAvail", "")  # reasons of pending jobs that compete for nodes


@dataclass(frozen=True)
class SlurmState:
    """The state of a cluster at one moment."""

    jobs: tuple[JobRecord, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    switches: tuple[SwitchRecord, ...] = ()
    partitions: tuple[PartitionRecord, ...] = ()
    reservations: tuple[ReservationRecord, ...] = ()

    @cached_property
    def by_number(self) -> dict[str, JobRecord]:
        return {job.id: job for job in self.jobs}

    @cached_property
    def leaves(self) -> dict[str, frozenset[str]]:
        """Leaf switch or block → its nodes."""
        return {switch.name: frozenset(hosts_of(switch.nodes)) for switch in self.switches if switch.level == 0}

    @cached_property
    def jobs_on(self) -> dict[str, list[JobRecord]]:
        """Node → the jobs that run on it."""
        result: dict[str, list[JobRecord]] = {}
        for job in self.jobs:
            for name in hosts_of(job.nodes) if not job.is_pending and not job.has_ended else ():
                result.setdefault(name, []).append(job)
        return result

    @cached_property
    def planned_on(self) -> dict[str, JobRecord]:
        """Node → the first pending job that Slurm has planned it for."""
        result: dict[str, JobRecord] = {}
        for job in sorted(self.jobs, key=lambda job: (job.start or float("inf"), job.number)):
            for name in hosts_of(job.scheduled) if job.is_pending else ():
                result.setdefault(name, job)
        return result

    @cached_property
    def reservations_on(self) -> dict[str, list[ReservationRecord]]:
        """Node → its reservations, now or later."""
        result: dict[str, list[ReservationRecord]] = {}
        for reservation in self.reservations:
            for name in hosts_of(reservation.nodes):
                result.setdefault(name, []).append(reservation)
        return result

    def before(self, job: JobRecord) -> list[JobRecord]:
        """Return the jobs of its partition with precedence over this one."""
        queue, places = self._queues.get(job.partition, ([], {}))
        return queue[: places.get(job.id, len(queue))]

    @cached_property
    def _queues(self) -> dict[str, tuple[list[JobRecord], dict[str, int]]]:
        """Partition → its pending jobs in scheduling order, and the position of each."""
        queues: dict[str, list[JobRecord]] = {}
        for job in self.jobs:
            if job.is_pending and job.reason.partition(",")[0] in COMPETING:
                queues.setdefault(job.partition, []).append(job)
        for queue in queues.values():
            queue.sort(key=lambda job: (-job.priority, job.number))
        return {name: (queue, {job.id: at for at, job in enumerate(queue)}) for name, queue in queues.items()}


def ask(
    *words: str, seconds: float = ANSWER_SECONDS, environment: Mapping[str, str] | None = None, text: str | None = None
) -> str:
    """Run a tool and return its output; SchedulerError with its error message."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            words,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            env=dict(own_environment() if environment is None else environment),
            check=False,
        )
    except FileNotFoundError:
        raise SchedulerError(
            f"{words[0]} is not installed here; run this on a login node of the cluster, or use --on local"
        ) from None
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{words[0]} did not respond within {setting(seconds)}; check `scontrol ping`") from None
    logger.debug("%s: exit %d after %.2f s", shlex.join(words), done.returncode, time.monotonic() - start)
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        complaint = f"{' '.join(words[:2])}: {'; '.join(lines[-3:])}"
        is_unclear = any(sign in line for sign in UNANSWERED for line in lines)
        if is_unclear:
            raise NoAnswerError(complaint)
        raise SilentSchedulerError(complaint) if UNREACHABLE in complaint else SchedulerError(complaint)
    return done.stdout


def patiently(question: Callable[[], Answer], seconds: float = CONTROLLER_SECONDS) -> Answer:
    """Retry a query while Slurm's controller does not respond, for example during a failover."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return question()
        except SchedulerError as error:
            if time.monotonic() > deadline:
                raise
            print(f"craton: {error}; retrying", file=sys.stderr, flush=True)
            time.sleep(AGAIN_SECONDS)


def own_environment() -> dict[str, str]:
    """Return this process's environment without the variables of an enclosing allocation or the user's defaults: for
    sbatch SBATCH_PARTITION takes precedence over the script."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in KEPT_VARIABLES or not name.startswith(FOREIGN_PREFIXES)
    }


def submit(arguments: Sequence[str]) -> str:
    """Submit a job and return its ID."""
    return ask(*arguments).strip().partition(";")[0]


def read_jobs(numbers: Iterable[str] | None = None) -> list[JobRecord]:
    """Return the jobs that Slurm still knows, all or those with these IDs, in one query."""
    wanted = None if numbers is None else list(numbers)
    if wanted == []:
        return []
    chosen = [] if wanted is None else ["--jobs", ",".join(wanted)]
    try:
        document = json.loads(ask("squeue", "--json", "--states=all", *chosen))
        _check_answer(document)
        jobs = jobs_of_json(document)
    except SchedulerError as error:
        if "Invalid job id" in str(error):  # a single job that Slurm no longer knows
            return []
        if not any(word in str(error) for word in BUILT_WITHOUT_JSON):
            raise
        jobs = jobs_of_text(ask("scontrol", "show", "job"))
    except ValueError as error:
        raise SchedulerError(f"squeue --json printed invalid JSON ({error})") from None
    if wanted is None:
        return jobs
    # 22.05 ignores --jobs and prints every job.
    arrays = {number.partition("_")[0] for number in wanted}
    return [job for job in jobs if job.id in wanted or job.id.partition("_")[0] in arrays]


def _check_answer(document: Mapping[str, Any]) -> None:
    """Raise NoAnswerError for an error that squeue reports in its JSON: 22.05 exits with 0 if no controller responds,
    and an empty list would mean that every job has ended."""
    errors = [error for error in document.get("errors") or () if isinstance(error, Mapping)]
    if errors and not document.get("jobs"):
        words = [str(errors[0][key]) for key in ("description", "error") if errors[0].get(key)]
        raise NoAnswerError(f"squeue: {': '.join(words) or 'unknown error'}; check `scontrol ping`")


def read_jobs_of(users: Iterable[int]) -> list[JobRecord]:
    """Return ID, state and comment of these users' jobs. As text, because 22.05 prints all users' jobs with --json."""
    names = ",".join(str(user) for user in sorted(set(users)))
    return jobs_of_lines(ask("squeue", f"--user={names}", "--states=all", "--noheader", "--format=%i %T %k"))


def read_snapshot() -> SlurmState:
    """Read everything that explains why a job waits. Data that a site hides is left empty."""
    return SlurmState(
        jobs=tuple(jobs_of_text(_show("job"))),
        nodes=tuple(read_nodes()),
        switches=tuple(read_switches()),
        partitions=tuple(partitions_of_text(_show("partition"))),
        reservations=tuple(reservations_of_text(_show("reservation"))),
    )


def read_nodes(hosts: str = "") -> list[NodeRecord]:
    """Return all nodes, or those of a hostlist."""
    return nodes_of_text(ask("scontrol", "show", "node", *([hosts] if hosts else [])))


def read_switches() -> list[SwitchRecord]:
    """Return the switches; empty if Slurm has no topology configured."""
    return switches_of_text(_show("topology"))


def cancel(number: str) -> None:
    ask("scancel", "--quiet", number)


def cancel_steps(number: str) -> None:
    """Cancel the steps of a job besides its batch script."""
    steps = ask("squeue", "--steps", f"--jobs={number}", "--noheader", "--format=%i").split()
    if started := [step for step in steps if step.rpartition(".")[2].isdecimal()]:
        ask("scancel", "--quiet", *started)


def end_step_named(number: str, name: str) -> None:
    """Kill the processes of the steps of a job that have this name."""
    listed = ask("squeue", "--steps", f"--jobs={number}", "--noheader", "--format=%i %j").splitlines()
    if steps := [words[0] for line in listed if len(words := line.split()) == 2 and words[1] == name]:
        ask("scancel", "--quiet", "--signal=KILL", *steps)


def warn(number: str) -> None:
    """Send SIGUSR1, as Slurm does before a time limit: the job saves, exits and is requeued."""
    ask("scancel", "--quiet", "--batch", "--signal=USR1", number)


def release(number: str) -> None:
    ask("scontrol", "release", number)


def _show(entity: str) -> str:
    try:
        return ask("scontrol", "show", entity)
    except SchedulerError:
        return ""
