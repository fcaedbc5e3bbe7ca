"""The network of a node's ranks: the interface they use, and the ports of their rendezvous.

gloo and NCCL do not authenticate clients, and gloo listens on any address of the host's name. They are pinned to the
interface of the address at which other nodes reach this one; on a single machine to loopback.

Ports are below the ephemeral range of the kernel. A process that dials a port until another one listens may otherwise
get that same port as its source port, connect to itself, and block the listener.
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
_GET_FLAGS, _UP_AND_RUNNING = 0x8913, 0x41  # SIOCGIFFLAGS; IFF_UP, IFF_RUNNING of linux/if.h

FIRST_PORT = 20_000
OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_OUTGOING_PORT = 32_768  # Linux's own choice
PORT_TRIES = 100


def pin_interfaces(
    address: str, environment: MutableMapping[str, str] = os.environ, others: Mapping[str, str] | None = None
) -> None:
    """Set the interface variables of gloo and NCCL, unless the environment or `others` already do.

    Across machines NCCL keeps its own choice: it may use several networks at once, and binds only to their addresses.
    """
    interface = interface_of(address)
    if interface is None:
        return
    names = (GLOO_VARIABLE, NCCL_VARIABLE) if is_loopback(address) else (GLOO_VARIABLE,)
    for name in names:
        if not environment.get(name) and not (others or {}).get(name):
            environment[name] = interface


def address_towards(host: str, port: int) -> str:
    """Return this machine's source address for a connection to `host`; OSError if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # UDP: sends nothing, only looks up the route
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine can reach the address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def interface_of(address: str) -> str | None:
    """Return the interface that has an address; None if unknown."""
    if is_loopback(address):
        names = {name for _, name in socket.if_nameindex()}
        return next((name for name in ("lo", "lo0") if name in names), None)  # of Linux, of macOS
    try:
        packed = socket.inet_aton(socket.gethostbyname(address))
    except OSError:
        return None
    return _interfaces().get(packed)


def down_interface(name: str | None) -> str:
    """Return the interface of this name if it is down or has no link; "" if it is up, or not known."""
    if not name or not os.path.isdir("/proc/sys/net"):
        return ""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16s24x", name.encode()[: _NAME_BYTES - 1])
        (flags,) = struct.unpack_from("h", fcntl.ioctl(probe.fileno(), _GET_FLAGS, request), _NAME_BYTES)
        return "" if flags & _UP_AND_RUNNING == _UP_AND_RUNNING else name
    return ""


def _interfaces() -> dict[bytes, str]:
    """Return IPv4 address → interface; aliases such as eth0:1 count as their interface. Linux only."""
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
    """Return a TCP port that nothing listens on."""
    last = FIRST_OUTGOING_PORT
    with contextlib.suppress(OSError, ValueError):
        last = int(OUTGOING_PORTS.read_text().split()[0])
    # Not the program's own generator: processes with the same seed would choose the same ports.
    draw = random.SystemRandom()
    candidates = [draw.randrange(FIRST_PORT, last) for _ in range(PORT_TRIES)] if last > FIRST_PORT else []
    for port in (*candidates, 0):  # any port if none of them is free
        with contextlib.suppress(OSError), socket.create_server((host, port)) as probe:
            return int(probe.getsockname()[1])
    raise OSError(f"no free TCP port on {host}")
