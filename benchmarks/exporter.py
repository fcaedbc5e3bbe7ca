"""Cost of the node exporter: `python benchmarks/exporter.py [--json]`.

Scrapes a recorded p5en node (8 GPUs, 16 EFA devices, 192 CPUs, Lustre) with a fake NVML that answers at once and, if
there is a driver, this machine with the real NVML. Scrapes go over HTTP, as from Prometheus. Prints the median and the
slowest scrape, the seconds of each collector, and the share of one core that a scrape every five seconds takes: CPU
time of the whole process, including threads.

With a driver it also prints the cost of each part of reading a GPU, the metric families a GPU has, and whether NVML
agrees with `nvidia-smi`.

Bars: a full scrape of 8 GPUs under 50 ms, under 1 % of a core. Exit code 1 when one is missed.
"""

from __future__ import annotations

import http.client
import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from observability.exporter.stand_in_nvml import StandInNvml, eight_cards
from observability.exporter.trees import write_root

from craton.infrastructure.probes import NodeRoot, probe_gpus
from craton.observability.exporter import FAMILIES, ExporterServer, NodeExporter
from craton.observability.exporter.gpus import NvmlCards

SCRAPES = 40
PAUSE_SECONDS = 0.6  # longer than the shortest time between two samples of GPM
INTERVAL_SECONDS = 5.0
SCRAPE_BAR_SECONDS, CORE_BAR = 0.050, 0.01
CARDS_OF_BAR = 8


def main() -> int:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = NodeRoot(write_root(Path(folder)))
        exporter = NodeExporter(root, open_cards=lambda: NvmlCards(StandInNvml(eight_cards())))
        found["8 GPUs, fake NVML, recorded p5en"] = measure(exporter)
    driver = _driver()
    if driver:
        driver.close()
        found["this machine, real NVML"] = measure(NodeExporter(NodeRoot(), open_cards=NvmlCards))
        found["GPU by GPU"] = look_at_cards()
    if "--json" in sys.argv[1:]:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    return int(any(not row.get("within_bars", True) for row in found.values()))


def measure(exporter: NodeExporter) -> dict[str, Any]:
    """Scrape over HTTP on loopback, after two scrapes that open and list everything."""
    server = ExporterServer(exporter, "127.0.0.1", 0)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    for _ in range(2):
        text = scrape(connection)
        time.sleep(PAUSE_SECONDS)
    taken, busy = [], 0.0
    for _ in range(SCRAPES):
        before, began = time.process_time(), time.perf_counter()
        text = scrape(connection)
        taken.append(time.perf_counter() - began)
        # The client is in this process too: its time counts as the exporter's.
        busy += time.process_time() - before
        time.sleep(PAUSE_SECONDS)
    connection.close()
    server.close()
    exporter.close()
    cards = len(re.findall(r"^craton_gpu_up\{", text, re.MULTILINE))
    gpu_seconds = _collectors(text).get("gpu", 0.0)
    # Other collectors do not grow with GPUs; a machine with fewer than eight is extrapolated.
    for_eight = statistics.median(taken) + gpu_seconds * max(0.0, CARDS_OF_BAR / max(cards, 1) - 1)
    core_share = busy / SCRAPES / INTERVAL_SECONDS
    core_for_eight = core_share + gpu_seconds * max(0.0, CARDS_OF_BAR / max(cards, 1) - 1) / INTERVAL_SECONDS
    return {
        "cards": cards,
        "samples": sum(not line.startswith("#") for line in text.splitlines()),
        "bytes": len(text),
        "median_seconds": statistics.median(taken),
        "slowest_seconds": max(taken),
        "seconds_for_8_cards": for_eight,
        "core_share": core_share,
        "core_share_for_8_cards_at_most": core_for_eight,
        "collector_seconds": _collectors(text),
        "within_bars": for_eight < SCRAPE_BAR_SECONDS and core_for_eight < CORE_BAR,
    }


def scrape(connection: http.client.HTTPConnection) -> str:
    connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip"})
    answer = connection.getresponse()
    assert answer.status == 200
    return answer.read().decode()


def look_at_cards() -> dict[str, Any]:
    """Return the cost of each part of the driver, missing values, and differences from nvidia-smi."""
    cards = NvmlCards()
    listed = cards.list()
    cards.read(listed[0])
    time.sleep(PAUSE_SECONDS)
    reading = cards.read(listed[0])
    parts: dict[str, list[float]] = {}
    for _ in range(20):
        time.sleep(PAUSE_SECONDS)
        for name, call in (("read", cards.read), ("processes", cards.processes)):
            began = time.perf_counter()
            call(listed[0])
            parts.setdefault(name, []).append(time.perf_counter() - began)
    known = {family.nvml for family in FAMILIES.values() if family.nvml}
    reported = {state.uuid: state for state in probe_gpus(NodeRoot()).cards}[listed[0].uuid]
    beside = {
        "memory MiB": (reading.get("memory.total", 0) / 2**20, (reported.memory_bytes or 0) / 2**20),
        "power limit W": (reading.get("power.limit", 0) / 1000, reported.power_limit_watts),
        "max SM clock MHz": (reading.get("clock.sm_max"), reported.max_sm_clock_mhz),
        "temperature C": (reading.get("temperature.gpu"), reported.temperature_celsius),
        "double-bit errors": (reading.get("field.ECC_DBE_VOL_TOTAL"), reported.volatile_uncorrectable),
        "links up": (reading.get("links.active"), sum(link.is_up for link in reported.nvlinks)),
        "PCIe width": (reading.get("pcie.width"), reported.pcie_width),
        "recovery action": (reading.get("field.GET_GPU_RECOVERY_ACTION"), reported.recovery_action),
    }
    cards.close()
    return {
        "card": listed[0].name,
        "median_seconds": {name: statistics.median(taken) for name, taken in parts.items()},
        "read": {name: reading[name] for name in sorted(reading)},
        "not_told": sorted(known - set(reading)),
        "nvml_beside_nvidia_smi": beside,
    }


def show(found: dict[str, Any]) -> None:
    for title, row in found.items():
        print(f"\n{title}")
        if "median_seconds" in row and "core_share" in row:
            print(
                f"  {row['cards']} GPUs, {row['samples']:,} samples, {row['bytes'] / 1000:,.0f} kB: "
                f"{row['median_seconds'] * 1000:.1f} ms (slowest {row['slowest_seconds'] * 1000:.1f}), "
                f"{row['core_share']:.2%} of a core at {INTERVAL_SECONDS:g} s"
            )
            print(
                f"  for 8 GPUs: {row['seconds_for_8_cards'] * 1000:.1f} ms of {SCRAPE_BAR_SECONDS * 1000:.0f}, "
                f"at most {row['core_share_for_8_cards_at_most']:.2%} of {CORE_BAR:.0%} of a core: "
                f"{'within' if row['within_bars'] else 'MISSED'}"
            )
            parts = sorted(row["collector_seconds"].items(), key=lambda part: -part[1])
            print("  " + ", ".join(f"{name} {seconds * 1000:.1f} ms" for name, seconds in parts))
        else:
            print(json.dumps(row, indent=2))


def _collectors(text: str) -> dict[str, float]:
    rows = re.findall(r'^craton_exporter_collector_seconds\{collector="(\w+)"[^}]*\} (\S+)', text, re.MULTILINE)
    return {name: float(seconds) for name, seconds in rows}


def _driver() -> NvmlCards | None:
    try:
        return NvmlCards()
    except Exception as error:  # noqa: BLE001 - whatever NVML or its absence raises, there is no driver to measure
        print(f"no NVML here ({error}): only the fake NVML is measured", file=sys.stderr)
        return None


if __name__ == "__main__":
    sys.exit(main())
