"""The GPUs of a node's image, from its recorded `nvidia-smi -q -x`: the same families, as far as it has them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from craton.infrastructure.probes import GpuState, NodeRoot, probe_gpus
from craton.observability.exporter.gpus.cards import Card, CardLostError, CardProcess

# nvidia-smi's names of reasons → bits of NVML's mask (nvml.h)
REASON_BITS = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clocks_setting": 0x100,
}
RECOVERY_NUMBERS = {"none": 0, "reset": 1, "reboot": 2, "drain p2p": 3, "drain and reset": 4}


class RecordedCards:
    """Read the image again at every call, so that a changed image acts as a changed node."""

    def __init__(self, root: NodeRoot) -> None:
        self._path = root.path
        self._states: dict[str, GpuState] = {}

    def list(self) -> Sequence[Card]:
        states = probe_gpus(NodeRoot(self._path)).cards
        self._states = {state.uuid: state for state in states}
        return [
            Card(state.index, state.uuid, f"0000{state.bus_id.upper()}", state.name, state.index) for state in states
        ]

    def read(self, card: Card) -> dict[str, float]:
        state = self._states[card.uuid]
        if state.memory_bytes is None:
            raise CardLostError(f"{card.bus_id}: not in the output of nvidia-smi")
        mask = sum(REASON_BITS.get(reason, 0) for reason in (*state.throttle, *(["gpu_idle"] if state.is_idle else [])))
        readings = {
            "memory.total": state.memory_bytes,
            "temperature.gpu": state.temperature_celsius,
            "clock.sm": state.sm_clock_mhz,
            "clock.sm_max": state.max_sm_clock_mhz,
            "power.limit": _milli(state.power_limit_watts),
            "power.default_limit": _milli(state.default_power_limit_watts),
            "clocks_event_reasons": mask,
            "pcie.generation": state.pcie_generation,
            "pcie.width": state.pcie_width,
            "pcie.max_generation": state.max_pcie_generation,
            "pcie.max_width": state.max_pcie_width,
            "field.ECC_SBE_VOL_TOTAL": state.volatile_correctable,
            "field.ECC_DBE_VOL_TOTAL": state.volatile_uncorrectable,
            "field.ECC_DBE_AGG_TOTAL": state.aggregate_uncorrectable,
            "field.REMAPPED_PENDING": int(state.remap_pending),
            "field.REMAPPED_FAILURE": int(state.remap_failed),
            "field.GET_GPU_RECOVERY_ACTION": _recovery(state.recovery_action),
            "field.NVLINK_LINK_COUNT": len(state.nvlinks) or None,
            "links.active": sum(link.is_up for link in state.nvlinks) if state.nvlinks else None,
        }
        return {name: float(value) for name, value in readings.items() if value is not None}

    def processes(self, card: Card) -> Sequence[CardProcess]:
        return []

    def xids(self) -> Sequence[tuple[Card, int]]:
        return []

    def close(self) -> None:
        self._states = {}


def _milli(value: float | None) -> float | None:
    return None if value is None else value * 1000


def _recovery(answer: str) -> int | None:
    """Return NVML's number for nvidia-smi's word; an unknown word counts as a reset."""
    if not answer:
        return None
    return RECOVERY_NUMBERS.get(re.sub(r"\s+", " ", answer.lower()), 1)
