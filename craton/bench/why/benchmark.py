"""`craton bench why`: how often the diagnosis is right, on faults that were put there.

`bench_why` writes the run directories of the simulated scenarios, takes their snapshots as `craton why` does, judges
them and scores the verdicts; `score` is pure. Scenarios with live processes are in `bench_live`.
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
    """One scenario and what was said of it."""

    name: str
    group: str
    truths: tuple[Truth, ...]
    verdict: Verdict
    is_live: bool = False
    snapshot: Snapshot | None = None
    early: Verdict | None = None  # the first alarm of a live run before anything was wrong with it

    @property
    def said_layers(self) -> tuple[str, ...]:
        """The guilty layer first, then those of further faults."""
        return tuple(dict.fromkeys([self.verdict.layer, *(other.layer for other in self.verdict.others)]))

    @property
    def is_right(self) -> bool:
        """Quiet: no alarm. Blind: it says that it cannot tell. Single: the layer. Double: one fault is named as the
        guilty one and the other beside it."""
        verdict = self.verdict
        if self.group == "quiet":
            return not verdict.is_alarm
        if self.group == "blind":
            return verdict.cause == "cannot_tell"
        if self.group == "single":
            return verdict.layer in self.truths[0].layers and verdict.condition in self.truths[0].conditions
        named_layers = set(self.said_layers)
        is_first_right = any(verdict.layer in truth.layers for truth in self.truths)
        return is_first_right and all(named_layers & set(truth.layers) for truth in self.truths)

    @property
    def has_victim(self) -> bool:
        return self.group in ("single", "double") and any(_has_victim(truth) for truth in self.truths)

    @property
    def is_victim_right(self) -> bool:
        """Of every fault with a victim: whoever the finding of that layer names."""
        return all(self._names(truth) for truth in self.truths if _has_victim(truth))

    def _names(self, truth: Truth) -> bool:
        messages = [(self.verdict.layer, self.verdict.node, self.verdict.rank, self.verdict.leaf)]
        messages += [(other.layer, other.node, other.rank, other.leaf) for other in self.verdict.others]
        if self.group == "single":
            messages = messages[:1]
        for layer, node, rank, leaf in messages:
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
