"""Read the progress of a job's own command from the output of one of its processes, or from metrics that it serves.

Readings are recorded as the training loop would record them, and written to the rank's page. So `ps` shows the step,
and the coordinator detects hangs and failures without new steps. No output and no pattern can block the agent: lines
are truncated, each look reads a bounded part of the log, and patterns that use too much CPU time are switched off with
a warning. A thread scrapes the metrics.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from craton.agent.coordination import HANG_STEPS
from craton.agent.errors import LaunchError
from craton.agent.node import NodeProcesses
from craton.agent.processes import RankProcess, fill
from craton.agent.records import NodeRecords
from craton.agent.slot import RankSlot
from craton.formatting import counted, setting
from craton.telemetry.files import open_regular
from craton.telemetry.rank import STEADY, monotonic_of

LINE_BYTES = 4096  # longer lines are truncated: a matrix, or a file without newlines
LOOK_BYTES = 256 << 10  # read per look; of faster output only the end is read
MATCH_SECONDS = 0.1  # CPU time for all lines of a look
SLOW_LOOKS = 3  # slow looks after which the patterns are switched off
MAX_RECORDS = 100  # per look
USUAL_OF = 20  # progress reports whose median interval is the usual one
UNSEEN_SECONDS, UNSEEN_LINES = 60.0, 20  # after which to warn that no line has matched
MIN_PATIENCE_SECONDS = 4.0  # the agent of a busy node may look late
NEVER_SECONDS = 1e9  # no hang detection, or the pace is not known yet
ANSWER_BYTES = 4 << 20
ANSWER_SECONDS = 2.0

_ENDS = re.compile(rb"[\r\n]+")  # progress bars use \r
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SCALES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


class PatternError(RuntimeError):
    """A pattern takes too long."""


@dataclass(frozen=True)
class Reading:
    """The values of one line, or of one scrape."""

    values: dict[str, float]  # by the names in the job file
    moment: float  # steady clock, like all times here: they are subtracted from each other


class LogTail:
    """Reads a growing log, from its length when the process began."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path, self._offset = path, offset
        self._rest = b""
        self._is_inside = False  # inside a line whose start was skipped
        self.written_at = 0.0  # steady clock: the last write, by the file system

    def read(self, to_the_end: bool = False) -> list[str]:
        """Return the lines completed since the last call; with `to_the_end` also a last line without a newline, as the
        process has ended."""
        data = self._new_bytes()
        if self._is_inside and data:
            end = _ENDS.search(data)
            self._is_inside, data = end is None, data[end.end() :] if end else b""
        *lines, rest = _ENDS.split(self._rest + data)
        if to_the_end:
            lines, rest = [*lines, rest], b""
        self._rest = rest[:LINE_BYTES]
        return [_COLOURS.sub("", line[:LINE_BYTES].decode(errors="replace")) for line in lines if line]

    def _new_bytes(self) -> bytes:
        """Return the bytes written since the last call, or the end of them."""
        try:
            with open_regular(self._path) as handle:
                size = handle.seek(0, os.SEEK_END)
                if size == self._offset:
                    return b""
                if size < self._offset or size - self._offset > LOOK_BYTES:  # truncated, or too much to read
                    self._offset, self._rest = max(0, size - LOOK_BYTES), b""
                    self._is_inside = self._offset > 0
                handle.seek(self._offset)
                data = handle.read(LOOK_BYTES)
                self.written_at = STEADY.now() - (time.time() - os.fstat(handle.fileno()).st_mtime)
        except OSError:
            return b""
        self._offset += len(data)
        return data


class Matcher:
    """Finds numbers in lines by the job's patterns. Use it in the main thread only."""

    def __init__(self, patterns: Sequence[str]) -> None:
        try:
            self._patterns = [re.compile(pattern) for pattern in patterns]
        except re.error as error:
            raise LaunchError(f"progress: {error.pattern!r} is not a regular expression: {error}") from error
        self.slow_looks = 0

    @property
    def is_given_up(self) -> bool:
        return self.slow_looks >= SLOW_LOOKS

    def find(self, lines: Sequence[str]) -> list[dict[str, float]]:
        """Return the values of each line that matches; when the time is up, those found until then."""
        result: list[dict[str, float]] = []
        if not lines or self.is_given_up:
            return result
        try:
            with _processor_time(MATCH_SECONDS):
                for line in lines:
                    values: dict[str, float] = {}
                    for pattern in self._patterns:
                        if match := pattern.search(line):
                            values |= _numbers(match.groupdict())
                    if values:
                        result.append(values)
        except PatternError:
            self.slow_looks += 1
        return result


class Scraper:
    """Scrapes metrics from an address at an interval, in its own thread."""

    def __init__(self, address: str, names: Mapping[str, str], seconds: float) -> None:
        self._address, self._names, self._seconds = address, dict(names), seconds
        self._found: deque[Reading] = deque(maxlen=MAX_RECORDS)
        self._counters: dict[str, tuple[float, float]] = {}  # our name → (total, moment) of the last scrape
        self._closed = threading.Event()
        self.error = ""  # why the last scrape failed
        self._thread = threading.Thread(target=self._ask_on, name="progress", daemon=True)
        self._thread.start()

    def take(self) -> list[Reading]:
        result = []
        while self._found:
            result.append(self._found.popleft())
        return result

    def close(self) -> None:
        self._closed.set()

    def _ask_on(self) -> None:
        while not self._closed.wait(self._seconds):
            try:
                text = _fetch(self._address)
                reading = self._read(text, STEADY.now())
            except (OSError, ValueError) as error:
                self.error = str(error)
                continue
            self.error = "" if reading.values else f"it serves none of {', '.join(self._names)}"
            if reading.values:
                self._found.append(reading)

    def _read(self, text: str, now: float) -> Reading:
        """Parse a scrape. A counter under a `_per_second` name becomes its rate. Samples of a counter are added; other
        metrics are averaged."""
        from prometheus_client.parser import text_string_to_metric_families

        samples: dict[str, list[float]] = {}
        counters: set[str] = set()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in self._names and math.isfinite(sample.value):
                    samples.setdefault(sample.name, []).append(sample.value)
                    if family.type == "counter" or sample.name.endswith("_total"):
                        counters.add(sample.name)
        values: dict[str, float] = {}
        for there, numbers in samples.items():
            ours = self._names[there]
            value = sum(numbers) if there in counters else sum(numbers) / len(numbers)
            if there in counters and ours.endswith("_per_second"):
                before, self._counters[ours] = self._counters.get(ours), (value, now)
                if before is None or value < before[0] or now <= before[1]:  # the first scrape, or a reset
                    continue
                value = (value - before[0]) / (now - before[1])
            values[ours] = value
        return Reading(values, now)


@dataclass
class _Course:
    """The progress of one process."""

    process: RankProcess
    tail: LogTail
    scraper: Scraper | None
    began: float
    looked_at: float
    step: int | None = None
    at: float = 0.0  # the newest step
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL_OF))
    intervals: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL_OF))
    is_estimated: bool = False  # these are upper limits
    num_lines: int = 0
    last_line: str = ""
    was_read: bool = False
    was_warned: bool = False


class CommandProgress:
    """The progress of the watched process, while this node runs it."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        processes: NodeProcesses,
        records: NodeRecords,
        warn: Callable[[str, str], None],
    ) -> None:
        self._settings, self._processes, self._records, self._warn = settings, processes, records, warn
        self._matcher = Matcher(settings.get("patterns") or ())
        self._rank = int(settings.get("rank") or 0)
        self._steps = int(settings.get("steps") or 0)  # of the job, if known
        self._is_off = False
        self._course: _Course | None = None
        if settings:
            records.booked_rank = self._rank

    def look(self) -> None:
        """Read new output and scrapes since the last look."""
        if not self._settings:
            return
        place = dict(self._processes.ranks).get(self._rank)
        process = place.process if place is not None else None
        if place is None or process is None:
            self.close()
            return
        if self._course is None or self._course.process is not process:
            self.close()
            self._course = self._begin(process)
        course = self._course
        before, course.looked_at = course.looked_at, STEADY.now()
        if process.output is not None and process.output.waiting_bytes:
            place.page.beat()  # while the disk is full, output does not reach the log: not a hang
        lines = course.tail.read(to_the_end=not process.is_running)
        matches = self._matcher.find(lines)
        readings = _timed(matches[-MAX_RECORDS:], before, course.tail.written_at, STEADY.now())
        if course.scraper is not None:
            readings = sorted([*readings, *course.scraper.take()], key=lambda item: item.moment)
        course.num_lines += len(lines)
        course.last_line = lines[-1] if lines else course.last_line
        self._pace(course, readings)
        for reading in readings:
            self._take(place, course, reading)
        self._complain(course)

    def close(self) -> None:
        if self._course is not None and self._course.scraper is not None:
            self._course.scraper.close()
        self._course = None

    def _begin(self, process: RankProcess) -> _Course:
        source = self._settings.get("prometheus")
        scraper = None
        if source:
            address = fill(str(source["address"]), process.values)
            scraper = Scraper(address, source["names"], float(source["every"]))
        tail = LogTail(process.log_path, process.log_offset)
        return _Course(process, tail, scraper, process.started, process.started)

    def _pace(self, course: _Course, readings: Sequence[Reading]) -> None:
        """Measure seconds per step and between progress reports, over the whole look: its lines were most likely
        flushed together."""
        stepping = [reading for reading in readings if "step" in reading.values]
        if not stepping:
            return
        last, moment = int(stepping[-1].values["step"]), stepping[-1].moment
        first = int(stepping[0].values["step"])
        if course.step is None and last > first:  # seen late, all at once: an upper limit, for it contains the start
            course.step_seconds.append((moment - course.began) / (last - first))
            course.intervals.append((moment - course.began) / len(stepping))
            course.is_estimated = True
        elif course.step is not None and last > course.step and moment > course.at:
            if course.is_estimated:
                course.step_seconds.clear()
                course.intervals.clear()
                course.is_estimated = False
            course.step_seconds.append((moment - course.at) / (last - course.step))
            course.intervals.append((moment - course.at) / len(stepping))

    def _take(self, place: RankSlot, course: _Course, reading: Reading) -> None:
        values = dict(reading.values)
        step = values.pop("step", None)
        self._steps = int(values.pop("steps", self._steps))
        is_new = step is not None and (course.step is None or int(step) != course.step)
        if step is not None and is_new:
            self._advance(place, course, int(step), reading.moment)
            if "step_seconds" not in values and course.step_seconds:
                values["step_seconds"] = course.step_seconds[-1]
            if self._steps:
                values["steps"] = float(self._steps)
        course.was_read = True
        named = {f"run_{name}": value for name, value in values.items()}
        at = course.step if course.step is not None else 0
        self._records.measured(self._rank, at, STEADY.to_wall(reading.moment), named)

    def _advance(self, place: RankSlot, course: _Course, step: int, moment: float) -> None:
        """Record a completed step."""
        generation, page = self._processes.generation, place.page
        assert generation is not None
        broke_at = self._processes.broke_at
        if course.step is None and broke_at:
            lost = max(0, generation.reached - step + 1)
            fields: dict[str, Any] = {"lost_steps": lost, "first_step": step}
            if lost:
                hint = "" if step > 1 else ": it loaded no checkpoint"
                fields["message"] = f"it continued at step {step:,} and repeats {counted(lost, 'step')}{hint}"
            self._records.event("recovered", self._rank, seconds=monotonic_of(moment) - broke_at, **fields)
        course.step, course.at = step, moment
        page.switch("redo" if step < generation.reached else "productive", max(page.since, monotonic_of(moment)))
        page.begin_step(step + 1)
        page.beat()
        if course.step_seconds:
            page.step_seconds = statistics.median(course.step_seconds)
        page.patience = _patience(
            float(self._settings.get("hang_times") or 0),
            float(self._settings.get("hang_seconds") or 0),
            course.intervals,
        )

    def _complain(self, course: _Course) -> None:
        """Warn once if progress cannot be read."""
        if self._matcher.is_given_up and not self._is_off:
            self._is_off = True
            self._warn(
                "progress_given_up",
                f"progress.pattern needs more than {setting(MATCH_SECONDS)} of CPU time for the output of rank "
                f"{self._rank} and is switched off; write it without nested repetitions such as (a+)+",
            )
        late = STEADY.now() - course.began > UNSEEN_SECONDS
        if course.was_read or course.was_warned or not late:
            return
        if course.scraper is not None and course.scraper.error:
            course.was_warned = True
            self._warn(
                "progress_unseen", f"no progress from {self._settings['prometheus']['address']}: {course.scraper.error}"
            )
        elif self._settings.get("patterns") and course.num_lines >= UNSEEN_LINES and not self._is_off:
            course.was_warned = True
            self._warn(
                "progress_unseen",
                f"none of the {course.num_lines} lines printed by rank {self._rank} matches progress.pattern; "
                f"the last line is {course.last_line[:200]!r}",
            )


def _patience(times: float, least: float, intervals: Sequence[float]) -> float:
    """Return the seconds without progress that count as a hang: `times` the usual interval, at least `least`, and at
    least HANG_STEPS times the slowest recent interval."""
    if (not times and not least) or (times and not intervals):
        return NEVER_SECONDS
    if not times:
        return max(least, MIN_PATIENCE_SECONDS)  # a fixed time
    followed = max(times * statistics.median(intervals), HANG_STEPS * max(intervals))
    return max(followed, least, MIN_PATIENCE_SECONDS)


def _timed(matches: Sequence[dict[str, float]], before: float, written: float, now: float) -> list[Reading]:
    """Spread the lines of one look evenly from the previous look to the last write, which lies between the previous
    look and now, whatever the clock of a file server says."""
    last = min(max(before, written), now)
    begin = min(before, last)
    return [
        Reading(values, begin + (last - begin) * (index + 1) / len(matches)) for index, values in enumerate(matches)
    ]


def _numbers(groups: Mapping[str, str | None]) -> dict[str, float]:
    """Return the groups that are numbers; steps must be whole numbers."""
    result = {}
    for name, text in groups.items():
        number = _number(text or "")
        if number is not None and not (name in ("step", "steps") and not (number >= 0 and number.is_integer())):
            result[name] = number
    return result


def _number(text: str) -> float | None:
    """`1,234`, `5.6k`, `3e-4`, `nan`."""
    plain = text.strip().replace(",", "").replace("_", "")
    scale = _SCALES.get(plain[-1:], 1.0)
    try:
        return float(plain if scale == 1.0 else plain[:-1]) * scale
    except ValueError:
        return None


@contextlib.contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """Raise PatternError once the block has used this much CPU time. Python's matcher checks for signals while it
    works, and the timer counts CPU time, so that a busy machine triggers nothing."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise PatternError

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    finally:
        signal.signal(signal.SIGVTALRM, before)


def _fetch(address: str) -> str:
    """Return the response of an address, without a proxy: metrics are inside the cluster."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(address, timeout=ANSWER_SECONDS) as answer:
        data: bytes = answer.read(ANSWER_BYTES + 1)
    if len(data) > ANSWER_BYTES:
        raise ValueError(f"the response is longer than {ANSWER_BYTES >> 20} MiB")
    return data.decode(errors="replace")
