"""The TCP connections of a node's ranks, by the kernel: unacknowledged packets, losses, and round-trip times.

gloo, NCCL's sockets and rendezvous stores use TCP. A broken or slow link shows there first, and on the connections to
one peer only; what ranks see is a collective that takes long. The kernel lists all connections of the agent's network
namespace (sock_diag(7)); those of a rank are found by the inodes of its descriptors. Linux only; elsewhere, or without
the right to look, nothing is reported.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from craton.agent.processes.sock_diag import TcpConnection, list_connections
from craton.agent.processes.tree import process_tree
from craton.telemetry.node import PeerTraffic

READ_SECONDS = 1.5  # between two looks
WINDOW_SECONDS = 4.0  # losses are counted over at least so much time, once there is so much
MAX_PEERS = 16  # of a rank; those in trouble first
RETRY_SECONDS = 15.0  # programs that get no answer try to connect again, on another socket


class ConnectionReader:
    """Follows the connections of a node's ranks."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._looked = float("-inf")  # monotonic
        self._looks: list[tuple[float, dict[int, TcpConnection]]] = []  # oldest first; by inode
        # Inode of a connection that waits → acknowledged bytes, and the monotonic second since when they are the same.
        self._waiting: dict[int, tuple[int, float]] = {}
        # Process, peer and port → since when it tries to connect, and when it was last seen to.
        self._attempts: dict[tuple[int, str, int], tuple[float, float]] = {}
        self._last: dict[int, tuple[PeerTraffic, ...]] = {}

    def read(self, pids: Mapping[int, int], now: float) -> Mapping[int, tuple[PeerTraffic, ...]]:
        """Return rank → its traffic by peer, of the ranks with these processes; read at most every READ_SECONDS."""
        if now - self._looked >= READ_SECONDS:
            self._looked = now
            try:
                by_inode = {connection.inode: connection for connection in list_connections()}
            except OSError:
                self._last = {}
                return self._last
            while len(self._looks) > 1 and now - self._looks[1][0] >= WINDOW_SECONDS:
                self._looks.pop(0)
            self._looks.append((now, by_inode))
            self._waiting = dict(self._waits(by_inode, now))
            self._last = {rank: self._traffic(pid, now) for rank, pid in pids.items()}
        return self._last

    def unacknowledged(self, rank: int) -> tuple[PeerTraffic, ...]:
        """Return the peers that, by the last look, do not acknowledge what a rank sends."""
        return tuple(peer for peer in self._last.get(rank, ()) if peer.unacknowledged_seconds)

    def _waits(self, by_inode: Mapping[int, TcpConnection], now: float) -> Iterator[tuple[int, tuple[int, float]]]:
        """A busy connection nearly always waits for something; one that gets no answer waits for the same."""
        for inode, connection in by_inode.items():
            if connection.is_waiting:
                known, since = self._waiting.get(inode, (-1, now))
                is_same = known == connection.acknowledged_bytes
                yield inode, (connection.acknowledged_bytes, since if is_same else now)

    def _traffic(self, pid: int, now: float) -> tuple[PeerTraffic, ...]:
        before, newest = self._looks[0][1], self._looks[-1][1]
        by_peer: dict[str, list[TcpConnection]] = {}
        for inode in self._inodes(pid):
            if (connection := newest.get(inode)) is not None:
                by_peer.setdefault(connection.peer, []).append(connection)
        self._note_attempts(pid, by_peer, now)
        for process, peer, _ in self._attempts:
            if process == pid:
                by_peer.setdefault(peer, [])
        peers = [self._peer(pid, peer, connections, before, now) for peer, connections in by_peer.items()]
        peers.sort(key=lambda peer: (-peer.unacknowledged_seconds, -peer.retransmitted, -peer.rtt_seconds))
        return tuple(peers[:MAX_PEERS])

    def _note_attempts(self, pid: int, by_peer: Mapping[str, list[TcpConnection]], now: float) -> None:
        """A process fails to connect as long as it tries again soon and gets no connection to that port."""
        for connection in (one for connections in by_peer.values() for one in connections):
            key = (pid, connection.peer, connection.port)
            if connection.is_connecting:
                self._attempts[key] = (self._attempts.get(key, (now, now))[0], now)
            else:
                self._attempts.pop(key, None)
        old = [key for key, (_, until) in self._attempts.items() if now - until > RETRY_SECONDS]
        for key in old:
            del self._attempts[key]

    def _peer(
        self, pid: int, address: str, connections: list[TcpConnection], before: Mapping[int, TcpConnection], now: float
    ) -> PeerTraffic:
        pairs = [(one, before.get(one.inode)) for one in connections]
        segments = sum(one.segments - old.segments for one, old in pairs if old is not None)
        retransmitted = sum(one.retransmitted - old.retransmitted for one, old in pairs if old is not None)
        used = [one for one, old in pairs if old is not None and one.segments > old.segments]
        rtts = [one.rtt_seconds for one in used if one.rtt_seconds > 0]
        fastest = [one.min_rtt_seconds for one in connections if one.min_rtt_seconds > 0]
        waits = [(now - self._waiting[one.inode][1], 0) for one in connections if one.inode in self._waiting]
        attempts = [(now - since, key[2]) for key, (since, _) in self._attempts.items() if key[:2] == (pid, address)]
        longest, port = max([*waits, *attempts], default=(0.0, 0))
        return PeerTraffic(
            address=address,
            unacknowledged_seconds=round(longest, 1),
            connecting_port=port,
            segments=max(0, segments),
            retransmitted=max(0, retransmitted),
            rtt_seconds=round(min(rtts, default=0.0), 6),
            min_rtt_seconds=round(min(fastest, default=0.0), 6),
        )

    def _inodes(self, pid: int) -> Iterator[int]:
        """Yield the inodes of the sockets of a process and its children."""
        for process in process_tree(pid, self._proc):
            folder = self._proc / str(process) / "fd"
            with contextlib.suppress(OSError):
                for descriptor in os.listdir(folder):
                    with contextlib.suppress(OSError, ValueError):
                        target = os.readlink(folder / descriptor)
                        if target.startswith("socket:["):
                            yield int(target[len("socket:[") : -1])
