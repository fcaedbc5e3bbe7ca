"""The counters files of dcgm-exporter that turn on what diagnosis needs, for clusters where it runs already.

Its default leaves out throttling, ECC, counted XIDs, health and NVLink errors. What it has beyond ours are families
that only DCGM's daemon can compute, in `ONLY_DCGM`. A file is given as `dcgm-exporter -f craton-counters.csv`.

Blackwell counts errors of NVLink under other names than cards before it, and has a file of its own: when a GB200 is
asked for these and for single-bit errors since the driver was loaded, neither comes (NVIDIA/dcgm-exporter issue 581,
NVIDIA/DCGM issue 265). Its file has the single-bit errors of the card's life instead.
"""

from __future__ import annotations

import re

from craton.observability.exporter.families import FAMILIES

# Source: NVIDIA/dcgm-exporter 4.8.2 etc/default-counters.csv, 2026-05-12
ONLY_DCGM = {
    "DCGM_EXP_CLOCK_EVENTS_COUNT": ("gauge", "Clock events by reason in the window"),
    "DCGM_EXP_GPU_HEALTH_STATUS": ("gauge", "What DCGM's health watches found, by watch and error"),
    "DCGM_EXP_P2P_STATUS": ("gauge", "Whether a card reaches the others over NVLink"),
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": ("counter", "Traffic of all NVLinks"),
    "DCGM_FI_DEV_NVLINK_ERROR_DL_CRC": ("counter", "Broken packets that NVLink's data link layer counts (Hopper)"),
    "DCGM_FI_DEV_NVLINK_ERROR_DL_RECOVERY": ("counter", "Times that layer brought a link up again (Hopper)"),
    "DCGM_FI_DEV_NVLINK_ERROR_DL_REPLAY": ("counter", "Packets that layer sent again (Hopper)"),
    "DCGM_FI_DRIVER_VERSION": ("label", "Version of the driver"),
}
# Sources: NVML's change log (Blackwell has lost ERROR_DL); NVIDIA/DCGM dcgmlib/dcgm_fields.h, 2026-07-06 (NVLINK_COUNT
# is NVLink5's alone).
_ONLY_BLACKWELL = re.compile(r"DCGM_FI_DEV_NVLINK_COUNT_")
_NOT_ON_BLACKWELL = re.compile(r"DCGM_FI_DEV_(?:NVLINK_(?:\w+_ERROR_COUNT_TOTAL|ERROR_DL_)|ECC_SBE_VOL_TOTAL)")


def dcgm_counters(*, blackwell: bool = False) -> str:
    """The CSV: field, Prometheus type, help."""
    rows = {family.name: (family.kind, family.help) for family in FAMILIES.values() if family.dcgm} | ONLY_DCGM
    others = _NOT_ON_BLACKWELL if blackwell else _ONLY_BLACKWELL
    cards = "Blackwell and later" if blackwell else "cards before Blackwell"
    lines = [
        f"# Counters of dcgm-exporter that Craton's rules, dashboards and diagnosis use, for {cards}.",
        "# field, type, help",
    ]
    lines += [f"{name}, {kind}, {_cell(text)}" for name, (kind, text) in sorted(rows.items()) if not others.match(name)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """The exporter splits at commas, and a quote behind a space is an error to it."""
    return text.replace(",", ";")
