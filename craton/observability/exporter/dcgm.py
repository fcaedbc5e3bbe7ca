"""Counters files for dcgm-exporter that enable the metrics that rules and diagnosis need.

Its default file omits throttling, ECC, XID counts, health and NVLink errors. `ONLY_DCGM` lists families that only
DCGM's daemon can compute and Craton's exporter lacks. Use a file with `dcgm-exporter -f craton-counters.csv`.

Blackwell counts NVLink errors under other names than earlier GPUs and has its own file: when a GB200 is queried for the
old names and for single-bit errors since driver load, it returns neither (NVIDIA/dcgm-exporter issue 581, NVIDIA/DCGM
issue 265). Its file has the lifetime single-bit errors instead.
"""

from __future__ import annotations

import re

from craton.observability.exporter.families import FAMILIES

# Source: NVIDIA/dcgm-exporter 4.8.2 etc/default-counters.csv, 2026-05-12
ONLY_DCGM = {
    "DCGM_EXP_CLOCK_EVENTS_COUNT": ("gauge", "Clock events by reason in the window"),
    "DCGM_EXP_GPU_HEALTH_STATUS": ("gauge", "Results of DCGM's health watches, by watch and error"),
    "DCGM_EXP_P2P_STATUS": ("gauge", "Whether a GPU reaches the others over NVLink"),
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": ("counter", "Traffic of all NVLinks"),
    "DCGM_FI_DEV_NVLINK_ERROR_DL_CRC": ("counter", "NVLink data link layer CRC errors (Hopper)"),
    "DCGM_FI_DEV_NVLINK_ERROR_DL_RECOVERY": ("counter", "NVLink data link layer recoveries (Hopper)"),
    "DCGM_FI_DEV_NVLINK_ERROR_DL_REPLAY": ("counter", "NVLink data link layer replays (Hopper)"),
    "DCGM_FI_DRIVER_VERSION": ("label", "Driver version"),
}
# Sources: NVML's change log (Blackwell dropped ERROR_DL); NVIDIA/DCGM dcgmlib/dcgm_fields.h, 2026-07-06 (NVLINK_COUNT
# is NVLink5 only).
_ONLY_BLACKWELL = re.compile(r"DCGM_FI_DEV_NVLINK_COUNT_")
_NOT_ON_BLACKWELL = re.compile(r"DCGM_FI_DEV_(?:NVLINK_(?:\w+_ERROR_COUNT_TOTAL|ERROR_DL_)|ECC_SBE_VOL_TOTAL)")


def dcgm_counters(*, blackwell: bool = False) -> str:
    """Return the CSV text: field, Prometheus type, help."""
    rows = {family.name: (family.kind, family.help) for family in FAMILIES.values() if family.dcgm} | ONLY_DCGM
    others = _NOT_ON_BLACKWELL if blackwell else _ONLY_BLACKWELL
    gpus = "Blackwell and later" if blackwell else "GPUs before Blackwell"
    lines = [
        f"# dcgm-exporter counters that Craton's rules, dashboards and diagnosis use, for {gpus}.",
        "# field, type, help",
    ]
    lines += [f"{name}, {kind}, {_cell(text)}" for name, (kind, text) in sorted(rows.items()) if not others.match(name)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Replace commas: dcgm-exporter splits at commas and rejects a quote after a space."""
    return text.replace(",", ";")
