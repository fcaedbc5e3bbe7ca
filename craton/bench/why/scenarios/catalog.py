"""The simulated scenarios of `craton bench why`, drawn from a seed, and their ground truth.

Four groups. Quiet ones have no fault, and any alarm is false. Single ones have one fault, double ones two in different
layers at once. Blind ones have a fault without evidence of its layer: a fault of another layer would look the same, so
the only right verdict is "not enough evidence".
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from craton.bench.why.scenarios import hardware, programs
from craton.bench.why.scenarios import machines as scenarios_machines
from craton.bench.why.scenarios.faults import FAULTS, ScenarioFault, Victim
from craton.bench.why.scenarios.quiet import QUIET
from craton.bench.why.scenarios.world import World

FAULTED = (programs, hardware, scenarios_machines)  # imported to fill FAULTS
# Pairs that are visible together: the second fault does not end or hang the run that shows the first.
PAIRS = (
    ("overheats", "file_system_slow"),
    ("overheats", "disk_full"),
    ("loses_packets", "saves_slow"),
    ("processor_taken", "loses_packets"),
    ("swaps", "disk_full"),
    ("power_capped", "read_only"),
    ("clock_locked", "rail_slow"),
    ("pcie_narrow", "disk_full"),
    ("nvlink_errs", "file_system_slow"),
    ("somebody_computes", "overheats"),
    ("loader_slow", "overheats"),
    ("firmware_stops", "disk_full"),
)
# Harmless anomalies that may occur beside a fault, as on any cluster.
DECOYS = (
    *("busy_host", "hot_cards", "corrected_errors", "old_xid", "few_retransmissions", "old_network_events"),
    *("busy_file_system", "one_failed_save", "within_the_interval"),
)
DECOY_SHARE = 0.5  # of the worlds with a fault
# Faults that leave no evidence of their layer without machine metrics and logs.
BLINDED = (
    "overheats",
    "processor_taken",
    "more_work_for_one",
    "clock_locked",
    "power_capped",
    "pcie_narrow",
    "firmware_stops",
    "link_goes_down",
    "asks_for_a_reset",
    "nvlink_breaks",
)


@dataclass(frozen=True)
class Truth:
    """The ground truth of one injected fault."""

    fault: str
    layers: tuple[str, ...]
    conditions: tuple[str, ...]
    victim: Victim


@dataclass
class Scenario:
    name: str
    group: str  # quiet, single, double, blind
    world: World
    truths: tuple[Truth, ...] = ()


def draw_scenarios(seed: int, moment: float) -> list[Scenario]:
    """Draw all simulated scenarios: every kind at least once, healthy runs and some others more often."""
    scenarios: list[Scenario] = []

    def world(name: str) -> World:
        chance = random.Random(f"{seed} {name}")
        return World(
            chance,
            now=moment,
            prefix=f"w{len(scenarios)}",
            num_nodes=chance.choice((2, 3, 4, 4)),
            ranks_per_node=chance.choice((4, 4, 4, 8)),
            steps=chance.randint(70, 95),
            age_seconds=chance.uniform(2.5, 9.0) * 3600.0,
            step_seconds=chance.uniform(4.0, 9.0),
            plan_error=chance.uniform(0.95, 1.05),
        )

    for name, change in QUIET.items():
        drawn = world(f"quiet {name}")
        change(drawn)
        scenarios.append(Scenario(name, "quiet", drawn))
    for name in ("plain again", "plain once more", "plain a last time"):
        drawn = world(f"quiet {name}")
        scenarios.append(Scenario(name, "quiet", drawn))

    def troubled(name: str) -> World:
        drawn = world(name)
        if drawn.chance.random() < DECOY_SHARE:
            QUIET[drawn.chance.choice(DECOYS)](drawn)
        return drawn

    for name, fault in FAULTS.items():
        drawn = troubled(f"single {name}")
        scenarios.append(Scenario(name, "single", drawn, (put(fault, drawn),)))
    for first, second in PAIRS:
        drawn = troubled(f"double {first} {second}")
        truths = (put(FAULTS[first], drawn), put(FAULTS[second], drawn))
        scenarios.append(Scenario(f"{first} and {second}", "double", drawn, truths))
    for name in BLINDED:
        drawn = troubled(f"blind {name}")
        truth = put(FAULTS[name], drawn)
        drawn.is_measured = drawn.has_logs = False
        scenarios.append(Scenario(f"{name}, unseen", "blind", drawn, (truth,)))
    return scenarios


def put(fault: ScenarioFault, world: World) -> Truth:
    return Truth(fault.name, fault.layers, fault.conditions, fault.put(world))
