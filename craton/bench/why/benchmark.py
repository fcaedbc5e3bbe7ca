"""`craton bench why`: measure how often the diagnosis is right on injected faults.

`simulated_outcomes` writes the run directories of the simulated scenarios, takes their snapshots as `craton why` does
and diagnoses them. `scorer` scores the verdicts; scenarios with live processes are in `live`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from craton.bench.why.scenarios import Truth, draw_scenarios, good_moment, scheduler_of, served, write_world
from craton.observability.diagnosis import Verdict, diagnose
from craton.observability.diagnosis.collect import ask_prometheus, take_snapshot
from craton.observability.diagnosis.snapshot import Snapshot

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class ScenarioOutcome:
    """One scenario and the verdict on it."""

    name: str
    group: str
    truths: tuple[Truth, ...]
    verdict: Verdict
    is_live: bool = False
    snapshot: Snapshot | None = None
    early: Verdict | None = None  # the first alarm of a live run before its fault

    @property
    def named_layers(self) -> tuple[str, ...]:
        """Return the layer of the most likely cause, then those of further findings."""
        return tuple(dict.fromkeys([self.verdict.layer, *(other.layer for other in self.verdict.others)]))

    @property
    def is_right(self) -> bool:
        """Return whether the verdict is right. Quiet: no alarm. Blind: not enough evidence. Single: right layer and
        condition. Double: one fault is the most likely cause and the other is among the further findings."""
        verdict = self.verdict
        if self.group == "quiet":
            return not verdict.is_alarm
        if self.group == "blind":
            return verdict.cause == "cannot_tell"
        if self.group == "single":
            return verdict.layer in self.truths[0].layers and verdict.condition in self.truths[0].conditions
        named_layers = set(self.named_layers)
        is_first_right = any(verdict.layer in truth.layers for truth in self.truths)
        return is_first_right and all(named_layers & set(truth.layers) for truth in self.truths)

    @property
    def has_victim(self) -> bool:
        return self.group in ("single", "double") and any(_has_victim(truth) for truth in self.truths)

    @property
    def is_victim_right(self) -> bool:
        """Return whether, for every fault with a victim, the finding of its layer names that victim."""
        return all(self._names(truth) for truth in self.truths if _has_victim(truth))

    def _names(self, truth: Truth) -> bool:
        findings = [(self.verdict.layer, self.verdict.node, self.verdict.rank, self.verdict.leaf)]
        findings += [(other.layer, other.node, other.rank, other.leaf) for other in self.verdict.others]
        if self.group == "single":
            findings = findings[:1]
        for layer, node, rank, leaf in findings:
            if self.group == "double" and layer not in truth.layers:
                continue
            victim = truth.victim
            if rank is not None and victim.ranks:
                if rank in victim.ranks:
                    return True
            elif (victim.node and node == victim.node) or (victim.leaf and (leaf == victim.leaf)):
                return True
        return False

    def to_json(self) -> dict[str, Any]:
        victims = [{**asdict(truth.victim), "ranks": sorted(truth.victim.ranks)} for truth in self.truths]
        truths = [{**asdict(item), "victim": victim} for item, victim in zip(self.truths, victims, strict=True)]
        judged = {"is_right": self.is_right, "is_victim_right": self.is_victim_right if self.has_victim else None}
        fields = {"name": self.name, "group": self.group, "is_live": self.is_live, "truths": truths}
        early = self.early.to_json() if self.early else None
        return {**fields, **judged, "verdict": self.verdict.to_json(), "early": early}

    @property
    def true_layer(self) -> str:
        return "+".join(truth.layers[0] for truth in self.truths) if self.truths else "none"


def _has_victim(truth: Truth) -> bool:
    return bool(truth.victim.node or truth.victim.ranks or truth.victim.leaf)


def seed_of_today() -> int:
    return int(datetime.now(UTC).strftime("%Y%m%d"))


def simulated_outcomes(seed: int, progress: Progress | None = None) -> list[ScenarioOutcome]:
    with tempfile.TemporaryDirectory(prefix="craton-bench-why-") as name:
        folder, moment = Path(name), good_moment(time.time())
        scenarios = draw_scenarios(seed, moment)
        runs = {}
        for scenario in scenarios:
            world = scenario.world
            runs[world.prefix] = write_world(folder / "runs", f"run-{world.prefix}", world, moment)
        worlds = {item.world.prefix: (item.world, runs[item.world.prefix][1]) for item in scenarios}
        with served(folder / "observed", worlds, moment) as ask_for:
            result = []
            for number, scenario in enumerate(scenarios):
                run, _ = runs[scenario.world.prefix]
                with scheduler_of(run):
                    snapshot = take_snapshot(run, now=moment)
                if scenario.world.is_measured:
                    snapshot, _ = ask_prometheus(snapshot, "the bench", ask_for(scenario.world))
                verdict = diagnose(snapshot)
                result.append(
                    ScenarioOutcome(scenario.name, scenario.group, scenario.truths, verdict, snapshot=snapshot)
                )
                if progress is not None:
                    progress(number + 1, len(scenarios), scenario.name)
            return result
