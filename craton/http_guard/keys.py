"""Keys and tokens: compared in constant time, and stored in files that only their owner can read."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path

from craton.errors import CratonError

MIN_TOKEN_CHARACTERS = 16


class AccessError(CratonError):
    """A key file cannot be used, or an address must not be listened on."""


def is_same_key(given: str, right: str) -> bool:
    return hmac.compare_digest(key_bytes(given), key_bytes(right))


def key_bytes(text: str) -> bytes:
    """Encode a key, also one that is not valid text, as JSON allows (half a surrogate pair)."""
    return text.encode(errors="surrogatepass")


def read_token(path: Path | None) -> str:
    """Return the token in a file that only its owner can read. Write a new one if the file does not exist; without a
    path, only generate one."""
    if path is None:
        return secrets.token_urlsafe(32)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return _existing_token(path)
    except OSError as error:
        raise AccessError(f"cannot write the token file {path}: {error.strerror}") from None
    token = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token


def _existing_token(path: Path) -> str:
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise AccessError(f"other users can read the token file {path}; run `chmod 600 {path}`")
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AccessError(f"cannot read the token file {path}: {error}") from None
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise AccessError(
            f"the token in {path} has {len(token)} characters, the minimum is {MIN_TOKEN_CHARACTERS}; remove the file "
            "to get a new one"
        )
    return token
