"""Slurm's command line tools: asked with a deadline, and what they say turned into data or one error.

Nothing goes through a shell. Questions about many jobs are one question: controllers of large clusters are slowed down
by those who ask often.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from craton.orchestration.errors import SchedulerError
from craton.orchestration.slurm.records import (
    JobRecord,
    NodeRecord,
    PartitionRecord,
    ReservationRecord,
    SwitchRecord,
    jobs_of_json,
    jobs_of_text,
    nodes_of_text,
    partitions_of_text,
    reservations_of_text,
    switches_of_text,
)

ANSWER_SECONDS = 30.0  # a busy controller takes seconds; one that takes longer is taken for gone
KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS")
BUILT_WITHOUT_JSON = ("unrecognized option", "invalid option", "serializer", "JSON support")
TOLD_BY_OTHERS = ("SBATCH_", "SLURM_", "SRUN_", "SQUEUE_", "SINFO_", "SCANCEL_")


COMPETING = ("Resources", "Priority", "ReqNodeNotAvail", "")  # reasons of jobs that others wait behind


@dataclass(frozen=True)
class Snapshot:
    """A cluster at one moment."""

    jobs: tuple[JobRecord, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    switches: tuple[SwitchRecord, ...] = ()
    partitions: tuple[PartitionRecord, ...] = ()
    reservations: tuple[ReservationRecord, ...] = ()

    @cached_property
    def by_number(self) -> dict[str, JobRecord]:
        return {job.id: job for job in self.jobs}

    def before(self, job: JobRecord) -> list[JobRecord]:
        """The jobs of its partition that Slurm looks at before this one."""
        queue, places = self._queues.get(job.partition, ([], {}))
        return queue[: places.get(job.id, len(queue))]

    @cached_property
    def _queues(self) -> dict[str, tuple[list[JobRecord], dict[str, int]]]:
        """Partition → its jobs in the order in which they are looked at, and the place of each."""
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
    """What a tool prints; SchedulerError with what it complains about."""
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
            f"{words[0]} is not installed here; start this on a machine of the cluster, or use --on local"
        ) from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"{words[0]} did not answer within {seconds:.0f} s; `scontrol ping` tells why") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise SchedulerError(f"{' '.join(words[:2])}: {'; '.join(said[-3:])}")
    return done.stdout


def own_environment() -> dict[str, str]:
    """This process's environment without what an allocation around it, or a user's defaults, would tell the tools:
    sbatch takes SBATCH_PARTITION over what stands in the script."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in KEPT_VARIABLES or not name.startswith(TOLD_BY_OTHERS)
    }


def submit(arguments: Sequence[str]) -> str:
    """The number of the new job."""
    return ask(*arguments).strip().partition(";")[0]


def read_jobs(numbers: Iterable[str] | None = None) -> list[JobRecord]:
    """The jobs that Slurm still knows, all or those of these numbers, in one question."""
    wanted = None if numbers is None else list(numbers)
    if wanted == []:
        return []
    chosen = [] if wanted is None else ["--jobs", ",".join(wanted)]
    try:
        printed = ask("squeue", "--json", "--states=all", *chosen)
        jobs = jobs_of_json(json.loads(printed))
    except SchedulerError as error:
        if "Invalid job id" in str(error):  # of a single job that is forgotten
            return []
        if not any(word in str(error) for word in BUILT_WITHOUT_JSON):
            raise
        jobs = jobs_of_text(ask("scontrol", "show", "job"))
    except ValueError as error:
        raise SchedulerError(f"squeue --json printed what is not JSON ({error})") from None
    if wanted is None:
        return jobs
    # 22.05 prints every job whatever was asked for.
    arrays = {number.partition("_")[0] for number in wanted}
    return [job for job in jobs if job.id in wanted or job.id.partition("_")[0] in arrays]


def read_snapshot() -> Snapshot:
    """Everything that tells why a job waits. What a site does not show is left empty."""
    return Snapshot(
        jobs=tuple(jobs_of_text(_show("job"))),
        nodes=tuple(read_nodes()),
        switches=tuple(read_switches()),
        partitions=tuple(partitions_of_text(_show("partition"))),
        reservations=tuple(reservations_of_text(_show("reservation"))),
    )


def read_nodes(hosts: str = "") -> list[NodeRecord]:
    """All nodes, or those of a hostlist."""
    return nodes_of_text(ask("scontrol", "show", "node", *([hosts] if hosts else [])))


def read_switches() -> list[SwitchRecord]:
    """None where nobody told Slurm about the network."""
    return switches_of_text(_show("topology"))


def cancel(number: str) -> None:
    ask("scancel", "--quiet", number)


def release(number: str) -> None:
    ask("scontrol", "release", number)


def _show(what: str) -> str:
    try:
        return ask("scontrol", "show", what)
    except SchedulerError:
        return ""
