"""Checks that need several devices or nodes: who computes another result than the others, who is slower, who is slow
with everybody. Pure functions of what the self-tests printed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from craton.formatting import bandwidth, digits
from craton.orchestration.preflight.finding import PreflightFinding

SLOW_DEVICE = 0.9  # of the median of its kind
GANG_CHECKS = ("compute", "compute_speed", "bandwidth")  # judged anew over all nodes
FEW_DEVICES = 3  # below which there is no majority
SLOW_PAIR = 0.6  # of the measured curve, as the self-test has it


@dataclass(frozen=True)
class Device:
    """One device of one node, and what its self-test printed."""

    node: str
    result: Mapping[str, Any]

    @property
    def label(self) -> str:
        return f"{self.result['device']} of {self.node}" if self.node else str(self.result["device"])

    @property
    def kind(self) -> tuple[str, str, str]:
        """Devices whose results must be the same."""
        return self.result["name"], self.result["torch"], self.result["cuda"]


def check_compute(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[PreflightFinding]:
    """Node → what `selftest compute` said of its devices, over the whole gang."""
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
    several = "all alike" if len(devices) > 1 else "compare the hashes with those of another node"
    message = f"{len(devices)} device{'s' if len(devices) > 1 else ''}, {repeats:,} results: {hashes}; {several}"
    return [PreflightFinding("infrastructure", "compute", "ok", message), *slow]


def _alone(device: Device) -> Iterator[PreflightFinding]:
    result = device.result
    if result["error"]:
        message = f"{device.label}: {result['error']}"
        yield _compute(device, message, "look for XIDs (`dmesg`), and leave the node out")
    for name, count in result["mismatches"].items():
        if count:
            message = f"{device.label}: {name} gave another result {count:,} of {result['repeats'][name]:,} times"
            yield _compute(device, message, "drain the node and have it replaced: this card computes wrong")
    for name in result["wrong"]:
        message = f"{device.label}: {name} is far from what the processor computes"
        yield _compute(device, message, "drain the node and have it replaced: this card computes wrong")


def _odd_ones(alike: Sequence[Device]) -> Iterator[PreflightFinding]:
    """Of devices of one kind, those that are not of the majority's opinion."""
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
            yield _compute(device, message, "drain the node and have it replaced: this card computes wrong")
    if undecided:
        who = ", ".join(device.label for device in alike)
        message = f"{', '.join(undecided)} differs between {who}, and there is no majority"
        remedy = "test at least three devices of the kind; until then leave all of these out"
        yield PreflightFinding("infrastructure", "compute", "fail", message, remedy)


def _slow_ones(alike: Sequence[Device]) -> Iterator[PreflightFinding]:
    """Of GPUs: a processor has other things to do beside the test."""
    if len(alike) < FEW_DEVICES or alike[0].result["device"] == "cpu":
        return
    for name in alike[0].result["tflops"]:
        usual = median(device.result["tflops"].get(name, 0.0) for device in alike)
        for device in alike:
            rate = device.result["tflops"].get(name, 0.0)
            if rate < SLOW_DEVICE * usual:
                message = f"{device.label}: {name} at {digits(rate)} TFLOP/s, the others at {digits(usual)}"
                remedy = "look at clocks, heat and power of the card; it slows every rank down"
                yield PreflightFinding("infrastructure", "compute_speed", "warn", message, remedy, device.node)


def check_bandwidth(measured: Mapping[str, Any]) -> list[PreflightFinding]:
    """What `selftest bandwidth` measured: who is slow with everybody, and whether all are slow."""
    names, expected = measured["names"], float(measured["expected_bytes_per_second"])
    labels = _unit_labels(names)
    rates = {tuple(item["pair"]): item["bytes_per_second"] for one in measured["rounds"] for item in one}
    if not rates:
        return [PreflightFinding("infrastructure", "bandwidth", "note", "one unit alone has no pair to measure", "")]
    usual = median(rates.values())
    against = f", the measured curve says {bandwidth(expected)}" if expected else ""
    guilty = list(measured["slow_units"])
    if guilty and len(guilty) < len(labels):
        return [
            PreflightFinding(
                "infrastructure",
                "bandwidth",
                "fail",
                f"{labels[unit]} is slow with everybody: {_pairs_of(unit, rates, labels)}; the middle is "
                f"{bandwidth(usual)}{against}",
                "leave it out; `craton doctor` on it tells which part of its network is missing",
                names[unit],
            )
            for unit in guilty
        ]
    slow = [(tuple(pair), rates[tuple(pair)]) for pair in measured["slow_pairs"]]
    if expected and usual < SLOW_PAIR * expected:
        text = f"all pairs are slow: {bandwidth(usual)} in the middle{against}"
        remedy = "look at what they have in common: NCCL's network (NCCL_DEBUG=INFO), the plugin, the placement"
        return [PreflightFinding("infrastructure", "bandwidth", "fail", text, remedy)]
    if slow:
        message = ", ".join(f"{labels[a]} with {labels[b]} {bandwidth(rate)}" for (a, b), rate in slow)
        text = f"{message}; the middle is {bandwidth(usual)}{against}"
        remedy = "each of them is fast with others, so it is the path between them; measure again"
        if len(labels) == 2:
            remedy = "two alone do not tell which: measure with a third"
        return [PreflightFinding("infrastructure", "bandwidth", "warn", text, remedy)]
    text = f"{len(rates)} pairs of {len(labels)}, {bandwidth(usual)} in the middle{against} ({measured['backend']})"
    return [PreflightFinding("infrastructure", "bandwidth", "ok", text)]


def _unit_labels(names: Sequence[str]) -> list[str]:
    """Hosts by name; ranks of one host by number."""
    if len(set(names)) == len(names):
        return list(names)
    return [f"rank {number} of {name}" for number, name in enumerate(names)]


def _pairs_of(unit: int, rates: Mapping[tuple[int, ...], float], labels: Sequence[str]) -> str:
    met = [(pair, rate) for pair, rate in rates.items() if unit in pair]
    return ", ".join(f"{bandwidth(rate)} with {labels[sum(pair) - unit]}" for pair, rate in met)


def _compute(device: Device, evidence: str, remedy: str) -> PreflightFinding:
    return PreflightFinding("infrastructure", "compute", "fail", evidence, remedy, device.node)
