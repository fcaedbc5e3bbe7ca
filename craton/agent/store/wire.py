"""The wire protocol of the rendezvous store.

Client and server each send a greeting with a random nonce. The client then proves that it knows the run's secret, and
the server answers with its own proof. A key derived from the secret and both nonces signs every later frame, together
with its direction and number. So no frame can be forged, replayed or reordered. Frames are not encrypted.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence

GREETING = b"craton-store-1\n"
NONCE_BYTES, MAC_BYTES = 16, 32
HELLO_BYTES = len(GREETING) + NONCE_BYTES
MAX_FRAME_BYTES = 64 << 20
DONE, WRONG = b"ok", b"wrong"  # the first field of an answer

_LENGTH = struct.Struct(">I")
_COUNT = struct.Struct(">Q")
HEAD_BYTES = _LENGTH.size + MAC_BYTES


class StoreError(ConnectionError):
    """The store cannot be reached, or a connection to it ended."""


class StoreTimeoutError(StoreError):
    """A key was not set in time."""


class StoreSession:
    """One side of an authenticated connection: signs what it sends, verifies what it receives."""

    def __init__(self, secret: bytes, client_nonce: bytes, server_nonce: bytes, is_client: bool) -> None:
        nonces = client_nonce + server_nonce
        self._key = hmac.digest(secret, b"craton store session" + nonces, "sha256")
        proofs = [hmac.digest(self._key, b"proof of the " + side, "sha256") for side in (b"client", b"server")]
        self.own_proof, self.expected_proof = proofs if is_client else reversed(proofs)
        self._directions = (b">", b"<") if is_client else (b"<", b">")
        self._sent = self._received = 0

    def frame(self, fields: Sequence[bytes]) -> bytes:
        """Return the next frame to send."""
        body = pack(fields)
        mac = self._mac(self._directions[0], self._sent, body)
        self._sent += 1
        return _LENGTH.pack(len(body)) + mac + body

    def open(self, mac: bytes, body: bytes) -> list[bytes]:
        """Return the fields of the next frame; ValueError if the other side did not sign it."""
        if not hmac.compare_digest(mac, self._mac(self._directions[1], self._received, body)):
            raise ValueError("a frame is not signed with the key of this connection")
        self._received += 1
        return unpack(body)

    def _mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, direction + _COUNT.pack(number) + body, "sha256")


def body_bytes(head: bytes | bytearray) -> int:
    """Return the length of the body that follows the head of a frame."""
    (length,) = _LENGTH.unpack_from(head)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"frame length {length:,} exceeds the limit of {MAX_FRAME_BYTES:,} bytes")
    return int(length)


def pack(fields: Sequence[bytes]) -> bytes:
    return b"".join(part for field in fields for part in (_LENGTH.pack(len(field)), field))


def unpack(body: bytes) -> list[bytes]:
    """Split a body into its fields; ValueError if it is malformed."""
    fields, place = [], 0
    while place < len(body):
        if place + _LENGTH.size > len(body):
            raise ValueError("a frame ends inside the length of a field")
        (length,) = _LENGTH.unpack_from(body, place)
        place += _LENGTH.size
        if place + length > len(body):
            raise ValueError("a frame ends inside a field")
        fields.append(body[place : place + length])
        place += length
    return fields
