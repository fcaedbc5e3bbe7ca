"""The page of one run, in parts that are refreshed independently, the more rarely the more they cost.

A part returns HTML fragments and chart data. Fast parts come first, so that a run with 10,000 ranks shows its state and
curves while its ranks are still being read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from craton.observability.web.charts import serving_charts, suite_rows, training_charts
from craton.observability.web.heatmap import heat_map
from craton.observability.web.readers import (
    BAD,
    PHASES,
    TROUBLE,
    History,
    Nodes,
    RankTable,
    RankTails,
    RecordedLooks,
    Records,
    joined,
    last_busy,
    read_member,
    topology,
)
from craton.observability.web.rendering import render
from craton.observability.web.sources import (
    DEADLINE_SECONDS,
    EXAMINED,
    GPU_FAMILIES,
    LATENCIES,
    MAX_NODES,
    Answered,
    Background,
    Cached,
    Late,
    Prometheus,
    Schedulers,
    ServerLook,
    ServerLooks,
    Verdicts,
    agreeing,
    job_kind,
    look_curves,
)
from craton.observability.web.stragglers import finding, straggler
from craton.orchestration import RunStateError, ServerTargets, server_of
from craton.orchestration.watching import (
    MOVING,
    account_lines,
    flat,
    glance_at_members,
    is_server,
    settled_summaries,
    with_members_sum,
)
from craton.telemetry import (
    RunDirectory,
    RunSummary,
    Summarizer,
    event_fields,
    read_json,
    result_details,
    result_scores,
    step_phases,
)
from craton.telemetry.files import paths_in
from craton.telemetry.rank import LEDGER_KINDS, read_samples, spread

QUICK_SECONDS, SLOW_SECONDS = 1.0, 2.0
GPU_SECONDS = 10.0
SHOWN_NODES = 12  # in the table of nodes with problems
SHOWN_EVALUATIONS = 20  # of a suite, the newest
SHOWN_SAMPLES, MAX_SAMPLE_FILES = 12, 8


@dataclass(frozen=True)
class Shown:
    """Content of one part: HTML fragments and chart data, by name."""

    fragments: Mapping[str, str] = field(default_factory=dict)
    charts: Mapping[str, Any] = field(default_factory=dict)


class RunPage:
    """The page of one run, shared by all its viewers."""

    def __init__(
        self,
        run: RunDirectory,
        verdicts: Verdicts,
        alerts: Callable[[], Answered],
        prometheus: Prometheus | None,
        schedulers: Schedulers,
    ) -> None:
        self.run, self._schedulers = run, schedulers
        self.serves = is_server(run)
        self._kind = Cached(lambda: job_kind(run, read_json(run.plan_path)), SLOW_SECONDS)
        self._targets = Cached(lambda: ServerTargets.of(run), SLOW_SECONDS)  # of a server
        self._verdicts, self._alerts, self._prometheus = verdicts, alerts, prometheus
        self._summarizer = Summarizer(run, MAX_NODES)
        self._history, self._tails, self._nodes, self._records = History(run), RankTails(run), Nodes(run), Records(run)
        self._server: ServerLooks | None = None
        self._recorded = RecordedLooks(run)
        self._before_looks: list[ServerLook] = []  # recorded before its server was first scraped
        self._member = Cached(lambda: read_member(run), SLOW_SECONDS)
        self._table = Cached(self._read_table, QUICK_SECONDS)
        self._late = Cached(self._find_late, QUICK_SECONDS)
        self._gpus: Background[dict[str, dict[str, float]]] = Background(
            self._read_gpus, GPU_SECONDS, {}, DEADLINE_SECONDS
        )
        self._members = Cached(lambda: glance_at_members(run, asks_scheduler=False), SLOW_SECONDS)
        self.summary = Cached(self._summarize, QUICK_SECONDS)
        self.parts: dict[str, Cached[Shown]] = {"head": Cached(self._head, QUICK_SECONDS)}
        if self.serves:
            self.parts["serving"] = Cached(self._serving, QUICK_SECONDS)
        else:
            self.parts["curves"] = Cached(self._curves, QUICK_SECONDS)
            self.parts["ranks"] = Cached(self._ranks, SLOW_SECONDS)
            self.parts["samples"] = Cached(self._samples, SLOW_SECONDS)
        self.parts["members"] = Cached(self._show_members, SLOW_SECONDS)
        self.parts["records"] = Cached(self._show_records, SLOW_SECONDS)
        self.parts["nodes"] = Cached(self._show_nodes, SLOW_SECONDS)
        self.parts["verdict"] = Cached(self._show_verdict, QUICK_SECONDS)

    @property
    def is_command(self) -> bool:
        """Whether the job is a command or an evaluation, which may or may not report steps, loss and checkpoints."""
        return self._kind.get() in ("command", "eval")

    def num_nodes(self) -> int:
        """Return the number of nodes from the launch file, which is fast to read."""
        nodes = read_json(self.run.launch_path).get("nodes")
        return len(nodes) if isinstance(nodes, list) else 0

    def _summarize(self) -> RunSummary:
        (own,) = settled_summaries([self._summarizer.summary()], self._schedulers.standings)
        return with_members_sum(self.run, own, self._members.get())

    def _read_table(self) -> RankTable:
        member = self._member.get()
        return self._tails.look(member.nodes, member.ranks_per_node, member.generation, member.num_stages)

    def _find_late(self) -> Late | None:
        state, verdict = self.summary.get().state, self._verdicts.known(self.run)
        return straggler(self.run, state, self._member.get(), self._table.get(), verdict)

    def _read_gpus(self) -> dict[str, dict[str, float]]:
        return self._prometheus.gpus(self.run.name, self._member.get().nodes) if self._prometheus else {}

    def _head(self) -> Shown:
        summary = self.summary.get()
        plan = read_json(self.run.plan_path)
        about: dict[str, Any] = {
            "summary": summary,
            "plan": plan,
            "serves": self.serves,
            "kind": self._kind.get(),
            "is_moving": summary.state in MOVING,
            "dollars_per_day": summary.dollars_per_day,
            "layout": _layout_text(plan),
            "results": result_scores(summary.results),
            "details": result_details(summary.results),
        }
        fragments = {
            "state": render("parts/state.html", **about),
            "tiles": render("parts/tiles.html", **about),
            "ledger": render(
                "parts/ledger.html", kinds=_ledger_rows(summary), accounts=account_lines(summary), **about
            ),
        }
        has_phases = any(summary.measured.get(f"{phase}_seconds") for phase in PHASES)
        if not self.serves and (not self.is_command or has_phases):
            fragments["phases"] = render("parts/phases.html", rows=_phase_rows(summary), **about)
        return Shown(fragments)

    def _show_members(self) -> Shown:
        rows = list(flat(self._members.get()))
        sums = self.summary.get().members
        if not rows or sums is None:
            return Shown()
        return Shown({"members": render("parts/members.html", rows=rows, sums=sums)})

    def _show_verdict(self) -> Shown:
        """Show the verdict. It is requested after everything else was read: a wide run takes long to diagnose."""
        summary = self.summary.get()
        verdict = None
        is_examined = summary.state in EXAMINED
        if is_examined:
            key = (summary.state, summary.step, summary.updated_at)
            movement = summary.movement
            is_moving = summary.state in MOVING
            verdict = self._verdicts.ask(self.run, key, is_moving=is_moving, urgent=True, movement=movement.state)
            verdict = agreeing(verdict, movement)
        return Shown({"verdict": render("parts/verdict.html", verdict=verdict, is_examined=is_examined)})

    def _curves(self) -> Shown:
        curves = self._history.look()
        more = render("parts/own.html", num_shown=len(curves.own), num_hidden=curves.num_hidden)
        fragments = {"own": more} if curves.num_hidden else {}
        if rows := suite_rows(curves)[:SHOWN_EVALUATIONS]:
            fragments["evaluations"] = render("parts/evaluations.html", rows=rows)
        return Shown(fragments, training_charts(curves, read_json(self.run.plan_path)))

    def _samples(self) -> Shown:
        paths = spread(paths_in(self.run.path / "samples", "*.jsonl"), MAX_SAMPLE_FILES)
        samples = read_samples(paths, SHOWN_SAMPLES)
        return Shown({"samples": render("parts/samples.html", samples=samples)} if samples else {})

    def _ranks(self) -> Shown:
        table = self._table.get()
        if self.is_command and not np.isfinite(table.phase_seconds).any():
            return Shown()
        drawn = heat_map(table)
        newest, late = max(table.steps, default=0), self._late.get()
        message = finding(table, late, self.summary.get().state)
        text = render("parts/ranks.html", finding=message, ranks=len(table), step=newest, late=late)
        return Shown({"ranks": text}, {"heat": drawn} if drawn else {})

    def _show_nodes(self) -> Shown:
        member, alerts = self._member.get(), self._alerts()
        mine = alerts.of_run(self.run.name, [*member.nodes, *member.spares])
        is_moving = self.summary.get().state in MOVING
        late = None if self.serves else self._late.get()
        firing = {alert.node for alert in mine if alert.state == "firing"}
        movement = self.summary.get().movement
        views = self._nodes.look(member, late.nodes if late else (), firing, movement)
        troubled = [view for view in views if view.health in BAD] if is_moving else []
        gpus = self._gpus.get()
        counts: dict[str, int] = {}
        for view in views:
            counts[view.health] = counts.get(view.health, 0) + 1
        fragments = {
            "nodes": render(
                "parts/nodes.html",
                counts=counts,
                troubled=troubled[:SHOWN_NODES],
                more=len(troubled) - SHOWN_NODES,
                gpus=gpus,
                families=[(name, title) for name, (_, title) in GPU_FAMILIES.items()],
                busiest=sorted(gpus)[:SHOWN_NODES],
                num_nodes=len(member.nodes),
                num_spares=sum(view.is_spare for view in views),
                ranks_per_node=member.ranks_per_node,
                num_leaves=len({view.leaf for view in views if view.leaf}),
            ),
            "alerts": render(
                "parts/alerts.html", alerts=mine, trouble=alerts.trouble, is_asked=self._prometheus is not None
            ),
        }
        return Shown(fragments, {"topology": topology(views)} if views else {})

    def _show_records(self) -> Shown:
        events = self._records.look()
        rows = [
            {
                "time": event.get("time"),
                "step": event.get("step"),
                "name": str(event.get("event", "event")).replace("_", " "),
                "text": event_fields(event),
                "where": f"rank {event['rank']}" if event.get("rank") is not None else str(event.get("node") or ""),
                "is_trouble": event.get("event") in TROUBLE,
            }
            for event in events
        ]
        fragments = {"events": render("parts/events.html", events=rows)}
        if not self.serves:
            tiers = self._records.tiers(read_json(self.run.plan_path), _began_at(self.run))
            is_moving = self.summary.get().state in MOVING
            if tiers or not self.is_command:
                fragments["checkpoints"] = render(
                    "parts/checkpoints.html", tiers=tiers, now=time.time(), is_moving=is_moving
                )
        return Shown(fragments)

    def _serving(self) -> Shown:
        """Show the server's current metrics after its recorded ones; the last records when it cannot be scraped."""
        is_moving = self.summary.get().state in MOVING
        look, url, trouble = self._ask_server() if is_moving else (None, "", "")
        live_looks = list(self._server.history) if self._server else []
        looks = joined(self._before_looks if look else self._recorded.read(), live_looks)
        shown = look or last_busy(looks)
        text = render(
            "parts/serving.html",
            is_moving=is_moving,
            look=shown,
            is_now=look is not None,
            url=url,
            trouble=trouble,
            latencies=LATENCIES,
            targets={"first_token": self._targets.get().latency_text("ttft")},
        )
        return Shown({"serving": text}, serving_charts(look_curves(looks), "now" if look else "last"))

    def _ask_server(self) -> tuple[ServerLook | None, str, str]:
        """Return the server's metrics, its address, and why it cannot be scraped."""
        try:
            address = server_of(self.run)
        except RunStateError as error:
            return None, "", str(error)
        if self._server is None or self._server.address != address:
            self._server = ServerLooks(address)
            self._before_looks = self._recorded.read()
        return self._server.look(), address.url, ""


def _began_at(run: RunDirectory) -> float | None:
    """Return the start time of its first generation."""
    began = read_json(run.generation_path(0)).get("time")
    return float(began) if isinstance(began, int | float) else None


def _phase_rows(summary: RunSummary) -> list[dict[str, Any]]:
    """Return measured and planned seconds of each phase, with bar lengths in percent."""
    rows = []
    sides = {side: getattr(summary, side) for side in ("plan", "measured")}
    longest = max([1e-9, *(sides[side].get(f"{phase}_seconds") or 0.0 for side in sides for phase in PHASES)])
    known = {phase for phase in PHASES for side in sides.values() if f"{phase}_seconds" in side}
    for phase in step_phases(known):
        planned, measured = (sides[side].get(f"{phase}_seconds") for side in ("plan", "measured"))
        rows.append(
            {
                "phase": phase,
                "planned": planned,
                "measured": measured,
                "planned_percent": 100 * (planned or 0.0) / longest,
                "measured_percent": 100 * (measured or 0.0) / longest,
            }
        )
    return rows


def _ledger_rows(summary: RunSummary) -> list[dict[str, Any]]:
    """Return every ledger kind with its share and the start of its bar segment, in percent."""
    total = sum(summary.ledger.values())
    rows: list[dict[str, Any]] = []
    begin = 0.0
    for kind in LEDGER_KINDS:
        seconds = summary.ledger.get(kind, 0.0)
        if total <= 0 or seconds <= 0:
            continue
        share = seconds / total
        rows.append({"kind": kind, "seconds": seconds, "share": share, "begin": 100 * begin, "width": 100 * share})
        begin += share
    return rows


def _layout_text(plan: Mapping[str, Any]) -> str:
    """Return the parallel dimensions in use, in order: `fsdp 16 · tp 8`."""
    layout = plan.get("layout")
    if not isinstance(layout, dict):
        return ""
    names = ("pp", "replicate", "fsdp", "cp", "tp", "ep", "vpp")
    return " · ".join(
        f"{name} {layout[name]}" for name in names if isinstance(layout.get(name), int) and layout[name] > 1
    )
