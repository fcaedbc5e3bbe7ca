"""Read the logs of a run's pods from the cluster, as pods come and go."""

from __future__ import annotations

import asyncio
from queue import SimpleQueue

from craton.orchestration.errors import RunStateError, SchedulerError
from craton.orchestration.kubernetes.api import Connection
from craton.orchestration.kubernetes.pods import Manifest
from craton.orchestration.kubernetes.standing import ended_as

LOOK_SECONDS = 2.0  # between two looks for new pods


async def read_logs(
    connection: Connection,
    owner: Manifest,
    selector: str,
    follow: bool,
    tail: int | None,
    lines: SimpleQueue[tuple[str, str] | None],
) -> None:
    """Put (pod, line) into `lines`, from the beginning of each container, or the last `tail` lines of those that exist
    now. An unreadable log becomes a line with the error, and the others continue."""
    namespace = owner["metadata"]["namespace"]
    readings: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def read(pod: str, last: int | None) -> None:
        try:
            async for line in connection.log_lines(pod, namespace, follow, last):
                lines.put((pod, line))
        except SchedulerError as error:
            lines.put((pod, f"its log cannot be read: {error}"))

    last = tail
    while True:
        # Read before the pods, so that the pods of a run that ends meanwhile are read too.
        there = await connection.read(owner) if follow else None
        pods = await connection.list("v1", "Pod", namespace, labelSelector=selector)
        for pod in pods:
            if (pod.get("status") or {}).get("phase", "Pending") != "Pending" and _key(pod) not in readings:
                readings[_key(pod)] = asyncio.create_task(read(pod["metadata"]["name"], last))
        last = None
        if there is None or ended_as(there) is not None:
            break
        await asyncio.sleep(LOOK_SECONDS)
    if not pods and not readings:
        kind, name = owner["kind"], owner["metadata"]["name"]
        raise RunStateError(f"{kind}/{name} has no pods; `craton ps` shows why it waits, or how it ended")
    await asyncio.gather(*readings.values())


def _key(pod: Manifest) -> tuple[str, int]:
    """Identify a container's log: a restarted container has a new one."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return pod["metadata"]["uid"], sum(int(status.get("restartCount") or 0) for status in statuses)
