"""What would tell, when a snapshot does not: which of the things that an examination looks at are not known."""

from __future__ import annotations

from craton.observability.diagnosis.snapshot import Snapshot
from craton.observability.diagnosis.verdict import RESTARTS, Symptoms


def what_would_tell(snapshot: Snapshot, symptoms: Symptoms) -> tuple[str, ...]:
    """Sentences that begin with a verb, the most telling first."""
    symptom = symptoms.first
    nodes = [node for node in snapshot.nodes if not symptom.nodes or node.name in symptom.nodes] or list(snapshot.nodes)
    is_accelerated = snapshot.run.is_accelerated is not False
    names: list[str] = []
    if symptom.condition == "hung":
        if is_accelerated and not snapshot.collectives.ras_asked:
            names.append("ask NCCL's RAS on a node of the run (`ncclras`, NCCL 2.24 or newer): who is behind")
        if not snapshot.collectives.recorders_read:
            names.append(
                "set TORCH_FR_BUFFER_SIZE and TORCH_NCCL_DUMP_ON_TIMEOUT: the flight recorder names the collective"
            )
        if not any(rank.stack for rank in snapshot.ranks):
            names.append("install py-spy and run `craton why` on a node of the run: stacks of its ranks")
        if not any(rank.kind for rank in snapshot.ranks):
            names.append("look at status/NODE.json in the run directory: nobody tells what the ranks are doing")
    breaks_again = symptom.sign == RESTARTS
    if symptom.condition == "slow" and not breaks_again and not any(rank.earlier for rank in snapshot.ranks):
        names.append("wait for more steps: there are too few to compare with")
    if symptom.condition == "dead" or breaks_again:
        if not snapshot.logs:
            names.append(f"read the last lines of the logs (`craton logs {snapshot.run.name}`)")
        if not any(node.host is not None for node in nodes):
            names.append(
                "look at the kernel log of the node: whether it killed a process, and what the driver reported"
            )
    if is_accelerated and not any(node.gpus_known for node in nodes):
        names.append(
            "give `--prometheus URL` of a Prometheus that scrapes the nodes, or run `craton why` there: GPU health"
        )
    if len(snapshot.run.nodes) > 1 and is_accelerated and not any(node.fabric for node in nodes):
        names.append("export the counters of the network cards (`craton observe up`): retransmissions, links")
    if not any(
        mount.operation_seconds is not None or mount.is_stalled is not None for node in nodes for mount in node.mounts
    ):
        names.append("export the statistics of the file systems: their rates and latencies are not known")
    if not any(node.host is not None for node in nodes):
        names.append("export the hosts' load, memory and pressure: nothing is known of them")
    if not names:
        names.append("take another snapshot in a minute and compare: everything that is looked at is as it should be")
    return tuple(names)
