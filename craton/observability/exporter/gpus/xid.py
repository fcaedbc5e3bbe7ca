"""XIDs and SXIDs as events, counted by code, from the kernel log and from NVML events.

Counters start at 0 with the exporter, and every code that needs an action has a series from the start: Prometheus sees
no increase in a series that starts at 1. Events from before are exported by their time, which needs no earlier series.
Nothing is sticky: DCGM's gauge of the last XID never resets and is not exported.

One XID may arrive twice, from the log and from NVML. Both are counted separately, and the larger count is exported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from craton.infrastructure.probes import NodeRoot, Xid, driver_was_loaded, read_xids, recovery_action, xid_facts
from craton.observability.exporter.collector import Collector, reason
from craton.observability.exporter.exposition import Sample
from craton.observability.exporter.gpus.gpu import BUS_LABEL, CardLabels, CardSource, wanted_samples
from craton.observability.exporter.kernel_lines import KernelLines, Line, open_kernel_lines

WINDOW_SECONDS = 300.0  # dcgm-exporter's own default
REOPEN_SECONDS = 60.0
LISTED_SECONDS = 2.0
_WINDOW_LABEL = str(int(WINDOW_SECONDS * 1000))

# A GPU, by its address in the log (0000:53:00), and a code.
Place = tuple[str, int]


class XidCollector(Collector):
    name = "xid"

    def __init__(
        self,
        root: NodeRoot,
        source: CardSource,
        labels: CardLabels,
        open_lines: Callable[[NodeRoot], KernelLines] = open_kernel_lines,
    ) -> None:
        self._root, self._source, self._labels, self._open_lines = root, source, labels, open_lines
        self._lines: KernelLines | None = None
        self._opened = float("-inf")
        self._is_broken = False
        self._is_first = True
        self._logged: dict[Place, int] = {}
        self._by_events: dict[Place, int] = {}
        self._moments: dict[Place, float] = {}
        self._recent: deque[tuple[float, Place]] = deque()
        self._wanted: dict[str, tuple[float, str]] = {}  # GPU → when its newest XID 154 was read, requested action
        self._switches: dict[tuple[str, str, str], int] = {}
        self._switch_moments: dict[tuple[str, str, str], float] = {}
        self._fatal = [code for code, fact in sorted(xid_facts().items()) if fact.action != "observe"]

    def collect(self, now: float) -> Iterator[Sample]:
        # Another thread lists the GPUs meanwhile: their series must exist from the first scrape on. A hung driver is
        # not waited for again.
        if self._is_first:
            self._labels.are_known.wait(LISTED_SECONDS)
            self._is_first = False
        readable = self._read_log(now)
        self._read_events(now)
        if self._lines is not None:
            yield "craton_exporter_kernel_log_readable", (self._lines.name,), int(readable)
        yield from self._counts()
        yield from self._window(now)
        for place, moment in self._moments.items():
            yield "craton_gpu_xid_moment_seconds", (*self._labels.at(place[0]), str(place[1])), moment
        for labels, count in self._switches.items():
            yield "craton_nvswitch_sxid_errors_total", labels, count
        for labels, moment in self._switch_moments.items():
            yield "craton_nvswitch_sxid_moment_seconds", labels, moment

    def wishes(self, collected: Iterable[Sample], now: float) -> list[Sample]:
        """Return the recovery actions from the log, for GPUs without one from NVML in this scrape (`collected`, started
        at `now`): NVML does not know the action, lost the GPU, or hangs. NVML's value is better where it exists: the
        log has only the last request, and NVML also knows when it was fulfilled."""
        wishes_by_bus: dict[str, bool] = {}  # bus ID → whether NVML reports a requested action
        for name, labels, value in collected:
            if name == "craton_gpu_recovery_wanted":
                wishes_by_bus[labels[BUS_LABEL]] = bool(value) or wishes_by_bus.get(labels[BUS_LABEL], False)
        samples: list[Sample] = []
        for bus_id, (noted, action) in list(self._wanted.items()):
            labels = self._labels.at(bus_id)
            is_wanted = wishes_by_bus.get(labels[BUS_LABEL])
            if is_wanted is None:
                samples += wanted_samples(action, labels)
            elif not is_wanted and noted < now:
                self._wanted.pop(bus_id, None)
        return samples

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()

    def _read_log(self, now: float) -> bool:
        if self._lines is None or (self._is_broken and now - self._opened >= REOPEN_SECONDS):
            self.close()
            self._lines, self._opened, self._is_broken = self._open_lines(self._root), now, False
        if self._is_broken:
            return False
        try:
            for line in self._lines.new():
                if driver_was_loaded(line.text):
                    self._wanted.clear()
                for xid in read_xids(line.text):
                    self._note(xid, line, now)
        except OSError as error:
            self.errors += 1
            self.say(reason(error))
            self._is_broken = True
        return not self._is_broken

    def _note(self, xid: Xid, line: Line, now: float) -> None:
        # The log's clock drifts from the system's by seconds a day: a new line counts as written now.
        moment = now - (line.age_seconds or 0.0) if line.is_history else now
        if xid.is_switch:
            labels = (f"0000{xid.bus_id}.0".upper(), str(xid.code), "true" if xid.is_fatal else "false")
            self._switches[labels] = self._switches.get(labels, 0) + (not line.is_history)
            self._switch_moments[labels] = moment
            return
        place = (xid.bus_id, xid.code)
        self._moments[place] = max(moment, self._moments.get(place, 0.0))
        self._recent.append((moment, place))
        if xid.recovery:
            self._wanted[xid.bus_id] = (now, recovery_action(xid.recovery))
        if not line.is_history:
            self._logged[place] = self._logged.get(place, 0) + 1

    def _read_events(self, now: float) -> None:
        for card, code in self._source.cards.xids() if self._source.cards is not None else ():
            place = (card.short_bus_id, code)
            self._by_events[place] = self._by_events.get(place, 0) + 1
            if self._by_events[place] > self._logged.get(place, 0):
                self._moments[place] = now
                self._recent.append((now, place))

    def _counts(self) -> Iterator[Sample]:
        name = "craton_gpu_xid_errors_total"
        counted = {
            place: max(self._logged.get(place, 0), self._by_events.get(place, 0))
            for place in (*self._logged, *self._by_events)
        }
        for card in self._labels.known:
            labels = self._labels.of(card)
            for code in self._fatal:
                yield name, (*labels, str(code)), counted.pop((card.short_bus_id, code), 0)
        for (bus_id, code), count in counted.items():
            yield name, (*self._labels.at(bus_id), str(code)), count

    def _window(self, now: float) -> Iterator[Sample]:
        self._recent = deque((moment, place) for moment, place in self._recent if now - moment <= WINDOW_SECONDS)
        counted: dict[Place, int] = {}
        for _, place in self._recent:
            counted[place] = counted.get(place, 0) + 1
        for (bus_id, code), count in counted.items():
            labels = (*self._labels.at(bus_id), str(code), _WINDOW_LABEL)
            yield "DCGM_EXP_XID_ERRORS_COUNT", labels, count
