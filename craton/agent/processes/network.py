"""The network of a node's ranks: the interface they talk over, and the ports on which they meet.

gloo and NCCL authenticate no client, and gloo listens on any address that the host's name has. They are kept to the
interface of the address at which the other nodes reach this one: on one machine to the loopback.

Ports lie below those the kernel gives to outgoing connections. A process that dials a port again and again until
another one listens may otherwise be given just that port, connect to itself, and keep the listener out.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import random
import socket
import struct
from collections.abc import Mapping, MutableMapping
from pathlib import Path

GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

MAX_ADDRESSES = 256

_GET_LIST = 0x8912  # SIOCGIFCONF of linux/sockios.h
_ENTRY_BYTES = 40 if struct.calcsize("P") == 8 else 32  # of a struct ifreq
_NAME_BYTES = 16

FIRST_PORT = 20_000
OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_OUTGOING_PORT = 32_768  # Linux's own choice
PORT_TRIES = 100


def pin_interfaces(
    address: str, environment: MutableMapping[str, str] = os.environ, others: Mapping[str, str] | None = None
) -> None:
    """Sets the variables that tell gloo and NCCL their interface, unless the environment or `others` do already.

    Between machines NCCL keeps its own choice: it may use several networks at once, and binds to their addresses only.
    """
    interface = interface_of(address)
    if interface is None:
        return
    names = (GLOO_VARIABLE, NCCL_VARIABLE) if is_loopback(address) else (GLOO_VARIABLE,)
    for name in names:
        if not environment.get(name) and not (others or {}).get(name):
            environment[name] = interface


def address_towards(host: str, port: int) -> str:
    """The address of this machine that a connection to `host` would come from; OSError when there is no way there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing: asks which way it would go
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine reach the address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def interface_of(address: str) -> str | None:
    """The interface that has an address; None where it cannot be found out."""
    if is_loopback(address):
        names = {name for _, name in socket.if_nameindex()}
        return next((name for name in ("lo", "lo0") if name in names), None)  # of Linux, of macOS
    try:
        packed = socket.inet_aton(socket.gethostbyname(address))
    except OSError:
        return None
    return _interfaces().get(packed)


def _interfaces() -> dict[bytes, str]:
    """IPv4 address → interface; aliases such as eth0:1 count as the interface they belong to. Linux only."""
    if not os.path.isdir("/proc/sys/net"):
        return {}
    room = ctypes.create_string_buffer(MAX_ADDRESSES * _ENTRY_BYTES)
    request = struct.pack("iP", len(room), ctypes.addressof(room))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        (used,) = struct.unpack_from("i", fcntl.ioctl(probe.fileno(), _GET_LIST, request))
    result = {}
    for begin in range(0, used, _ENTRY_BYTES):
        entry = room.raw[begin : begin + _ENTRY_BYTES]
        name = entry[:_NAME_BYTES].partition(b"\0")[0].decode().partition(":")[0]
        result[entry[_NAME_BYTES + 4 : _NAME_BYTES + 8]] = name
    return result


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nothing listens on."""
    last = FIRST_OUTGOING_PORT
    with contextlib.suppress(OSError, ValueError):
        last = int(OUTGOING_PORTS.read_text().split()[0])
    candidates = [random.randrange(FIRST_PORT, last) for _ in range(PORT_TRIES)] if last > FIRST_PORT else []
    for port in (*candidates, 0):  # where there is no such port, any
        with contextlib.suppress(OSError), socket.create_server((host, port)) as probe:
            return int(probe.getsockname()[1])
    raise OSError(f"no TCP port of {host} is free")
