"""Read from the end of a log why its process ended: pure, bounded, and never raises.

It finds the last Python traceback, also behind the prefixes of torchrun, Ray and loggers, in a box of rich, in a chain
of exceptions and inside a data loader's worker. Errors that only say "a worker failed" give way to that worker's own.
Without a traceback, the crash report of the interpreter or of a C++ program counts, else the last line that reads as
an error, else the last line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from craton.telemetry.error_reports.report import (
    MAX_MESSAGE_LINES,
    ErrorReport,
    RaisedError,
    bounded,
    is_echo,
    report_chain,
)

MAX_TEXT, MAX_LINES, MAX_LINE, MAX_PREFIX, MAX_CHAIN, MAX_FRAMES = 64 << 10, 2000, 2000, 200, 8, 200
ENDING_LINES = 40  # at the end, where a program prints why it ends
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HEADER = re.compile(r"^(?P<prefix>.*?)(?P<kind>Original |Exception Group |)Traceback \(most recent call last\)")
_GROUP = re.compile(r"^\s*(?:\|\s?)+|^\s*\+[-+ ]*(?:\d+ -+)?\s?")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"\n]{1,400})", line (?P<line>\d{1,9})(?:, in (?P<function>.{1,200}))?\s*$')
_RICH_FRAME = re.compile(r"^\s*│\s+(?P<file>[^\s│]{1,400}\.py):(?P<line>\d{1,9}) in (?P<function>[^\s│]{1,120})")
_RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]{0,150}?)(?:: ?(?P<message>.*))?$")
_GROUPS = ("ExceptionGroup: ", "BaseExceptionGroup: ")
_LINKS = (
    "The above exception was the direct cause of the following exception",
    "During handling of the above exception, another exception occurred",
)
# One log may hold the lines of several processes: torchrun's ranks, Ray's actors.
_PROCESS = re.compile(r"^(?:\[(?:rank|default)\d+\]:|\([\w.:]+ pid=\d+[^)]{0,60}\)) ?")
_WRAPPERS = ("ChildFailedError", "CalledProcessError", "ProcessExitedException", "SignalException")
_ELASTIC = re.compile(r"Signal \d+ \(SIG\w+\) received by PID \d+|exitcode\s*: -?\d+")
_FATAL = re.compile(r"Fatal Python error: (?P<message>.{1,300})")
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+")
_CRASH_FRAME = re.compile(r'^\s*File "(?P<file>[^"\n]{1,400})", line (?P<line>\d{1,9}) in (?P<function>.{1,200})$')
_THROWN = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']{1,150})'")
_WHAT = re.compile(r"^\s*what\(\):\s*(?P<message>.{1,400})")
_KILLED = re.compile(
    r"oom.kill|Out [Oo]f [Mm]emory|OOMKilled|^\s*Killed\s*$|\bKilled {2,}|\bBus error\b|\bSegmentation fault\b|"
    r"^\s*Aborted\b|\bIllegal instruction\b|\bFloating point exception\b|CPU time limit exceeded|"
    r"File size limit exceeded"
)
_SYNTAX = ("SyntaxError", "IndentationError", "TabError")
_ERROR_WORDS = re.compile(
    r"\b(?:error|fatal|exception|panic(?:ked)?|failed|cannot|can't|could not|not found|denied|no such|aborted|refused|"
    r"timed out|unrecognized|invalid|killed|unknown)\b",
    re.IGNORECASE,
)
_NOISE = re.compile(
    r"^[\s=*~^|+\-_.#│╭╰─]*$|^srun: error: .*Exited with exit code|^srun: (?:Terminating|Job step)|"
    r"^make(?:\[\d+\])?: \*\*\*|resource_tracker|Process finished with exit code|\d+%\||it/s|s/it|"
    r"^\s*warnings\.warn|\bWarning: |To enable traceback see|Set the environment variable|^\s+|^INFO\b|^DEBUG\b"
)


@dataclass(frozen=True)
class _Found:
    """A chain of exceptions in the text."""

    chain: tuple[RaisedError, ...]  # the root first
    process: str  # prefix of its lines; "": none
    end: int  # index of the line after it
    is_ignored: bool  # Python printed it and went on

    @property
    def is_wrapper(self) -> bool:
        return self.chain[-1].name in _WRAPPERS

    @property
    def is_echo(self) -> bool:
        return is_echo(self.chain[-1].type, self.chain[-1].message)


def read_error(text: str) -> ErrorReport | None:
    """Return why a program ended, from the end of its output; None if it printed nothing."""
    plain = _ANSI.sub("", text[-MAX_TEXT:].replace("\r\n", "\n"))
    lines = [line.rpartition("\r")[2][:MAX_LINE].rstrip() for line in plain.split("\n")][-MAX_LINES:]
    report = _from_tracebacks(lines)
    found = report[0] if report else None
    after = lines[report[1] :] if report else lines[-ENDING_LINES:]
    killed = next((line.strip() for line in reversed(after) if _KILLED.search(line)), "")
    crash = _crash(lines)
    if crash is not None and (report is None or crash[1] > report[1]):
        found = crash[0]
    elif killed:
        found = ErrorReport(message=bounded(killed), outer=found.headline if found else "")
    if found is None:
        found = _last_words(lines)
    return None if found is None else replace(found, source="log")


def _from_tracebacks(lines: Sequence[str]) -> tuple[ErrorReport, int] | None:
    """Return the report of the traceback that counts, and the index of the line after the last one."""
    chains = [
        found for process, part in _streams(lines).items() for found in _chains(process, part) if not found.is_ignored
    ]
    chains.sort(key=lambda found: found.end)
    if not chains:
        return None
    end = chains[-1].end
    own = [found for found in chains if not found.is_wrapper]
    if not own:
        how = next((match[0] for line in reversed(lines) if (match := _ELASTIC.search(line))), "")
        report = report_chain(chains[-1].chain)
        return replace(report, message=bounded(f"{how}\n{report.message}")), end
    newest = {found.process: found for found in own}  # the last one of each process
    several = list(newest.values()) if len(newest) > 1 else own if len(own) < len(chains) else [own[-1]]
    chosen = next((found for found in several if not found.is_echo), several[-1])
    return report_chain(chosen.chain), end


def _streams(lines: Sequence[str]) -> dict[str, list[tuple[int, str]]]:
    """Return the lines of each process, with their indices; those without a prefix belong to the process ""."""
    streams: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(lines):
        match = _PROCESS.match(line)
        process = match[0].strip() if match else ""
        streams.setdefault(process, []).append((number, _unboxed(line[match.end() :] if match else line)))
    return streams


def _unboxed(line: str) -> str:
    """Return a line without the marks of an exception group."""
    return _GROUP.sub("", line) if line.lstrip()[:1] in ("|", "+") else line


def _chains(process: str, part: Sequence[tuple[int, str]]) -> list[_Found]:
    lines = [line for _, line in part]
    found: list[_Found] = []
    number = 0
    while number < len(lines):
        header = _HEADER.match(lines[number])
        error, end = _parse(lines, number, header) if header is not None else (None, number)
        if header is None or error is None:
            number += 1
            continue
        before = found[-1] if found else None
        last = part[end - 1][0] + 1
        if before is not None and _is_linked(lines, number):
            found[-1] = _Found((*before.chain, error)[-MAX_CHAIN:], process, last, before.is_ignored)
        elif before is not None and header["kind"] == "Original ":  # of a data loader's worker: the root
            found[-1] = _Found((error, *before.chain)[:MAX_CHAIN], process, last, before.is_ignored)
        else:
            is_ignored = any("Exception ignored" in line for line in lines[max(0, number - 2) : number])
            found.append(_Found((error,), process, last, is_ignored))
        number = end
    return found


def _is_linked(lines: Sequence[str], number: int) -> bool:
    """Return whether the sentence between two exceptions of a chain stands above this line."""
    above = [line for line in lines[max(0, number - 6) : number] if line.strip(" |│")][-2:]
    return any(words in line for line in above for words in _LINKS)


def _parse(lines: Sequence[str], start: int, header: re.Match[str]) -> tuple[RaisedError | None, int]:
    """Parse one traceback; return its exception and the index of the line after it."""
    is_box = "╭" in header["prefix"]
    strip = _stripper("" if is_box else header["prefix"])
    frames: list[tuple[str, int, str]] = []
    for number in range(start + 1, len(lines)):
        line = strip(lines[number])
        if (match := (_RICH_FRAME if is_box else _FRAME).match(line)) is not None:
            frames.append((match["file"], int(match["line"]), (match["function"] or "").strip()))
        elif line[:1] in ("", " ", "\t") or (is_box and line.startswith(("│", "╰", "╭"))) or line.startswith(_GROUPS):
            continue
        elif (raised := _RAISED.match(line)) is not None:
            message, end = _message(lines, number, strip, raised["message"] or "")
            return RaisedError(raised["type"], message, tuple(frames[-MAX_FRAMES:])), end
        else:
            return None, number
    return None, len(lines)


def _message(lines: Sequence[str], number: int, strip: Callable[[str], str], first: str) -> tuple[str, int]:
    """Return the message of an exception with its further lines, and the index of the line after it."""
    parts, end = [first], number + 1
    while end < len(lines) and len(parts) < MAX_MESSAGE_LINES + 2:
        line = strip(lines[end])
        if not line.strip() or _HEADER.match(line) or _KILLED.search(line) or any(words in line for words in _LINKS):
            break
        parts.append(line)
        end += 1
    return "\n".join(parts), end


def _stripper(prefix: str) -> Callable[[str], str]:
    """Return a function that removes what a logger puts before each line of a traceback: a time, a level, a name."""
    if not prefix:
        return lambda line: line
    # Times and counters differ from line to line.
    same = re.compile("^" + re.sub(r"\d+", r"\\d+", re.escape(prefix[:MAX_PREFIX])))
    return lambda line: same.sub("", line, count=1)


def _crash(lines: Sequence[str]) -> tuple[ErrorReport, int] | None:
    """Return the crash report of the interpreter (faulthandler) or of the C++ runtime, and its line."""
    for number in range(len(lines) - 1, -1, -1):
        if (fatal := _FATAL.search(lines[number])) is not None:
            return _interpreter_crash(fatal["message"], lines[number:]), number
        if (thrown := _THROWN.search(lines[number])) is not None:
            following = lines[number : number + 4]
            what = next((match["message"] for line in following if (match := _WHAT.match(line))), "")
            return ErrorReport(type=thrown["type"], message=bounded(what)), number
    return None


def _interpreter_crash(message: str, lines: Sequence[str]) -> ErrorReport:
    frames: list[tuple[str, int, str]] = []  # innermost first
    is_current = False
    for line in lines[1:]:
        if _THREAD.match(line):
            is_current = line.startswith("Current")
        elif is_current and (match := _CRASH_FRAME.match(line)) is not None:
            frames.append((match["file"], int(match["line"]), match["function"]))
        elif is_current and frames:
            break
    return report_chain((RaisedError("Fatal Python error", message, tuple(frames[::-1])),))


def _last_words(lines: Sequence[str]) -> ErrorReport | None:
    """Return the last line that reads as an error, else the last line that is not noise."""
    ending = [line for line in lines[-ENDING_LINES:] if line.strip()]
    words = [line.strip() for line in ending if not _NOISE.search(line)]
    chosen = next((line for line in reversed(words) if _ERROR_WORDS.search(line)), words[-1] if words else "")
    if not chosen and ending:
        chosen = ending[-1].strip()
    if not chosen:
        return None
    ours = next((chosen.removeprefix(mark) for mark in ("craton: ", "error: ") if chosen.startswith(mark)), None)
    if ours is not None:
        return report_chain((RaisedError("", ours),))
    raised = re.match(r"^([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)): (.*)$", chosen)
    if raised is None:
        return report_chain((RaisedError("", chosen),))
    # A SyntaxError of the program itself has no traceback.
    frames = [match for line in lines[-ENDING_LINES:] if (match := _FRAME.match(line)) and not match["function"]]
    place = [(frames[-1]["file"], int(frames[-1]["line"]), "")] if frames and raised[1] in _SYNTAX else []
    return report_chain((RaisedError(raised[1], raised[2], place),))
