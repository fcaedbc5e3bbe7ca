"""A stand-in for the module pynvml, for machines without a GPU: its constants, structures and errors are those of the
real package, its answers are made up here. What real drivers answer, and how long they take, it does not know.
"""

from __future__ import annotations

from ctypes import c_char_p
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

MIB = 2**20
FIELD_NAMES = {
    value: name.removeprefix("NVML_FI_DEV_") for name, value in vars(pynvml).items() if name.startswith("NVML_FI_DEV_")
}
GPM_NAMES = {
    value: name.removeprefix("NVML_GPM_METRIC_")
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_GPM_METRIC_")
}
HOPPER_FIELDS = {
    "MEMORY_TEMP": 44,
    "TOTAL_ENERGY_CONSUMPTION": 123_456_789,
    "PERF_POLICY_POWER": 7_000_000_000,
    "PERF_POLICY_THERMAL": 0,
    "PERF_POLICY_SYNC_BOOST": 0,
    "PERF_POLICY_BOARD_LIMIT": 0,
    "PERF_POLICY_LOW_UTILIZATION": 0,
    "PERF_POLICY_RELIABILITY": 0,
    "ECC_SBE_VOL_TOTAL": 3,
    "ECC_DBE_VOL_TOTAL": 0,
    "ECC_SBE_AGG_TOTAL": 12,
    "ECC_DBE_AGG_TOTAL": 0,
    "REMAPPED_COR": 1,
    "REMAPPED_UNC": 0,
    "REMAPPED_PENDING": 0,
    "REMAPPED_FAILURE": 0,
    "GET_GPU_RECOVERY_ACTION": 0,
    "PCIE_REPLAY_COUNTER": 2,
    "NVLINK_LINK_COUNT": 18,
    "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": 0,
    "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": 0,
    "NVLINK_REPLAY_ERROR_COUNT_TOTAL": 0,
    "NVLINK_RECOVERY_ERROR_COUNT_TOTAL": 0,
    "NVLINK_THROUGHPUT_DATA_TX": 1024,
    "NVLINK_THROUGHPUT_DATA_RX": 2048,
    "CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN": 0,
    "CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN": 1_500_000_000,
    "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN": 0,
}
# Constants with two names have one number; the table above may have either.
_FIELDS = {getattr(pynvml, f"NVML_FI_DEV_{name}"): value for name, value in HOPPER_FIELDS.items()}
ACTIVITY = {
    "GRAPHICS_UTIL": 98.0,
    "SM_UTIL": 91.0,
    "SM_OCCUPANCY": 40.0,
    "ANY_TENSOR_UTIL": 62.0,
    "DRAM_BW_UTIL": 35.0,
    "PCIE_TX_PER_SEC": 100.0,
    "PCIE_RX_PER_SEC": 50.0,
    "NVLINK_TOTAL_TX_PER_SEC": 20_000.0,
    "NVLINK_TOTAL_RX_PER_SEC": 20_000.0,
}


@dataclass
class FakeCard:
    """One Hopper card; tests change what they are about."""

    index: int
    bus: str
    fields: dict[int, int] = field(default_factory=lambda: dict(_FIELDS))
    links_down: set[int] = field(default_factory=set)
    reasons: int = 0
    has_gpm: bool = True
    is_lost: bool = False
    processes: list[tuple[int, int]] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)  # calls that it does not support

    @property
    def uuid(self) -> str:
        return f"GPU-{self.bus.replace(':', '').replace('.', '')}"

    def set_field(self, name: str, value: int) -> None:
        self.fields[getattr(pynvml, f"NVML_FI_DEV_{name}")] = value


class StandInNvml:
    """What is not defined here is pynvml's own."""

    def __init__(self, cards: list[FakeCard]) -> None:
        self.cards = cards
        self.events: list[tuple[FakeCard, int]] = []
        self.asked_fields: list[int] = []
        self.calls = 0
        self.is_open = False

    def __getattr__(self, name: str) -> Any:
        # Constants, structures and errors. A function would reach for a driver.
        assert not name.startswith("nvmlDevice"), f"the stand-in has no {name}"
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:  # noqa: N802
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:  # noqa: N802
        return self._of(self.cards[index])

    def nvmlDeviceGetPciInfo(self, card: FakeCard) -> Any:  # noqa: N802
        return SimpleNamespace(busId=f"0000{card.bus.upper()}".encode())

    def nvmlDeviceGetUUID(self, card: FakeCard) -> str:  # noqa: N802
        return card.uuid

    def nvmlDeviceGetName(self, card: FakeCard) -> str:  # noqa: N802
        return "NVIDIA H200"

    def nvmlDeviceGetMinorNumber(self, card: FakeCard) -> int:  # noqa: N802
        return card.index

    def nvmlDeviceGetUtilizationRates(self, card: FakeCard) -> Any:  # noqa: N802
        self._of(card, "utilization")
        return SimpleNamespace(gpu=97, memory=41)

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard, version: int | None = None) -> Any:  # noqa: N802
        self._of(card, "memory")
        return SimpleNamespace(total=143771 * MIB, used=90000 * MIB, free=53000 * MIB, reserved=771 * MIB)

    def nvmlDeviceGetTemperature(self, card: FakeCard, sensor: int) -> int:  # noqa: N802
        self._of(card, "temperature")
        return 51

    def nvmlDeviceGetClockInfo(self, card: FakeCard, kind: int) -> int:  # noqa: N802
        self._of(card, "clock")
        return 1980 if kind == pynvml.NVML_CLOCK_SM else 3201

    def nvmlDeviceGetMaxClockInfo(self, card: FakeCard, kind: int) -> int:  # noqa: N802
        return self._number(card, 1980)

    def nvmlDeviceGetCurrentClocksEventReasons(self, card: FakeCard) -> int:  # noqa: N802
        self._of(card, "reasons")
        return card.reasons

    def nvmlDeviceGetPowerUsage(self, card: FakeCard) -> int:  # noqa: N802
        self._of(card, "power")
        return 612_345

    def nvmlDeviceGetEnforcedPowerLimit(self, card: FakeCard) -> int:  # noqa: N802
        return self._number(card, 700_000)

    def nvmlDeviceGetPowerManagementDefaultLimit(self, card: FakeCard) -> int:  # noqa: N802
        return self._number(card, 700_000)

    def nvmlDeviceGetTemperatureThreshold(self, card: FakeCard, which: int) -> int:  # noqa: N802
        return self._number(card, 87)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, card: FakeCard) -> int:  # noqa: N802
        return self._number(card, 5)

    def nvmlDeviceGetCurrPcieLinkWidth(self, card: FakeCard) -> int:  # noqa: N802
        return self._number(card, 16)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card: FakeCard) -> int:  # noqa: N802
        return self._number(card, 5)

    def nvmlDeviceGetMaxPcieLinkWidth(self, card: FakeCard) -> int:  # noqa: N802
        return self._number(card, 16)

    def nvmlDeviceGetFieldValues(self, card: FakeCard, asked: list[tuple[int, int]]) -> Any:  # noqa: N802
        self._of(card)
        answers = (pynvml.c_nvmlFieldValue_t * len(asked))()
        for answer, (number, scope) in zip(answers, asked, strict=True):
            self.asked_fields.append(number)
            value = card.fields.get(number)
            if FIELD_NAMES.get(number, "").startswith("NVLINK_COUNT_") and scope >= card.fields.get(91, 0):
                value = None
            if number == pynvml.NVML_FI_DEV_NVLINK_GET_STATE and scope < card.fields.get(91, 0):
                value = int(scope not in card.links_down)
            answer.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED if value is None else pynvml.NVML_SUCCESS
            answer.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            answer.value.ullVal = value or 0
        return answers

    def nvmlDeviceGetComputeRunningProcesses(self, card: FakeCard) -> list[Any]:  # noqa: N802
        self._of(card)
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in card.processes]

    def nvmlEventSetCreate(self) -> object:  # noqa: N802
        return object()

    def nvmlEventSetFree(self, events: object) -> None:  # noqa: N802
        self.events.clear()

    def nvmlDeviceRegisterEvents(self, card: FakeCard, kinds: int, events: object) -> None:  # noqa: N802
        assert kinds == pynvml.nvmlEventTypeXidCriticalError

    def nvmlEventSetWait_v2(self, events: object, timeout: int) -> Any:  # noqa: N802
        assert timeout == 0, "a scrape must not wait for an event"
        if not self.events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        card, code = self.events.pop(0)
        return SimpleNamespace(device=card, eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=code)

    def nvmlGpmQueryDeviceSupport(self, card: FakeCard) -> Any:  # noqa: N802
        return SimpleNamespace(isSupportedDevice=int(card.has_gpm))

    def nvmlGpmSampleAlloc(self) -> Any:  # noqa: N802
        return pynvml.c_nvmlGpmSample_t()

    def nvmlGpmSampleFree(self, sample: Any) -> None:  # noqa: N802
        pass

    def nvmlGpmSampleGet(self, card: FakeCard, sample: Any) -> Any:  # noqa: N802
        self._of(card)
        return sample

    def nvmlGpmMetricsGet(self, question: Any) -> Any:  # noqa: N802
        for place in range(question.numMetrics):
            metric = question.metrics[place]
            metric.nvmlReturn = pynvml.NVML_SUCCESS
            metric.value = ACTIVITY[GPM_NAMES[metric.metricId]]
            metric.metricInfo.unit = c_char_p(b"%")
        return question

    def _number(self, card: FakeCard, number: int) -> int:
        self._of(card)
        return number

    def _of(self, card: FakeCard, call: str = "") -> FakeCard:
        self.calls += 1
        if card.is_lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if call in card.refused:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return card


class DriverlessNvml(StandInNvml):
    """The library of a machine whose driver is not loaded, or cannot be reached."""

    def __init__(self) -> None:
        super().__init__([])

    def nvmlInit(self) -> None:  # noqa: N802
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)


def eight_cards() -> list[FakeCard]:
    return [FakeCard(index, f"0000:{0x53 + 16 * index:02x}:00.0") for index in range(8)]
