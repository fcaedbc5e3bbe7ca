"""Requests as bytes, which no HTTP library would send, and the heads that a server must not judge by half."""

from __future__ import annotations

import contextlib
import socket

from waiting import PATIENCE_SECONDS


def raw_answer(port: int, request: bytes, source: str = "127.0.0.1") -> bytes:
    """The first bytes of the answer to these bytes; empty where the connection was closed without any."""
    address = ("127.0.0.1", port)
    with socket.create_connection(address, timeout=PATIENCE_SECONDS, source_address=(source, 0)) as connection:
        with contextlib.suppress(ConnectionError):  # refused before all of it was sent
            connection.sendall(request)
        try:
            return connection.recv(4096)
        except ConnectionError:
            return b""


def ambiguous_heads(port: int) -> list[str]:
    """Header lines of which one part names this server and the other another one."""
    own, other = f"127.0.0.1:{port}", "attacker.example"
    host = f"Host: {own}\r\n"
    return [
        f"Host: {other}\r\n{host}",
        f"{host}Host: {other}\r\n",
        f"{host}hOST: {own}\r\n",
        f"{host}Origin: http://{other}\r\nOrigin: http://{own}\r\n",
        f"{host}Sec-Fetch-Site: cross-site\r\nSec-Fetch-Site: same-origin\r\n",
        f"{host}Authorization: Bearer wrong\r\nAuthorization: Bearer wrong\r\n",
    ]


def foreign_heads(port: int) -> list[str]:
    """Header lines that name another server, or no server, in an unusual way."""
    own, other = f"127.0.0.1:{port}", "attacker.example"
    hosts = [f"user@{own}", f"{own}@{other}", "127.0.0.1.", f"{own}/", "127.0.0.1:", "127.0.0.1:99999"]
    hosts += ["127.0.0.1:0x50", f"{own} {other}", f"{own},{other}", "127.0.0.1:8\xb2", "[::1", "0x7f.1", ""]
    folded = [f"Host: {own}\r\n .{other}\r\n", f"Host:\r\n {other}\r\n", f"X: y\r\n Host: {own}\r\n"]
    return [f"Host: {host}\r\n" for host in hosts] + folded
