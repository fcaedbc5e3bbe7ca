"""Rules for the TCP connections between nodes: who does not answer, where packets get lost, which link is slow.

Agents read them from the kernel for every rank. A link is between two nodes: the node that all bad links have in common
is the suspect; if there is none, the network itself is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from craton.formatting import duration, percent
from craton.observability.diagnosis.rules.findings import TALKING, finding, named
from craton.observability.diagnosis.snapshot import Snapshot
from craton.observability.diagnosis.tables import threshold
from craton.observability.diagnosis.verdict import Finding, Symptoms
from craton.telemetry.node import PeerTraffic

MAIN_SHARE = 0.75  # of the lost packets: their sender is the suspect


@dataclass(frozen=True)
class NodeLink:
    """What a rank sends to another node, or to an address that is none."""

    rank: int
    sender: str
    receiver: str
    traffic: PeerTraffic
    is_recorded: bool = False  # when the rank got stuck; nothing newer is known

    @property
    def is_silent(self) -> bool:
        """Whether an open connection gets no acknowledgements any more. Stacks, and with them connections, are taken a
        few seconds after the last progress: less time has passed, but something was sent again meanwhile."""
        seconds = self.traffic.unacknowledged_seconds
        if self.traffic.connecting_port:
            return False
        is_resent = self.is_recorded and self.traffic.retransmitted > 0
        return seconds >= threshold("recorded_unacknowledged_seconds" if is_resent else "unacknowledged_seconds")

    @property
    def text(self) -> str:
        return f"{self.sender} → {self.receiver}"


def examine_connections(snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    links = _links(snapshot)
    return [
        *_unreachable(links, symptoms),
        *_unacknowledged(links, snapshot, symptoms),
        *_losses(links, snapshot, symptoms),
        *_latencies(links, snapshot, symptoms),
    ]


def _links(snapshot: Snapshot) -> list[NodeLink]:
    nodes: dict[str, list[str]] = {}
    for node in snapshot.nodes:
        nodes.setdefault(node.address, []).append(node.name)
    names = {address: shared[0] for address, shared in nodes.items() if address and len(shared) == 1}
    return [
        NodeLink(rank.rank, rank.node, names.get(traffic.address, traffic.address), traffic, not rank.peers)
        for rank in snapshot.ranks
        for traffic in rank.peers or snapshot.run.unacknowledged.get(rank.rank, ())
    ]


def _unreachable(links: Sequence[NodeLink], symptoms: Symptoms) -> list[Finding]:
    """Find connections that cannot be opened: a firewall drops them, or the address does not exist."""
    limit = threshold("unacknowledged_seconds")
    connecting = [
        link for link in links if link.traffic.connecting_port and link.traffic.unacknowledged_seconds >= limit
    ]
    if not connecting:
        return []
    first = max(connecting, key=lambda link: link.traffic.unacknowledged_seconds)
    traffic = first.traffic
    message = (
        f"rank {first.rank} on {first.sender} has tried to connect to {traffic.address}:{traffic.connecting_port} "
        f"({first.receiver}) for {duration(traffic.unacknowledged_seconds)}, and no packet comes back"
    )
    senders = {link.sender for link in connecting}
    evidence = [message, *(f"the same for {link.text}" for link in connecting if link.sender != first.sender)][:4]
    node, rank = (first.sender, first.rank) if len(senders) == 1 else ("", None)
    return finding(
        symptoms,
        "connect_timeout",
        message,
        ("starting", "hung", "dead"),
        evidence=evidence,
        node=node,
        rank=rank,
    )


def _unacknowledged(links: Sequence[NodeLink], snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Find open connections on which nothing is acknowledged any more."""
    silent = [link for link in links if link.is_silent]
    if not silent:
        return []
    node, rank = _suspect(silent, snapshot)
    shown = named(sorted({link.text for link in silent}))
    message = f"packets between nodes are not acknowledged any more: {shown}"
    return finding(symptoms, "connection_stalled", message, ("hung", "dead", "slow"), node=node, rank=rank)


def _losses(links: Sequence[NodeLink], snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Find links that retransmit; of a node that loses what it sends, the acknowledgements get lost too, so that its
    peers retransmit a little as well."""
    lossy = [
        link
        for link in links
        if link.traffic.retransmitted >= threshold("tcp_retransmissions")
        and link.traffic.retransmitted > threshold("tcp_retransmitted_share") * max(1, link.traffic.segments)
    ]
    if not lossy:
        return []
    by_sender = Counter[str]()
    for link in lossy:
        by_sender[link.sender] += link.traffic.retransmitted
    (main, most), *_ = by_sender.most_common()
    node, rank = _suspect([*lossy, *_slow_links(links)], snapshot)
    if not node:
        node, rank = _suspect(lossy, snapshot)
    if not node and len(snapshot.run.nodes) > 2 and most >= MAIN_SHARE * by_sender.total():
        node, rank = main, _only_rank(main, snapshot)
    worst = max(lossy, key=lambda link: link.traffic.retransmitted)
    share = worst.traffic.retransmitted / max(1, worst.traffic.segments)
    message = f"packets get lost between nodes: {worst.text} retransmits {percent(share)} of them"
    evidence = [message, *(f"{link.text}: {link.traffic.retransmitted} retransmitted" for link in lossy)][:4]
    return finding(
        symptoms, "packet_loss", message, ("slow", "hung"), evidence=evidence, node=node, rank=rank, phases=TALKING
    )


def _latencies(links: Sequence[NodeLink], snapshot: Snapshot, symptoms: Symptoms) -> list[Finding]:
    """Find links whose round trips became slow: packets wait in a queue, or take another path."""
    slow = _slow_links(links)
    if not slow:
        return []
    node, rank = _suspect(slow, snapshot)
    worst = max(slow, key=lambda link: link.traffic.rtt_seconds)
    message = (
        f"the network is slow: round trips {worst.text} take {duration(worst.traffic.rtt_seconds)}, the fastest "
        f"took {duration(worst.traffic.min_rtt_seconds)}"
    )
    evidence = [message, *(f"{link.text}: {duration(link.traffic.rtt_seconds)}" for link in slow)][:4]
    return finding(
        symptoms, "latency_high", message, ("slow",), evidence=evidence, node=node, rank=rank, phases=TALKING
    )


def _slow_links(links: Sequence[NodeLink]) -> list[NodeLink]:
    return [
        link
        for link in links
        if link.traffic.rtt_seconds > threshold("rtt_seconds")
        and link.traffic.rtt_seconds > threshold("rtt_ratio") * link.traffic.min_rtt_seconds
    ]


def _suspect(bad: Sequence[NodeLink], snapshot: Snapshot) -> tuple[str, int | None]:
    """Return the node that all bad links have in common, and its rank if it has only one; of both ends of one bad link,
    the sender. ("", None) if there is no such node, or the run has two nodes, to which every link belongs."""
    if len(snapshot.run.nodes) < 3:
        return "", None
    ends = [{link.sender, link.receiver} for link in bad]
    common = set.intersection(*ends) & set(snapshot.run.nodes)
    if not common:
        return "", None
    senders = Counter(link.sender for link in bad if link.sender in common)
    node = senders.most_common(1)[0][0] if senders else sorted(common)[0]
    return node, _only_rank(node, snapshot)


def _only_rank(node: str, snapshot: Snapshot) -> int | None:
    ranks = [rank.rank for rank in snapshot.ranks if rank.node == node]
    return ranks[0] if len(ranks) == 1 else None
