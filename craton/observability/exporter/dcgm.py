"""The counters file of dcgm-exporter that turns on what diagnosis needs, for clusters where it runs already.

Its default leaves out throttling, ECC, counted XIDs, health and NVLink errors. What it has beyond ours are families
that only DCGM's daemon can compute, in `ONLY_DCGM`. It is given as `dcgm-exporter -f craton-counters.csv`.
"""

from __future__ import annotations

from craton.observability.exporter.families import FAMILIES

# Source: NVIDIA/dcgm-exporter 4.8.2 etc/default-counters.csv, 2026-05-12
ONLY_DCGM = {
    "DCGM_EXP_CLOCK_EVENTS_COUNT": ("gauge", "Clock events by reason in the window"),
    "DCGM_EXP_GPU_HEALTH_STATUS": ("gauge", "What DCGM's health watches found, by watch and error"),
    "DCGM_EXP_P2P_STATUS": ("gauge", "Whether a card reaches the others over NVLink"),
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": ("counter", "Traffic of all NVLinks"),
    "DCGM_FI_DRIVER_VERSION": ("label", "Version of the driver"),
}


def dcgm_counters() -> str:
    """The CSV: field, Prometheus type, help."""
    rows = {family.name: (family.kind, family.help) for family in FAMILIES.values() if family.dcgm}
    lines = ["# Counters of dcgm-exporter that Craton's rules, dashboards and diagnosis use.", "# field, type, help"]
    lines += [f"{name}, {kind}, {_cell(text)}" for name, (kind, text) in sorted((rows | ONLY_DCGM).items())]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """The exporter splits at commas, and a quote behind a space is an error to it."""
    return text.replace(",", ";")
