"""`ErrorReport`: why a process ended, in its own words.

It is written as the field `error` of the events `broken`, `failed` and `rank_ended`. Every text is bounded, so that a
report fits into one line of the pipe to the agent. Frames are `file:line in function`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

MAX_MESSAGE, MAX_MESSAGE_LINES, MAX_FRAME, MAX_OUTER, MAX_TYPE = 500, 4, 240, 300, 120
CRATON = str(Path(__file__).parents[2]).replace("\\", "/") + "/"
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python\d|^<frozen |^<__array_function__")
_LAUNCHER = re.compile(r"[/\\]bin[/\\][^/\\.]+$")
_ERRNO = re.compile(r"\[Errno (-?\d+)\]")
_PATH = re.compile(r"(?:\[Errno -?\d+\] [^:\n]*|No such file or directory|Permission denied): '([^'\n]{1,200})'")
# Exceptions that libraries use to say "not here": the exception that was raised while one was handled is the cause.
_ALWAYS_DETAIL = ("Empty", "StopIteration", "StopAsyncIteration", "CancelledError", "HTTPError", "HTTPStatusError")
_DETAIL_IN_LIBRARIES = ("KeyError", "IndexError", "AttributeError", "TypeError", "LocalEntryNotFoundError")
_DETAIL_IN_CRATON = ("ValueError", "OverflowError", "UnicodeDecodeError", "JSONDecodeError", "ValidationError")
# How a collective, the rendezvous store or a peer's socket fails when the rank at the other end is gone.
_ECHO = re.compile(
    r"gloo|\bNCCL\b|nccl(?:Remote|System|Internal|Unhandled)|rendezvous store|ProcessGroup|TCPStore|"
    r"DistBackendError|DistNetworkError|DistStoreError|Socket Timeout|Connection closed by peer|RendezvousConnection"
)
_IS_NEVER_ECHO = re.compile(
    r"waiting for (?:clients|workers)|EADDRINUSE|address already in use|mismatch", re.IGNORECASE
)


@dataclass(frozen=True)
class ErrorReport:
    """The root cause of a process's end, and the exception that it became."""

    type: str = ""  # of the exception, as a traceback prints it; "": the program is not Python
    message: str = ""  # first lines
    errno: int | None = None  # of an OSError
    path: str = ""  # file name of an OSError
    user_frame: str = ""  # innermost frame outside of libraries and Craton
    last_frame: str = ""  # innermost frame
    outer: str = ""  # "Type: message" of the exception that was raised because of it; "": none
    phase: str = ""  # ledger kind, and activities in the background after `+`
    step: int | None = None
    is_echo: bool = False  # most likely the consequence of another rank's end
    source: str = "rank"  # rank: by the process itself; log: read from its log; exit: from its exit code alone

    @property
    def headline(self) -> str:
        """Return `Type: first line of the message`."""
        first = self.message.partition("\n")[0]
        return ": ".join(part for part in (self.type.rpartition(".")[2], first) if part)

    @property
    def line(self) -> str:
        """Return the report in one line, with the frame that a user can act on."""
        is_ours = self.type.startswith("craton.")  # its messages need no frame of ours
        frame = self.user_frame or ("" if is_ours else self.last_frame)
        text = f"{self.headline} ({frame})" if frame and frame not in self.headline else self.headline
        # The message of an exception that repeats its cause adds nothing.
        is_new = self.outer and self.message.partition("\n")[0] not in self.outer
        return f"{text}, then {self.outer}" if is_new else text

    def to_fields(self) -> dict[str, Any]:
        """Return the fields that are set, for an event."""
        defaults = {item.name: item.default for item in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}

    @classmethod
    def from_fields(cls, document: Any) -> ErrorReport | None:
        """Return the report of an event; None if there is none. Values of a wrong type are dropped."""
        if not isinstance(document, Mapping):
            return None
        texts = ("type", "message", "path", "user_frame", "last_frame", "outer", "phase", "source")
        values: dict[str, Any] = {
            name: document[name][: MAX_MESSAGE + MAX_FRAME] for name in texts if isinstance(document.get(name), str)
        }
        for name in ("errno", "step"):
            if isinstance(document.get(name), int) and not isinstance(document[name], bool):
                values[name] = document[name]
        report = cls(**values, is_echo=document.get("is_echo") is True)
        return report if report.type or report.message else None


@dataclass(frozen=True)
class RaisedError:
    """One exception of a chain, with its frames, outermost first."""

    type: str
    message: str
    frames: Sequence[tuple[str, int, str]] = ()  # file, line, function
    errno: int | None = None
    path: str = ""

    @property
    def name(self) -> str:
        return self.type.rpartition(".")[2]


def report_chain(chain: Sequence[RaisedError]) -> ErrorReport:
    """Return the report of a chain of exceptions, the root first. The root counts, unless it is only how a library
    signals that something is not there."""
    chosen = 0
    while chosen < len(chain) - 1 and _is_detail(chain[chosen]):
        chosen += 1
    root, last = chain[chosen], chain[-1]
    user = next((frame for frame in reversed(root.frames) if is_user_code(frame[0], frame[2])), None)
    if user is None:  # a library raised the root in a thread of its own
        everything = [frame for error in chain for frame in error.frames]
        user = next((frame for frame in reversed(everything) if is_user_code(frame[0], frame[2])), None)
    errno, path = root.errno, root.path
    if errno is None and (match := _ERRNO.search(root.message)):
        errno = int(match[1])
    if not path and (found := _PATH.search(root.message)):
        path = found[1]
    report = ErrorReport(
        type=root.type[:MAX_TYPE],
        message=bounded(root.message),
        errno=errno,
        path=path[:MAX_FRAME],
        user_frame=_text(user) if user else "",
        last_frame=_text(root.frames[-1]) if root.frames else "",
        outer=f"{last.name}: {last.message.strip().partition(chr(10))[0]}"[:MAX_OUTER] if last is not root else "",
    )
    return replace(report, is_echo=is_echo(report.type, report.message))


def is_echo(kind: str, message: str) -> bool:
    """Return whether an error reads as the consequence of another rank's end."""
    if _IS_NEVER_ECHO.search(message):
        return False
    is_network = kind.rpartition(".")[2] in ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
    return is_network and bool(_ECHO.search(f"{kind}: {message}"))


def is_user_code(file: str, function: str = "") -> bool:
    """Return whether a frame is in the user's own code: not Craton, an installed package or Python itself."""
    if file.startswith("<"):
        return file in ("<string>", "<stdin>") and function == "<module>"
    name = file.replace("\\", "/")
    return not (_LIBRARY.search(file) or _LAUNCHER.search(file) or name.startswith(CRATON))


def bounded(message: str) -> str:
    """Return the first lines of a message that hold anything."""
    lines = [line.rstrip() for line in message[: 8 * MAX_MESSAGE].splitlines() if line.strip()]
    return "\n".join(lines[:MAX_MESSAGE_LINES])[:MAX_MESSAGE]


def _is_detail(error: RaisedError) -> bool:
    if error.name in _ALWAYS_DETAIL:
        return True
    file, _, function = error.frames[-1] if error.frames else ("", 0, "")
    if file.startswith(CRATON) and error.name in _DETAIL_IN_CRATON:  # its own error says more
        return True
    return error.name in _DETAIL_IN_LIBRARIES and (not file or not is_user_code(file, function))


def _text(frame: tuple[str, int, str]) -> str:
    file, line, function = frame
    where = f"{file[-(MAX_FRAME - 60) :]}:{line}"
    return (f"{where} in {function}" if function else where)[:MAX_FRAME]
