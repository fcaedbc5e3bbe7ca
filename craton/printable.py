"""Make untrusted text safe to print on a terminal.

A run's name, a log line or a message of a run can hold escape sequences that clear the screen, change the window title
or type commands, and marks that reverse the order of the following text. They are shown as `\\x1b` and not executed.
"""

from __future__ import annotations

import re

# Control characters except tab and newline; bidirectional marks; surrogates that no terminal can print.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_COLOURS = re.compile("(\x1b\\[[0-9;:]*m)")
_RESET = "\x1b[0m"


def printable(text: str) -> str:
    """Return the text with every control character escaped."""
    return text if text.isascii() and text.isprintable() else _UNSAFE.sub(_written_out, text)


def printable_line(text: str) -> str:
    """Like `printable` for a log line: colours stay, and end with the line."""
    if "\x1b" not in text:
        return printable(text)
    parts = _COLOURS.split(text)
    safe = "".join(part if index % 2 else printable(part) for index, part in enumerate(parts))
    return safe + _RESET if len(parts) > 1 else safe


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
