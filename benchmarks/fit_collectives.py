"""Score the planner's collective times against published measurements, or refit its constants.

    python benchmarks/fit_collectives.py           # the table of docs/collectives.md
    python benchmarks/fit_collectives.py --worst   # and the twenty worst points
    python benchmarks/fit_collectives.py --fit     # least squares on log time, prints the constants of network.toml
    python benchmarks/fit_collectives.py --holdout # each run predicted by constants fitted without it (a minute)

Reads data/collectives.json (nccl-tests runs) and the NCCL rows of data/measured_ops.json (their sizes are in elements
of two bytes).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scipy.optimize import least_squares

from craton.planning.rates import Group, Network, collectives

DATA = Path(__file__).parents[1] / "data"
MEBIBYTE = 2**20
OPERATIONS = {
    "all_reduce": collectives.all_reduce_seconds,
    "all_gather": collectives.all_gather_seconds,
    "reduce_scatter": collectives.reduce_scatter_seconds,
    "alltoall": collectives.all_to_all_seconds,
}
# hardware: generation, NVLink bytes/s, domain, GPUs a node, interface bytes/s a GPU, EFA version
MACHINES: dict[str, tuple[str, float, int, int, float, int]] = {
    "A100 (p4d, p4de)": ("ampere", 300e9, 8, 8, 6.25e9, 1),
    "H100/H200 (p5)": ("hopper", 450e9, 8, 8, 50e9, 2),
    "H200 (p5en)": ("hopper", 450e9, 8, 8, 50e9, 3),
    "H20 (InfiniBand)": ("hopper", 450e9, 8, 8, 50e9, 0),
    "B200 (p6-b200)": ("blackwell", 900e9, 8, 8, 50e9, 4),
    "B300 (p6-b300)": ("blackwell", 900e9, 8, 8, 100e9, 4),
    "GB200 NVL72": ("blackwell", 900e9, 72, 4, 50e9, 4),
}
# Measured, but not typical of a healthy machine with current software and defaults, or not fully stated.
EXCLUDED = {
    "p5-all_reduce-2n-old-stack": "NCCL 2.18 with aws-ofi-nccl 1.7",
    "p4d-all_reduce-1to4n": "reporter calls its configuration bad",
    "a100-multi4MB-vs-1x4GB-h200": "a thousand messages in flight at once",
    "nvl72-alltoall-64": "size and definition not stated",
    "h200-all_reduce-1n-16GiB-Ring": "ring forced where NCCL takes the switch",
}
# An "asymptotic peak" without a size is taken at one that saturates every machine here.
ASYMPTOTE = {"size_bytes": 8 * 2**30}


@dataclass(frozen=True)
class Point:
    entry: str
    operation: str
    machine: str
    group: Group
    size_bytes: float
    seconds: float

    def network(self) -> Network:
        return collectives.network(*MACHINES[self.machine])

    def predict(self, network: Network | None = None) -> float:
        return OPERATIONS[self.operation](self.size_bytes, self.group, network or self.network())


def main() -> None:
    parser = argparse.ArgumentParser(description="Score or refit the collective model.")
    parser.add_argument("--fit", action="store_true", help="refit the constants and print them as TOML")
    parser.add_argument("--holdout", action="store_true", help="score each run with constants fitted without it")
    parser.add_argument("--worst", action="store_true", help="list the worst points")
    arguments = parser.parse_args()
    points = load_points()
    if arguments.fit:
        print(as_toml(fit(points)))
        return
    scored = held_out(points) if arguments.holdout else [(point, point.predict()) for point in points]
    print_table(scored)
    if arguments.worst:
        for point, seconds in sorted(scored, key=lambda pair: -abs(math.log(pair[1] / pair[0].seconds)))[:20]:
            print(f"{seconds / point.seconds - 1:+7.0%} {point.size_bytes / MEBIBYTE:10.3f} MiB {point.entry}")


def load_points() -> list[Point]:
    entries = json.loads((DATA / "collectives.json").read_text())["entries"]
    rows = json.loads((DATA / "measured_ops.json").read_text())["rows"]
    return [*_published(entries), *_profiled(rows)]


def print_table(scored: Iterable[tuple[Point, float]]) -> None:
    """Print median, 90th percentile and bias of the time error by operation and machine, for sizes from 1 MiB."""
    groups: dict[str, list[float]] = defaultdict(list)
    floors: dict[str, list[float]] = defaultdict(list)
    for point, seconds in scored:
        error = seconds / point.seconds - 1
        if point.size_bytes < MEBIBYTE:
            floors[point.machine].append(error)
            continue
        where = "one domain" if point.group.size <= point.group.per_domain else "across nodes"
        for key in (f"{point.operation:15}{point.machine:18} {where}", "all"):
            groups[key].append(error)
    print(f"{'sizes from 1 MiB':46} {'n':>4} {'median':>7} {'p90':>6} {'bias':>6}")
    for key, errors in sorted(groups.items(), key=lambda item: (item[0] == "all", item[0])):
        absolute = sorted(abs(error) for error in errors)
        p90 = absolute[min(len(absolute) - 1, math.ceil(0.9 * len(absolute)) - 1)]
        bias = statistics.median(errors)
        print(f"{key:46} {len(errors):4} {statistics.median(absolute):7.1%} {p90:6.1%} {bias:+6.1%}")
    print("below 1 MiB: predicted over measured")
    for machine, errors in sorted(floors.items()):
        ratios = sorted(1 + error for error in errors)
        print(f"{machine:46} {len(ratios):4} {ratios[0]:6.2f} to {ratios[-1]:.2f}")


def _published(entries: list[dict[str, Any]]) -> Iterable[Point]:
    for entry in entries:
        if entry["id"] in EXCLUDED or entry["collective"] not in OPERATIONS:
            continue
        machine = _machine(entry["hardware"]["gpu"], entry["id"])
        domain, node_gpus = MACHINES[machine][2], MACHINES[machine][3]
        for point in entry["points"]:
            ranks = point.get("n_gpus") or entry["n_gpus"]
            point = ASYMPTOTE | {key: value for key, value in point.items() if value is not None}
            size, seconds = point["size_bytes"], _seconds(point, entry["collective"], ranks)
            # Timed from Python through torch, with a floor of 40 µs on one node: the host's, not NCCL's.
            host_bound = size < MEBIBYTE and entry["source"].startswith("stas00")
            if size and seconds and not host_bound and "forced" not in point.get("algo", ""):
                group = Group(size=ranks, per_domain=min(domain, ranks), per_node=min(node_gpus, ranks))
                yield Point(entry["id"], entry["collective"], machine, group, size, seconds)


def _profiled(rows: list[dict[str, Any]]) -> Iterable[Point]:
    machines = {"h100_sxm": "H100/H200 (p5)", "h200_sxm": "H100/H200 (p5)", "b200_sxm": "B200 (p6-b200)"}
    machines["gb200"] = "GB200 NVL72"
    for row in rows:
        if row["op"].startswith("nccl_"):
            operation, ranks = row["op"].removeprefix("nccl_"), row["num_gpus"]
            group = Group(size=ranks, per_domain=ranks, per_node=ranks)
            entry = f"{row['system']} {operation} {ranks} ranks"
            size = 2.0 * row["message_elements"]
            yield Point(entry, operation, machines[row["system"]], group, size, row["latency_us"] / 1e6)


def _machine(gpu: str, entry: str) -> str:
    for key, machine in (("p5en", "H200 (p5en)"), ("A100", "A100 (p4d, p4de)"), ("H20 ", "H20 (InfiniBand)")):
        if key in gpu + " ":
            return machine
    for key, machine in (("GB200", "GB200 NVL72"), ("B200", "B200 (p6-b200)"), ("B300", "B300 (p6-b300)")):
        if key in gpu:
            return machine
    assert "H100" in gpu or "H200" in gpu, f"no machine for {entry}"
    return "H100/H200 (p5)"


def _seconds(point: dict[str, Any], collective: str, ranks: int) -> float | None:
    """Return the printed time, else the time by nccl-tests' bus bandwidth, which has two digits for small sizes."""
    if point.get("time_us"):
        return float(point["time_us"]) / 1e6
    bandwidth = point.get("busbw_GBps")
    if not point.get("size_bytes") or not bandwidth or bandwidth < 0.05:
        return None
    factor = (2.0 if collective == "all_reduce" else 1.0) * (ranks - 1) / ranks
    return float(point["size_bytes"]) * factor / (bandwidth * 1e9)


# The constants that the points of a section identify; its other constants keep their values of network.toml.
FITTED: dict[str, tuple[str, ...]] = {
    "nvlink.ampere": ("efficiency", "latency_seconds", "ramp_seconds", "launch_seconds"),
    "nvlink.hopper": (
        "efficiency", "pair_efficiency", "switch_efficiency",
        "latency_seconds", "ramp_seconds", "switch_latency_seconds", "launch_seconds",
    ),
    "nvlink.blackwell": (
        "efficiency", "pair_efficiency", "switch_efficiency",
        "latency_seconds", "ramp_seconds", "switch_latency_seconds", "launch_seconds",
    ),
    "fabric.efa1": ("tree_efficiency", "tree_latency_seconds"),
    "fabric.efa2": (
        "pair_efficiency", "tree_efficiency",
        "latency_seconds", "ramp_seconds", "tree_latency_seconds", "peer_latency_seconds",
    ),
    "fabric.efa4": (
        "efficiency", "pair_efficiency",
        "ramp_seconds", "peer_latency_seconds",
    ),
}  # fmt: skip


Constants = dict[str, dict[str, float]]


def fit(points: list[Point]) -> Constants:
    """Fit NVLink first, then the fabrics, whose times contain NVLink's."""
    values = _shipped()
    for section in FITTED:
        fit_section(section, points, values)
    return values


def fit_section(section: str, points: list[Point], values: Constants) -> None:
    names = FITTED[section]
    chosen = [point for point in points if _section(point) == section]
    weights = [1.0 if point.size_bytes >= MEBIBYTE else 0.3 for point in chosen]

    def residuals(logs: Iterable[float]) -> list[float]:
        values[section].update(zip(names, (math.exp(log) for log in logs), strict=True))
        times = [point.predict(_with(point.network(), point.machine, values)) for point in chosen]
        return [w * math.log(time / point.seconds) for w, time, point in zip(weights, times, chosen, strict=True)]

    start = [math.log(values[section][name]) for name in names]
    ceiling = [math.log(0.97) if name.endswith("efficiency") else 0.0 for name in names]
    start = [min(value, bound - 1e-3) for value, bound in zip(start, ceiling, strict=True)]
    floor = [-30.0] * len(names)
    residuals(least_squares(residuals, start, loss="soft_l1", f_scale=0.15, bounds=(floor, ceiling)).x)


def held_out(points: list[Point]) -> list[tuple[Point, float]]:
    """Predict every run (one curve of one source) with the constants of its section, fitted without it."""
    scored = []
    for entry in sorted({point.entry for point in points}):
        rest = [point for point in points if point.entry != entry]
        own = [point for point in points if point.entry == entry]
        values = _shipped()
        section = _section(own[0])
        if section in FITTED and any(_section(point) == section for point in rest):
            fit_section(section, rest, values)
        scored += [(point, point.predict(_with(point.network(), point.machine, values))) for point in own]
    return scored


def as_toml(values: Constants) -> str:
    lines = []
    for section, constants in values.items():
        lines += [f"[{section}]", *(f"{name} = {value:.3g}" for name, value in constants.items()), ""]
    return "\n".join(lines)


def _shipped() -> Constants:
    return {
        **{f"nvlink.{name}": dict(collectives.link_constants(name)) for name in ("ampere", "hopper", "blackwell")},
        **{f"fabric.efa{version}": dict(collectives.fabric_constants(version)) for version in (1, 2, 3, 4)},
        "fabric.infiniband": dict(collectives.fabric_constants(0)),
    }


def _section(point: Point) -> str:
    """Return the section whose constants a point identifies: the last link that it crosses."""
    generation, *_, efa_version = MACHINES[point.machine]
    if point.group.size <= point.group.per_domain:
        return f"nvlink.{generation}"
    return f"fabric.efa{efa_version}" if efa_version else "fabric.infiniband"


def _with(network: Network, machine: str, values: dict[str, dict[str, float]]) -> Network:
    generation, *_, efa_version = MACHINES[machine]
    fabric = f"fabric.efa{efa_version}" if efa_version else "fabric.infiniband"
    changes = {f"nvlink_{name}": value for name, value in values[f"nvlink.{generation}"].items()}
    changes |= {f"network_{name}": value for name, value in values[fabric].items()}
    return replace(network, **changes)


if __name__ == "__main__":
    main()
