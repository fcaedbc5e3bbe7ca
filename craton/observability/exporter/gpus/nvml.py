"""The GPUs of a live node through NVML (the package nvidia-ml-py).

Cheap values are read at every scrape, as many as possible in one call: nvmlDeviceGetFieldValues takes a list. Expensive
counters (DEAR_FIELDS) are read every 15 seconds, not from all GPUs at once, and rarely changing values once a minute.
Fields that a GPU lacks are not requested again. SM activity comes from GPM, which compares two samples of a GPU: the
one of this scrape and the one of the previous scrape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from craton.extras import install_command
from craton.observability.exporter.families import FAMILIES
from craton.observability.exporter.gpus.cards import Card, CardLostError, CardProcess, NoDriverError

RARELY_SECONDS = 60.0
DEAR_SECONDS = 15.0
SHORTEST_GPM_SECONDS = 0.5  # two samples closer than this show only noise
ALL_LINKS = 2**32 - 1  # scope of a field: summed over links
MAX_LINKS = 18
MAX_EVENTS = 1000  # per call, to bound an event storm
_SUMMED = ("NVLINK_THROUGHPUT_DATA_TX", "NVLINK_THROUGHPUT_DATA_RX")
_RARE_FIELDS = ("NVLINK_LINK_COUNT",)
# The other fields take 5 µs each. These, on an H200 (driver 580, 2026-11-16): 3.7 ms for the energy, 0.5 ms for the
# throttle times, 0.15 ms for the replays.
DEAR_FIELDS = (
    "TOTAL_ENERGY_CONSUMPTION",
    "PERF_POLICY_THERMAL",
    "CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
    "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
    "PCIE_REPLAY_COUNTER",
)
HELD_FIELDS = {  # reason → field with the time it lowered the clocks, in ns
    "sw_power_cap": "CLOCKS_EVENT_REASON_SW_POWER_CAP",
    "sw_thermal_slowdown": "CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
    "hw_thermal_slowdown": "CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
    "hw_power_brake_slowdown": "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
    "sync_boost": "CLOCKS_EVENT_REASON_SYNC_BOOST",
}
# Stable return codes of nvml.h for values that the GPU lacks or the driver does not know:
_NEVER = (2, 3, 13, 26)  # INVALID_ARGUMENT, NOT_SUPPORTED, FUNCTION_NOT_FOUND, DEPRECATED
_VALUE_KINDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # nvmlValueType_t


_DEAR_NAMES = tuple(f"field.{name}" for name in DEAR_FIELDS)


class _Wanted(NamedTuple):
    name: str  # in a reading
    field: str  # NVML_FI_DEV_...
    scope: int


class NvmlCards:
    """`nvml` is the module pynvml or a stand-in. ImportError when nvidia-ml-py is missing, NoDriverError when there is
    no driver, NVMLError when NVML fails."""

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = _pynvml() if nvml is None else nvml
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_DRIVER_NOT_LOADED:
                raise NoDriverError(str(error)) from error
            raise
        sources = {family.nvml.partition(".")[::2] for family in FAMILIES.values() if family.nvml}
        self._fields = [name for kind, name in sorted(sources) if kind == "field"] + list(HELD_FIELDS.values())
        self._link_fields = [name for kind, name in sorted(sources) if kind == "links" and name != "active"]
        self._gpm_names = [name for kind, name in sorted(sources) if kind == "gpm"]
        self._handles: dict[str, Any] = {}
        self._listed: dict[str, Card] = {}
        self._missing: dict[str, set[str]] = {}  # values that a GPU lacks
        self._rare: dict[str, tuple[float, dict[str, float]]] = {}
        self._dear: dict[str, tuple[float, dict[str, float]]] = {}  # uuid → next read, last values
        self._gpm: dict[str, _Gpm] = {}
        self._events = self._register()

    def list(self) -> Sequence[Card]:
        nvml = self._nvml
        result = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                bus_id = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
                uuid = _text(nvml.nvmlDeviceGetUUID(handle))
                name, minor = _text(nvml.nvmlDeviceGetName(handle)), nvml.nvmlDeviceGetMinorNumber(handle)
            except nvml.NVMLError:
                continue  # a lost GPU has no handle: it is still on the bus, and the counts differ
            result.append(Card(index, uuid, bus_id, name, minor))
            self._handles[uuid] = handle
        self._listed = {card.uuid: card for card in result}
        return result

    def read(self, card: Card) -> dict[str, float]:
        handle, nvml = self._handles[card.uuid], self._nvml
        missing = self._missing.setdefault(card.uuid, set())
        reading: dict[str, float] = {}

        def take(name: str, call: Callable[[], Any], split: Callable[[Any], dict[str, float]] | None = None) -> None:
            if name in missing:
                return
            try:
                answer = call()
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                    raise CardLostError(f"{card.bus_id}: {error}") from error
                if error.value in _NEVER:
                    missing.add(name)
                return
            reading.update(split(answer) if split else {name: float(answer)})

        take(
            "utilization",
            lambda: nvml.nvmlDeviceGetUtilizationRates(handle),
            lambda rates: {"utilization.gpu": rates.gpu, "utilization.memory": rates.memory},
        )
        take(
            "memory",
            lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2),
            lambda memory: {f"memory.{part}": getattr(memory, part) for part in ("total", "used", "free", "reserved")},
        )
        take("temperature.gpu", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        take("clock.sm", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        take("clock.memory", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))
        take("clocks_event_reasons", lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        take("power.usage", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        if not reading:
            raise CardLostError(f"{card.bus_id}: no NVML call succeeds")
        self._read_fields(handle, missing, reading)
        self._read_dear(card, handle, missing, reading)
        self._read_rarely(card, handle, reading, take)
        self._read_activity(card, handle, missing, reading)
        return reading

    def processes(self, card: Card) -> Sequence[CardProcess]:
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handles[card.uuid])
        except self._nvml.NVMLError:
            return []
        return [CardProcess(item.pid, item.usedGpuMemory or 0) for item in processes]

    def xids(self) -> Sequence[tuple[Card, int]]:
        nvml, result = self._nvml, []
        if self._events is None:
            return []
        for _ in range(MAX_EVENTS):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                card = self._listed.get(_text(nvml.nvmlDeviceGetUUID(event.device)))
            except nvml.NVMLError:
                break  # timeout: no more events
            if card is not None and event.eventType == nvml.nvmlEventTypeXidCriticalError:
                result.append((card, int(event.eventData)))
        return result

    def close(self) -> None:
        for gpm in self._gpm.values():
            gpm.free()
        if self._events is not None:
            self._nvml.nvmlEventSetFree(self._events)
        self._nvml.nvmlShutdown()

    def _read_fields(self, handle: Any, missing: set[str], reading: dict[str, float]) -> None:
        """Read all fields in one call, including the state and errors of every link."""
        links = [link for link in range(MAX_LINKS) if f"link {link}" not in missing]
        wanted = [
            _Wanted(f"field.{name}", name, ALL_LINKS if name in _SUMMED else 0)
            for name in self._fields
            if f"field.{name}" not in missing and name not in (*_RARE_FIELDS, *DEAR_FIELDS)
        ]
        wanted += [_Wanted("links.active", "NVLINK_GET_STATE", link) for link in links]
        wanted += [
            _Wanted(f"links.{name}", name, link)
            for name in self._link_fields
            if f"links.{name}" not in missing
            for link in links
        ]
        refused = []
        for element, value, code in self._values(handle, wanted):
            if value is not None:
                is_sum = element.name.startswith("links.")
                reading[element.name] = reading.get(element.name, 0.0) + value if is_sum else value
            elif code in _NEVER:
                refused.append(element)
        # A GPU with twelve links rejects the other link numbers, but has the field.
        missing |= {f"link {entry.scope}" for entry in refused if entry.name == "links.active"}
        missing |= {item.name for item in refused if item.name not in reading and item.name != "links.active"}

    def _read_dear(self, card: Card, handle: Any, missing: set[str], reading: dict[str, float]) -> None:
        due, kept = self._dear.get(card.uuid, (0.0, {}))
        now = time.monotonic()
        if now >= due:
            wanted = [_Wanted(name, name.removeprefix("field."), 0) for name in _DEAR_NAMES if name not in missing]
            answers = list(self._values(handle, wanted))
            kept = {entry.name: value for entry, value, _ in answers if value is not None}
            missing |= {item.name for item, value, code in answers if value is None and code in _NEVER}
            # The reads of different GPUs are spread over the interval.
            turn = 0.0 if due else DEAR_SECONDS * card.index / max(1, len(self._listed))
            self._dear[card.uuid] = (now + DEAR_SECONDS + turn, kept)
        reading.update(kept)

    def _values(self, handle: Any, wanted: Sequence[_Wanted]) -> Iterator[tuple[_Wanted, float | None, int]]:
        """Yield each field with its value, or with NVML's error code."""
        nvml = self._nvml
        # A constant that an older nvidia-ml-py lacks becomes field 0, which no GPU has.
        asked = [(getattr(nvml, f"NVML_FI_DEV_{item.field}", 0), item.scope) for item in wanted]
        try:
            answers = nvml.nvmlDeviceGetFieldValues(handle, asked) if asked else []
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                raise CardLostError(str(error)) from error
            return
        for entry, answer in zip(wanted, answers, strict=True):
            is_told = answer.nvmlReturn == nvml.NVML_SUCCESS
            yield entry, _value(answer) if is_told else None, answer.nvmlReturn

    def _read_rarely(self, card: Card, handle: Any, reading: dict[str, float], take: Callable[..., None]) -> None:
        moment, kept = self._rare.get(card.uuid, (0.0, {}))
        now, nvml = time.monotonic(), self._nvml
        if not kept or now - moment > RARELY_SECONDS:
            before = dict(reading)
            take("clock.sm_max", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
            take("power.limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
            take("power.default_limit", lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle))
            slowdown = nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
            take("temperature.slowdown", lambda: nvml.nvmlDeviceGetTemperatureThreshold(handle, slowdown))
            take("pcie.generation", lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))
            take("pcie.width", lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))
            take("pcie.max_generation", lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
            take("pcie.max_width", lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
            for item, value, _ in self._values(handle, [_Wanted(f"field.{name}", name, 0) for name in _RARE_FIELDS]):
                if value is not None:
                    reading[item.name] = value
            kept = {name: value for name, value in reading.items() if name not in before}
            self._rare[card.uuid] = (now, kept)
        reading.update(kept)

    def _read_activity(self, card: Card, handle: Any, missing: set[str], reading: dict[str, float]) -> None:
        nvml = self._nvml
        if "gpm" in missing:
            return
        try:
            gpm = self._gpm.get(card.uuid)
            if gpm is None:
                if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                    missing.add("gpm")
                    return
                gpm = self._gpm[card.uuid] = _Gpm(nvml, handle, self._gpm_names)
            reading.update(gpm.read())
        except nvml.NVMLError as error:
            if error.value in _NEVER:
                missing.add("gpm")

    def _register(self) -> Any:
        """Register for XIDs as NVML events; None when the driver refuses, as in some containers."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return None
        for card in self.list():
            try:
                nvml.nvmlDeviceRegisterEvents(self._handles[card.uuid], nvml.nvmlEventTypeXidCriticalError, events)
            except nvml.NVMLError:
                continue
        return events


class _Gpm:
    """Two GPM samples of one GPU and the query that compares them, allocated once."""

    def __init__(self, nvml: Any, handle: Any, names: Sequence[str]) -> None:
        self._nvml, self._handle = nvml, handle
        self._names = [name for name in names if hasattr(nvml, f"NVML_GPM_METRIC_{name}")]
        self._older, self._newer = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._question = nvml.c_nvmlGpmMetricsGet_t()
        self._question.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._question.numMetrics = len(self._names)
        for place, name in enumerate(self._names):
            self._question.metrics[place].metricId = getattr(nvml, f"NVML_GPM_METRIC_{name}")
        self._moment = 0.0
        self._kept: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """Return the activity since the last call; nothing at the first."""
        now = time.monotonic()
        if now - self._moment < SHORTEST_GPM_SECONDS:
            return self._kept
        nvml, is_first = self._nvml, self._moment == 0.0
        nvml.nvmlGpmSampleGet(self._handle, self._newer)
        self._moment = now
        if not is_first:
            self._question.sample1, self._question.sample2 = self._older, self._newer
            nvml.nvmlGpmMetricsGet(self._question)
            answers = zip(self._names, self._question.metrics, strict=False)
            self._kept = {
                f"gpm.{name}": answer.value for name, answer in answers if answer.nvmlReturn == nvml.NVML_SUCCESS
            }
        self._older, self._newer = self._newer, self._older
        return self._kept

    def free(self) -> None:
        for sample in (self._older, self._newer):
            self._nvml.nvmlGpmSampleFree(sample)


def _pynvml() -> Any:
    try:
        return import_module("pynvml")
    except ImportError as error:
        raise ImportError(f"{error}; to read GPUs, run: {install_command('observe')}") from error


def _value(answer: Any) -> float:
    return float(getattr(answer.value, _VALUE_KINDS[answer.valueType]))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
