"""Checks across devices or nodes: different results, slow devices, slow links. Pure functions of self-test output."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from craton.formatting import bandwidth, digits
from craton.orchestration.preflight.finding import PreflightFinding

SLOW_DEVICE = 0.9  # of the median of its kind
GANG_CHECKS = ("compute", "compute_speed", "bandwidth")  # judged again over all nodes
FEW_DEVICES = 3  # below which there is no majority
SLOW_PAIR = 0.6  # of the measured curve, as in the self-test


@dataclass(frozen=True)
class Device:
    """One device of one node, and its self-test result."""

    node: str
    result: Mapping[str, Any]

    @property
    def label(self) -> str:
        return f"{self.result['device']} of {self.node}" if self.node else str(self.result["device"])

    @property
    def kind(self) -> tuple[str, str, str]:
        """The key of devices whose results must be identical."""
        return self.result["name"], self.result["torch"], self.result["cuda"]


def check_compute(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[PreflightFinding]:
    """Check the results of `selftest compute` (node → devices) over the whole gang."""
    devices = [Device(node, result) for node, item in results.items() for result in item]
    findings = [finding for device in devices for finding in _alone(device)]
    kinds: dict[tuple[str, str, str], list[Device]] = defaultdict(list)
    for device in devices:
        if not device.result["error"]:
            kinds[device.kind].append(device)
    findings += [finding for alike in kinds.values() for finding in _odd_ones(alike)]
    slow = [finding for alike in kinds.values() for finding in _slow_ones(alike)]
    if findings or not devices:
        return [*findings, *slow]
    repeats = sum(sum(device.result["repeats"].values()) for device in devices)
    hashes = " ".join(f"{name} {value[:8]}" for name, value in sorted(devices[0].result["hashes"].items()))
    several = "all identical" if len(devices) > 1 else "compare the hashes with those of another node"
    message = f"{len(devices)} device{'s' if len(devices) > 1 else ''}, {repeats:,} results: {hashes}; {several}"
    return [PreflightFinding("infrastructure", "compute", "ok", message), *slow]


def _alone(device: Device) -> Iterator[PreflightFinding]:
    result = device.result
    if result["error"]:
        message = f"{device.label}: {result['error']}"
        yield _compute(device, message, "look for XIDs (`dmesg`), and exclude the node")
    for name, count in result["mismatches"].items():
        if count:
            message = f"{device.label}: {name} gave a different result {count:,} of {result['repeats'][name]:,} times"
            yield _compute(device, message, "drain and replace the node: this GPU computes wrong results")
    for name in result["wrong"]:
        message = f"{device.label}: {name} is far from the CPU's result"
        yield _compute(device, message, "drain and replace the node: this GPU computes wrong results")


def _odd_ones(alike: Sequence[Device]) -> Iterator[PreflightFinding]:
    """Find devices of one kind whose results differ from the majority's."""
    named: dict[str, list[str]] = defaultdict(list)
    undecided = []
    for name in alike[0].result["hashes"]:
        hashes = {device.label: device.result["hashes"].get(name, "") for device in alike}
        (value, count), *others = Counter(hashes.values()).most_common()
        if not others:
            continue
        if 2 * count > len(alike) and len(alike) >= FEW_DEVICES:
            for label, item in hashes.items():
                if item != value:
                    named[label].append(name)
        else:
            undecided.append(name)
    for device in alike:
        if names := named.get(device.label):
            message = f"{device.label}: {', '.join(names)} differs from {len(alike) - 1} others of {device.kind[0]}"
            yield _compute(device, message, "drain and replace the node: this GPU computes wrong results")
    if undecided:
        who = ", ".join(device.label for device in alike)
        message = f"{', '.join(undecided)} differs between {who}, and there is no majority"
        remedy = "test at least three devices of the kind; exclude all of these until then"
        yield PreflightFinding("infrastructure", "compute", "fail", message, remedy)


def _slow_ones(alike: Sequence[Device]) -> Iterator[PreflightFinding]:
    """Find slow GPUs; CPUs are skipped, because they also run other work."""
    if len(alike) < FEW_DEVICES or alike[0].result["device"] == "cpu":
        return
    for name in alike[0].result["tflops"]:
        usual = median(device.result["tflops"].get(name, 0.0) for device in alike)
        for device in alike:
            rate = device.result["tflops"].get(name, 0.0)
            if rate < SLOW_DEVICE * usual:
                message = f"{device.label}: {name} at {digits(rate)} TFLOP/s, the others at {digits(usual)}"
                remedy = "check clocks, temperature and power of the GPU; it slows down every rank"
                yield PreflightFinding("infrastructure", "compute_speed", "warn", message, remedy, device.node)


def check_bandwidth(measured: Mapping[str, Any]) -> list[PreflightFinding]:
    """Judge the result of `selftest bandwidth`: units that are slow with all others, or all slow."""
    names, expected = measured["names"], float(measured["expected_bytes_per_second"])
    labels = _unit_labels(names)
    rates = {tuple(item["pair"]): item["bytes_per_second"] for one in measured["rounds"] for item in one}
    if not rates:
        return [PreflightFinding("infrastructure", "bandwidth", "note", "a single unit has no pair to measure", "")]
    usual = median(rates.values())
    against = f", expected {bandwidth(expected)} (measured curve)" if expected else ""
    slow_units = list(measured["slow_units"])
    if slow_units and len(slow_units) < len(labels):
        return [
            PreflightFinding(
                "infrastructure",
                "bandwidth",
                "fail",
                f"{labels[unit]} is slow with all others: {_pairs_of(unit, rates, labels)}; the median is "
                f"{bandwidth(usual)}{against}",
                "exclude it; run `craton doctor` on it to find the missing part of its network",
                names[unit],
            )
            for unit in slow_units
        ]
    slow = [(tuple(pair), rates[tuple(pair)]) for pair in measured["slow_pairs"]]
    if expected and usual < SLOW_PAIR * expected:
        text = f"all pairs are slow: median {bandwidth(usual)}{against}"
        remedy = "check what they share: NCCL's network (NCCL_DEBUG=INFO), the plugin, the placement"
        return [PreflightFinding("infrastructure", "bandwidth", "fail", text, remedy)]
    if slow:
        message = ", ".join(f"{labels[a]} with {labels[b]} {bandwidth(rate)}" for (a, b), rate in slow)
        text = f"{message}; the median is {bandwidth(usual)}{against}"
        remedy = "each of them is fast with others, so the path between them is slow; measure again"
        if len(labels) == 2:
            remedy = "two alone do not show which one is slow: measure with a third"
        return [PreflightFinding("infrastructure", "bandwidth", "warn", text, remedy)]
    text = f"{len(rates)} pairs of {len(labels)}, median {bandwidth(usual)}{against} ({measured['backend']})"
    return [PreflightFinding("infrastructure", "bandwidth", "ok", text)]


def _unit_labels(names: Sequence[str]) -> list[str]:
    """Label hosts by name, and ranks of one host by number."""
    if len(set(names)) == len(names):
        return list(names)
    return [f"rank {number} of {name}" for number, name in enumerate(names)]


def _pairs_of(unit: int, rates: Mapping[tuple[int, ...], float], labels: Sequence[str]) -> str:
    met = [(pair, rate) for pair, rate in rates.items() if unit in pair]
    return ", ".join(f"{bandwidth(rate)} with {labels[sum(pair) - unit]}" for pair, rate in met)


def _compute(device: Device, evidence: str, remedy: str) -> PreflightFinding:
    return PreflightFinding("infrastructure", "compute", "fail", evidence, remedy, device.node)
