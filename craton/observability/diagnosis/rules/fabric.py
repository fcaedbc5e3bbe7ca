"""Rules for the network between and inside nodes: TCP fallback, missing devices, links, retransmissions, NVLink."""

from __future__ import annotations

from craton.formatting import bandwidth, percent
from craton.observability.diagnosis.rules.findings import TALKING, finding, named
from craton.observability.diagnosis.snapshot import Snapshot, SnapshotFabricDevice, SnapshotNode
from craton.observability.diagnosis.tables import threshold
from craton.observability.diagnosis.verdict import Condition, Finding, Symptoms

# Collectives inside a node are part of the compute phase where no kernel hides them.
INSIDE = ("communication", "compute")
MAX_COMPLAINTS = 1.5  # times the events of the next node


def examine_fabric(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    result = _fallback(snapshot, symptoms)
    for node in snapshot.nodes:
        result += _devices(node, symptoms)
        result += _rails(node, symptoms)
        result += _nvlink(snapshot, node, symptoms)
    result += _losses(snapshot, symptoms)
    result += _unresponsive(snapshot, symptoms)
    if not result:
        result += _only_slow(symptoms)
    return result


def _fallback(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Find NCCL on TCP sockets where a faster network exists."""
    if len(snapshot.run.nodes) < 2:
        return []
    slow = [node for node in snapshot.nodes if "socket" in node.nccl_network.lower() and _has_fabric(snapshot)]
    if not slow:
        return []
    node = slow[0].name if len(slow) < len(snapshot.nodes) or len(snapshot.nodes) == 1 else ""
    message = f"NCCL uses TCP sockets on {named([item.name for item in slow])} although a faster network exists"
    return finding(
        symptoms, "tcp_fallback", message, ("slow", "hung"), node=node, base=0.97, phases=TALKING, is_risk=True
    )


def _has_fabric(snapshot: Snapshot) -> bool:
    return any(node.expected_fabric or node.fabric for node in snapshot.nodes)


def _devices(node: SnapshotNode, symptoms: Symptoms) -> list[Finding]:
    findings: list[Finding] = []
    down = [device.name for device in node.fabric if device.is_active is False]
    flaps = [device.name for device in node.fabric if device.link_downs]
    hurts: tuple[Condition, ...] = ("hung", "slow", "dead")
    if down or flaps:
        message = f"{named(down or flaps)} on {node.name} {'is down' if down else 'lost its link and recovered'}"
        health = "" if down else "observe"  # a node stays in service for a link that recovered
        findings += finding(
            symptoms,
            "link_down",
            message,
            hurts,
            node=node.name,
            base=0.96,
            phases=TALKING,
            is_risk=True,
            health=health,
        )
    num_devices = len(node.fabric) if node.fabric else None
    expected = node.expected_fabric
    if expected and num_devices is not None and num_devices < expected:
        message = f"{node.name} has {num_devices} of {expected} network devices"
        findings += finding(
            symptoms,
            "fabric_device_missing",
            message,
            ("slow", "hung"),
            node=node.name,
            base=0.93,
            phases=TALKING,
            is_risk=True,
        )
    elif expected and node.nccl_interfaces is not None and node.nccl_interfaces < expected:
        message = f"NCCL uses {node.nccl_interfaces} of {expected} network devices of {node.name}"
        findings += finding(
            symptoms,
            "fabric_device_missing",
            message,
            ("slow",),
            node=node.name,
            base=0.93,
            phases=TALKING,
            is_risk=True,
            health="observe",  # the job leaves them out, and would on any node
        )
    return findings


def _rails(node: SnapshotNode, symptoms: Symptoms) -> list[Finding]:
    rates = {device.name: device.sent_bytes_per_second for device in node.fabric if device.is_active is not False}
    known_rates = {name: rate for name, rate in rates.items() if rate is not None}
    if len(known_rates) < 2 or max(known_rates.values()) < threshold("rail_bytes_per_second"):
        return []
    least, most = min(known_rates, key=lambda name: known_rates[name]), max(known_rates.values())
    if known_rates[least] >= threshold("rail_ratio") * most:
        return []
    message = f"{least} on {node.name} sends {bandwidth(known_rates[least])}, the busiest NIC {bandwidth(most)}"
    return finding(symptoms, "rail_imbalance", message, ("slow",), node=node.name, base=0.88, phases=TALKING)


def _nvlink(snapshot: Snapshot, node: SnapshotNode, symptoms: Symptoms) -> list[Finding]:
    findings: list[Finding] = []
    for gpu in node.gpus:
        rank = snapshot.rank_on(node.name, gpu.index)
        if gpu.nvlinks_up is not None and gpu.nvlinks and gpu.nvlinks_up < gpu.nvlinks:
            message = f"{gpu.nvlinks_up} of {gpu.nvlinks} NVLinks of GPU {gpu.index} on {node.name} are up"
            findings += finding(
                symptoms,
                "nvlink_down",
                message,
                ("slow", "hung", "dead"),
                node=node.name,
                base=0.95,
                phases=INSIDE,
                is_risk=True,
            )
        rate = gpu.nvlink_errors_per_second
        if rate is not None and rate > threshold("nvlink_errors_per_second"):
            message = f"the NVLinks of GPU {gpu.index} on {node.name} have {rate:.0f} errors per second"
            victim = rank if symptoms.fit(("slow", "hung"), rank=rank)[0] == 1.0 else None
            findings += finding(
                symptoms,
                "nvlink_errors",
                message,
                ("slow", "hung", "dead"),
                node=node.name,
                rank=victim,
                base=0.95,
                phases=INSIDE,
                is_risk=True,
            )
    return findings


def _losses(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Find retransmissions, drops and errors: of one device, one leaf or everywhere."""
    lossy = {node.name: text for node in snapshot.nodes if (text := _lossy(node))}
    if not lossy:
        return []
    leaves = {snapshot.run.leaves.get(node, "") for node in lossy}
    evidence = list(lossy.values())[:4]
    if len(lossy) == 1:
        node, message = next(iter(lossy.items()))
        return finding(
            symptoms, "retransmissions", message, ("slow", "hung"), node=node, base=0.95, phases=TALKING, is_risk=True
        )
    leaf = next(iter(leaves)) if len(leaves) == 1 else ""
    if leaf and set(snapshot.run.leaves.values()) != {leaf}:
        message = f"{len(lossy)} nodes of {leaf} have packet loss or errors, and no others do"
        return finding(
            symptoms,
            "leaf_congested",
            message,
            ("slow", "hung"),
            evidence=[message, *evidence],
            leaf=leaf,
            base=0.95,
            phases=TALKING,
            is_risk=True,
        )
    message = f"{named(list(lossy))} have packet loss or errors"
    return finding(
        symptoms,
        "retransmissions",
        message,
        ("slow", "hung"),
        evidence=[message, *evidence],
        base=0.93,
        phases=TALKING,
        is_risk=True,
    )


def _lossy(node: SnapshotNode) -> str:
    for device in node.fabric:
        if text := _loss(device):
            return f"{device.name} on {node.name} {text}"
    return ""


def _loss(device: SnapshotFabricDevice) -> str:
    share = device.retransmitted_share or 0.0
    if share > threshold("retransmitted_share"):
        return f"retransmits {percent(share)} of its bytes"
    if (device.errors_per_second or 0.0) > threshold("fabric_errors_per_second"):
        return f"has {device.errors_per_second:.0f} failed requests or symbol errors per second"
    if (device.drops_per_second or 0.0) > threshold("drops_per_second"):
        return f"drops {device.drops_per_second:.0f} packets per second"
    return ""


def _unresponsive(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Find unresponsive peers. If all nodes but one report some, that one is the suspect."""
    complain = [node.name for node in snapshot.nodes if any(device.peer_events for device in node.fabric)]
    if not complain:
        return []
    quiet = [node.name for node in snapshot.nodes if node.name not in complain]
    node = quiet[0] if len(quiet) == 1 and len(complain) > 1 else complain[0] if len(complain) == 1 else ""
    if not quiet and len(complain) > 2:
        # A node that lost its network reports every other node; the others report one.
        counts = sorted(
            (sum(device.peer_events or 0.0 for device in item.fabric), item.name) for item in snapshot.nodes
        )
        if counts[-1][0] > MAX_COMPLAINTS * counts[-2][0]:
            node = counts[-1][1]
    message = f"the NICs of {named(complain)} report unresponsive peers"
    return finding(symptoms, "peer_unresponsive", message, ("hung", "slow"), node=node, base=0.85, phases=TALKING)


def _only_slow(symptoms: Symptoms) -> list[Finding]:
    """Report slower collectives on all ranks without another explanation."""
    findings: list[Finding] = []
    for symptom in symptoms.of("slow"):
        if symptom.phase == "communication" and not symptom.ranks:
            message = "collectives take longer, even on the rank that waits least"
            findings += finding(
                symptoms, "communication_slow", message, ("slow",), evidence=symptom.evidence, base=0.9, phases=TALKING
            )
    return findings
