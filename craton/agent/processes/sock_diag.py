"""TCP connections and their statistics, by the kernel: sock_diag(7), struct tcp_info of linux/tcp.h. Linux only."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAX_CONNECTIONS = 20_000  # of a network namespace

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_INET_DIAG_INFO = 2
_ESTABLISHED, _SYN_SENT = 1, 2  # of net/tcp_states.h
_STATES = 1 << _ESTABLISHED | 1 << _SYN_SENT
_HEADER, _MESSAGE, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBB"), struct.Struct("=HH")
_PORTS, _QUEUES = struct.Struct(">HH"), struct.Struct("=IIIII")
_MESSAGE_BYTES, _ID_BYTES = 72, 48
_BUFFER_BYTES = 1 << 18
# Offsets in struct tcp_info; a kernel before 4.9 returns fewer bytes.
_UNACKED, _RTT, _TOTAL_RETRANS, _BYTES_ACKED, _MIN_RTT, _DATA_SEGS_OUT = 24, 68, 100, 120, 148, 156
_INFO_BYTES = 160
_NO_MIN_RTT = 0xFFFFFFFF


@dataclass(frozen=True)
class TcpConnection:
    """One TCP connection, by struct inet_diag_msg and struct tcp_info."""

    inode: int
    peer: str
    port: int  # of the peer
    is_connecting: bool
    is_waiting: bool  # for the acknowledgement of something that it sent
    acknowledged_bytes: int
    rtt_seconds: float
    min_rtt_seconds: float
    segments: int  # sent with data
    retransmitted: int


def list_connections() -> Iterator[TcpConnection]:
    """Yield the TCP connections of this network namespace to other machines. OSError where the kernel lists none."""
    if not hasattr(socket, "AF_NETLINK"):
        raise OSError("no netlink sockets")
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(1.0)
            request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), 0, _STATES)
            request += bytes(_ID_BYTES)
            kernel.send(_HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _DUMP, 1, 0) + request)
            yield from _dumped(kernel, family)


def _dumped(kernel: socket.socket, family: int) -> Iterator[TcpConnection]:
    number = 0
    while True:
        reply = kernel.recv(_BUFFER_BYTES)
        position = 0
        while position + _HEADER.size <= len(reply):
            length, kind, *_ = _HEADER.unpack_from(reply, position)
            if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < _HEADER.size:
                return
            connection = _parsed(reply[position + _HEADER.size : position + length], family)
            if connection is not None:
                yield connection
            number += 1
            if number >= MAX_CONNECTIONS:
                return
            position += (length + 3) & ~3


def _parsed(message: bytes, family: int) -> TcpConnection | None:
    """Return a connection to another machine; None for others, and for kernels that return less."""
    if len(message) < _MESSAGE_BYTES:
        return None
    _, state, *_ = _MESSAGE.unpack_from(message)
    _, port = _PORTS.unpack_from(message, 4)
    size = 4 if family == socket.AF_INET else 16
    own, peer = (ipaddress.ip_address(message[begin : begin + size]) for begin in (8, 24))
    *_, inode = _QUEUES.unpack_from(message, 4 + _ID_BYTES)
    mapped = getattr(peer, "ipv4_mapped", None)
    if peer.is_loopback or peer == own or (mapped is not None and mapped.is_loopback):
        return None
    info = _attribute(message, _INET_DIAG_INFO)
    if len(info) < _INFO_BYTES:
        return None
    offsets = (_UNACKED, _RTT, _TOTAL_RETRANS, _MIN_RTT, _DATA_SEGS_OUT)
    unacknowledged, rtt, retransmitted, min_rtt, segments = (
        struct.unpack_from("=I", info, offset)[0] for offset in offsets
    )
    return TcpConnection(
        inode=inode,
        peer=str(mapped or peer),
        port=port,
        is_connecting=state == _SYN_SENT,
        is_waiting=state != _SYN_SENT and unacknowledged > 0,
        acknowledged_bytes=struct.unpack_from("=Q", info, _BYTES_ACKED)[0],
        rtt_seconds=rtt / 1e6,
        min_rtt_seconds=min_rtt / 1e6 if min_rtt != _NO_MIN_RTT else 0.0,
        segments=segments,
        retransmitted=retransmitted,
    )


def _attribute(message: bytes, wanted: int) -> bytes:
    position = _MESSAGE_BYTES
    while position + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, position)
        if kind == wanted:
            return message[position + _ATTRIBUTE.size : position + length]
        if length < _ATTRIBUTE.size:
            break
        position += (length + 3) & ~3
    return b""
