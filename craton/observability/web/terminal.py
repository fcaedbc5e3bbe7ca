"""The ranks of a run in a terminal: one line each, with the phases of its step as a bar, and the verdict above.

It uses the readers of the web page, so that both show the same. A wide run shows as many ranks as fit; arrows scroll
and sort, q quits without touching the run. One thread reads the run and another draws, so that keys work at once
however long a read takes.
"""

from __future__ import annotations

import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from craton import formatting, terminal_marks
from craton.observability.web.readers import (
    BAD,
    COLUMNS,
    PHASES,
    History,
    Nodes,
    NodeView,
    RankTable,
    RankTails,
    read_member,
)
from craton.observability.web.sources import (
    DEADLINE_SECONDS,
    EXAMINED,
    FIRST_SECONDS,
    GPU_FAMILIES,
    MAX_NODES,
    Background,
    CachedVerdict,
    LocalGpus,
    Prometheus,
    Verdicts,
    agreeing,
    examine,
    not_examined,
    prometheus_address,
)
from craton.observability.web.stragglers import finding, straggler
from craton.orchestration import Standing
from craton.orchestration.watching import MOVING, is_server, settled_summaries, standings_of
from craton.printable import printable_line
from craton.telemetry import RunDirectory, RunSummary, Summarizer, result_details, result_words, step_phases
from craton.telemetry.files import noting_unread
from craton.telemetry.node import RankStatus

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

LOOK_SECONDS = 1.0  # minimum between two reads
MAX_SHARE = 0.5  # maximum share of time spent on reading
SCHEDULER_SECONDS = 5.0  # limits the load on schedulers
GPU_SECONDS = 10.0
BAR_WIDTH = 28
PHASE_LETTERS = {
    "rollout": "r",
    "reward": "v",
    "sync": "s",
    "data": "d",
    "compute": "c",
    "communication": "m",
    "optimizer": "o",
    "checkpoint": "k",
}
TONES = {
    "healthy": "green",
    "done": "green",
    "slow": "yellow",
    "hung": "bold red",
    "dead": "bold red",
    "wrong": "bold red",
}
HEALTH_STYLES = {**dict.fromkeys(BAD, "bold red"), "slow": "yellow", "alert": "yellow", "running": "green"}
SORTS = ("rank", "step time", "progress", "health")
SHOWN_SPARES = 3  # with problems
_WORKING = ("running", "spare", "unknown")  # health of nodes whose ranks still do what they last reported


@dataclass(frozen=True)
class RankLine:
    """One rank now. None: not known."""

    rank: int
    node: str
    health: str  # its node's, or its own problem
    kind: str
    step: int | None
    progress_age_seconds: float | None
    step_seconds: float | None
    phases: dict[str, float]
    memory_bytes: float | None


@dataclass(frozen=True)
class TopLook:
    """State of a run at one moment."""

    summary: RunSummary
    verdict: CachedVerdict | None
    finding: str
    nodes: list[NodeView]
    ranks: list[RankLine]
    gpus: dict[str, dict[str, float]] = field(default_factory=dict)  # node → family → worst GPU
    trouble: str = ""  # failed queries
    own_metrics: dict[str, float] = field(default_factory=dict)  # custom metrics with their newest values
    unread: tuple[str, ...] = ()  # skipped files of the run, and why


class TopView:
    """Read one run repeatedly."""

    def __init__(
        self,
        run: RunDirectory,
        prometheus: str | None = None,
        examine: Callable[[RunDirectory, str | None], CachedVerdict] = examine,
    ) -> None:
        prometheus = prometheus_address(prometheus)
        self.run = run
        self._examine: Callable[[RunDirectory], CachedVerdict] = lambda run: examine(run, prometheus)
        self._verdicts = Verdicts(self._examine)
        self._said: Background[dict[str, Standing]] = Background(  # the last answer holds until the next
            lambda: standings_of([run]), SCHEDULER_SECONDS, {}, deadline_seconds=math.inf
        )
        asked = Prometheus(prometheus) if prometheus else None
        self._local_gpus = LocalGpus(run)
        self._summarizer, self._tails, self._nodes = Summarizer(run, MAX_NODES), RankTails(run), Nodes(run)
        self._history = None if is_server(run) else History(run)  # a server's metrics are not custom metrics
        self._asked: Background[tuple[dict[str, dict[str, float]], str]] | None = None
        if asked:
            late: tuple[dict[str, dict[str, float]], str] = ({}, asked.late.trouble)
            self._asked = Background(partial(self._ask_gpus, asked), GPU_SECONDS, late, DEADLINE_SECONDS)

    def look(self, wait_for_verdict: bool = False) -> TopLook:
        """Return the current state. Schedulers, Prometheus and `craton why` are queried in the background; with
        `wait_for_verdict`, wait for all of them. Unreadable files are listed, and the rest is shown."""
        with noting_unread() as unread:
            look = self._look(wait_for_verdict)
        return replace(look, unread=tuple(dict.fromkeys(str(error) for error in unread.values())))

    def _look(self, wait_for_verdict: bool) -> TopLook:
        ask = standings_of if wait_for_verdict else self._last_said
        summary = settled_summaries([self._summarizer.summary()], ask)[0]
        member = read_member(self.run)
        table = self._tails.look(member.nodes, member.ranks_per_node, member.generation, member.num_stages)
        verdict = self._ask(summary, wait_for_verdict) if summary.state in EXAMINED else None
        verdict = agreeing(verdict, summary.movement)
        late = straggler(self.run, summary.state, member, table, verdict)
        views = self._nodes.look(member, late.nodes if late else (), (), summary.movement)
        if self._asked is None:
            gpus, trouble = self._local_gpus.look(), self._local_gpus.trouble
        else:
            gpus, trouble = self._asked.get(DEADLINE_SECONDS if wait_for_verdict else FIRST_SECONDS)
        message = finding(table, late, summary.state)
        own = {name: values[-1] for name, (_, values) in self._history.look().own.items()} if self._history else {}
        return TopLook(summary, verdict, message, views, _lines(table, views, self._nodes), gpus, trouble, own)

    def close(self) -> None:
        """Stop computing verdicts."""
        self._verdicts.close()

    def _last_said(self, runs: list[RunDirectory]) -> dict[str, Standing]:
        return self._said.get()

    def _ask_gpus(self, asked: Prometheus) -> tuple[dict[str, dict[str, float]], str]:
        trouble = asked.alerts().trouble
        return ({} if trouble else asked.gpus(self.run.name, read_member(self.run).nodes)), trouble

    def _ask(self, summary: RunSummary, wait: bool) -> CachedVerdict | None:
        if not wait:
            key = (summary.state, summary.step, summary.updated_at)
            movement = summary.movement.state
            is_moving = summary.state in MOVING
            return self._verdicts.ask(self.run, key, is_moving=is_moving, urgent=True, movement=movement)
        try:
            return self._examine(self.run)
        except Exception as error:  # noqa: BLE001 - without a verdict, the rest is still shown
            return not_examined(error)


def frame(
    look: TopLook, width: int, rows: int | None, sort: str = "rank", first: int = 0, has_color: bool = True
) -> RenderableType:
    """Render one frame with `rows` ranks from `first` on (None: all). Without colours the phases are letters."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    lines = ordered(look, sort)
    shown = lines[first : None if rows is None else first + rows]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False, expand=False)
    table.add_column("RANK", justify="right", no_wrap=True)
    table.add_column("NODE", no_wrap=True, max_width=24)
    table.add_column("NOW", no_wrap=True)
    table.add_column("STEP", justify="right", no_wrap=True)
    table.add_column("PROGRESS", justify="right", no_wrap=True)
    table.add_column("STEP TIME", justify="right", no_wrap=True)
    bar_width = max(10, min(BAR_WIDTH, width - 90))
    table.add_column("PHASES", no_wrap=True, min_width=bar_width)
    table.add_column("MEMORY", justify="right", no_wrap=True)
    families = list(GPU_FAMILIES) if look.gpus else []
    for family in families:
        table.add_column(GPU_FAMILIES[family][1], justify="right", no_wrap=True)
    longest = max([1e-9, *(line.step_seconds or 0.0 for line in look.ranks)])
    for line in shown:
        gpu = look.gpus.get(line.node, {})
        table.add_row(
            str(line.rank),
            Text(line.node, style=HEALTH_STYLES.get(line.health, "")),
            Text(_doing(line), style=HEALTH_STYLES.get(line.health, "dim")),
            formatting.UNKNOWN if line.step is None else f"{line.step:,}",
            formatting.UNKNOWN
            if line.progress_age_seconds is None
            else f"{formatting.whole_duration(line.progress_age_seconds)} ago",
            formatting.duration(line.step_seconds),
            phase_bar(line, longest, bar_width, has_color),
            formatting.memory(line.memory_bytes),
            *(formatting.digits(gpu.get(family)) for family in families),
        )
    hidden = [Text(f"{len(shown)} of {len(lines):,} ranks", style="dim")] if len(shown) < len(lines) else []
    return Group(*_above(look), table, *hidden, *_below(look, has_color))


def _doing(line: RankLine) -> str:
    """Return what a rank does, or the problem of its node."""
    if line.health == "stuck" and line.kind:
        return f"stuck in {line.kind}"
    return line.kind if line.health in _WORKING else line.health


def rows_that_fit(look: TopLook, console: Console) -> int:
    """Return how many ranks fit on the screen: the verdict, and the text below the ranks, may take several lines."""
    from rich.console import Group

    around = Group(*_above(look), *_below(look), _hint(max(SORTS, key=len)))
    header_and_hidden = 2
    return max(1, console.height - len(console.render_lines(around, pad=False)) - header_and_hidden)


def ordered(look: TopLook, sort: str) -> list[RankLine]:
    """Return the ranks in the given order; `health` puts those with problems first."""
    keys: dict[str, Callable[[RankLine], Any]] = {
        "rank": lambda line: line.rank,
        "step time": lambda line: (
            -sum(line.phases.get(phase, 0.0) for phase in ("data", "compute", "optimizer", "rollout"))
        ),
        "progress": lambda line: -(line.progress_age_seconds or 0.0),
        "health": lambda line: (line.health not in BAD, line.rank),
    }
    return sorted(look.ranks, key=keys[sort])


def phase_bar(line: RankLine, longest: float, width: int, has_color: bool = True) -> Text:
    """Return the phases of a step side by side, scaled to the longest step."""
    from rich.text import Text

    text = Text()
    begin = 0.0
    for phase in step_phases(line.phases):
        style = terminal_marks.PHASE_STYLES[phase]
        end = begin + line.phases.get(phase, 0.0) / longest * width
        mark = "█" if has_color else PHASE_LETTERS[phase]
        text.append(mark * (round(end) - round(begin)), style=style)
        begin = end
    return text


def frame_json(look: TopLook) -> dict[str, Any]:
    """Return the frame as JSON, for scripts."""
    summary = look.summary
    return {
        "name": summary.name,
        "state": summary.state,
        "movement": asdict(summary.movement),
        "step": summary.step,
        "steps": summary.steps,
        "eta_seconds": summary.eta_seconds,
        "loss": summary.loss if summary.loss is not None and math.isfinite(summary.loss) else None,
        "results": summary.results,
        "own_metrics": look.own_metrics,
        "tokens_per_second": summary.tokens_per_second,
        "plan": summary.plan,
        "goodput": summary.goodput,
        "cost_dollars": summary.cost_dollars,
        "storage": summary.storage,
        "unread": list(look.unread),
        "verdict": asdict(look.verdict) if look.verdict else None,
        "nodes": [{**asdict(node), "gpus": look.gpus.get(node.node, {})} for node in look.nodes],
        "ranks": [asdict(rank) for rank in look.ranks],
    }


def show_top(view: TopView, console: Console) -> None:
    """Show the run until q or Ctrl-C, also after its end, so that the last state of its ranks stays readable."""
    from rich.live import Live

    sort, first = 0, 0
    with (
        _Looks(view) as looks,
        _single_keys(looks.news) as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            look = looks.newest()
            rows = rows_that_fit(look, console) if look else 1
            first = max(0, min(first, len(look.ranks) - rows if look else 0))
            live.update(_screen(look, view.run, console.width, rows, SORTS[sort], first), refresh=True)
            key = keys()
            if key in ("q", "\x1b", "\x03"):
                return
            first += {"down": 1, "up": -1, "page down": rows, "page up": -rows, "j": 1, "k": -1}.get(key, 0)
            sort = (sort + {"right": 1, "left": -1, "s": 1}.get(key, 0)) % len(SORTS)


class _Looks:
    """Read a run repeatedly in its own thread. `news` becomes readable when there is a new state."""

    def __init__(self, view: TopView) -> None:
        self._view = view
        self._newest: TopLook | None = None
        self._error: Exception | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="looks", daemon=True)
        self.news, self._tell = os.pipe()

    def __enter__(self) -> _Looks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop without waiting for a read in progress."""
        self._is_over.set()
        os.close(self.news)

    def newest(self) -> TopLook | None:
        """Return the newest state; None before the first. Raise the error of the last read, if it failed."""
        if self._error is not None:
            raise self._error
        return self._newest

    def _work(self) -> None:
        while not self._is_over.is_set() and self._error is None:
            began = time.monotonic()
            try:
                self._newest = self._view.look()
            except Exception as error:  # noqa: BLE001 - raised again by the thread that draws
                self._error = error
            took = time.monotonic() - began
            with suppress(BrokenPipeError):  # drawing has ended
                os.write(self._tell, b".")
            self._is_over.wait(max(LOOK_SECONDS, took * (1.0 - MAX_SHARE) / MAX_SHARE))
        os.close(self._tell)


def _screen(look: TopLook | None, run: RunDirectory, width: int, rows: int, sort: str, first: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    if look is None:
        return Text(f"reading {run.name} … · q quits, the run continues", style="dim")
    return Group(frame(look, width, rows, sort, first), _hint(sort))


def _hint(sort: str) -> Text:
    from rich.text import Text

    return Text(f"sorted by {sort} · ↑ ↓ scroll · ← → sort · q quits, the run continues", style="dim")


def _lines(table: RankTable, views: list[NodeView], nodes: Nodes) -> list[RankLine]:
    """Return every rank with measurements or an agent status. The age of the status adds to the age of progress."""
    now = time.time()
    measured = {rank: index for index, rank in enumerate(table.ranks)}
    rows = table.values.tolist()  # as lists of floats: single array elements are slow
    step_seconds, memory_bytes = COLUMNS.index("run_step_seconds"), COLUMNS.index("run_memory_bytes")
    result = []
    for view in views:
        if view.is_spare:
            continue
        status = nodes.status(view.node)
        told_age_seconds = status.age_seconds(now) if status else 0.0
        status_of_rank = {rank.rank: rank for rank in status.ranks} if status else {}
        is_whole = view.health in ("lost", "slow") or view.health not in BAD  # else it is a problem of one rank
        for number in range(max(len(view.ranks), 1)):
            rank = view.first_rank + number
            index, rank_now = measured.get(rank), status_of_rank.get(rank)
            row = rows[index] if index is not None else None
            result.append(
                RankLine(
                    rank=rank,
                    node=view.node,
                    health=view.health if is_whole or view.ranks[number : number + 1] == "!" else "running",
                    kind=rank_now.kind if rank_now else "",
                    step=rank_now.step if rank_now else table.steps[index] if index is not None else None,
                    progress_age_seconds=_progress_age(rank_now, told_age_seconds),
                    step_seconds=_known(row[step_seconds]) if row else None,
                    phases={phase: value for phase, value in zip(PHASES, row, strict=False) if value == value}
                    if row
                    else {},
                    memory_bytes=_known(row[memory_bytes]) if row else None,
                )
            )
    return result


def _progress_age(rank: RankStatus | None, told_age_seconds: float) -> float | None:
    """Return the age of the last progress; None if the rank never reported any."""
    if rank is None or not (rank.progress_age_seconds or rank.step):
        return None
    return rank.progress_age_seconds + told_age_seconds


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _title(summary: RunSummary) -> Text:
    from rich.text import Text

    change = formatting.change(summary.tokens_per_second, summary.plan.get("tokens_per_second"))
    steps = f"step {summary.step:,}" + (f"/{summary.steps:,}" if summary.steps else "")
    speed = f"{formatting.amount(summary.tokens_per_second)} tokens/s ({change} against plan)"
    has_loss = summary.loss is not None and "reward" not in summary.results  # that of rewards is about 0
    words = [
        steps,
        *([] if summary.movement.is_stuck else [f"ETA {formatting.whole_duration(summary.eta_seconds)}"]),
        *([f"loss {formatting.loss(summary.loss)}"] if has_loss else []),
        *([summary.movement.text] if summary.movement.is_stuck else [speed]),
        f"goodput {formatting.percent(summary.goodput)}",
        formatting.dollars(summary.cost_dollars),
    ]
    state = summary.shown_state
    tone = "green" if state in ("running", "done") else "bold red" if state in ("failed", "lost", "stuck") else "cyan"
    return Text.assemble((summary.name, "bold"), "  ", (state, tone), "  ", " · ".join(words))


def _above(look: TopLook) -> list[Text]:
    """Return the lines above the ranks."""
    from rich.text import Text

    spares = [view for view in look.nodes if view.is_spare and view.health in BAD]
    own = " · ".join(f"{name} {formatting.amount(value)}" for name, value in look.own_metrics.items())
    results = look.summary.results
    reached = [*result_words(results), *(f"{title} {text}" for title, text in result_details(results))]
    return [
        _title(look.summary),
        *([Text(" · ".join(reached), no_wrap=True, overflow="ellipsis")] if reached else []),
        *([Text(own, style="dim", no_wrap=True, overflow="ellipsis")] if own else []),
        *([Text(look.summary.storage, style="yellow")] if look.summary.storage else []),
        *_verdict_lines(look),
        *(Text(f"{view.node} is {view.reason}", style=HEALTH_STYLES[view.health]) for view in spares[:SHOWN_SPARES]),
    ]


def _below(look: TopLook, has_color: bool = True) -> list[Text]:
    """Return the lines below the ranks."""
    from rich.text import Text

    legend = Text("phases: ", style="dim")
    for phase in step_phases({phase for line in look.ranks for phase in line.phases}):
        style = terminal_marks.PHASE_STYLES[phase]
        legend.append("█ " if has_color else f"{PHASE_LETTERS[phase]} ", style=style).append(f"{phase}  ", style="dim")
    troubles = [*([look.trouble] if look.trouble else []), *map(printable_line, look.unread)]
    return [*(Text(trouble, style="red") for trouble in troubles), legend]


def _verdict_lines(look: TopLook) -> list[Text]:
    from rich.text import Text

    verdict = look.verdict
    if verdict is None:
        note = (
            [Text(printable_line(look.summary.movement.sentence), style="cyan")] if look.summary.movement.ranks else []
        )
        asking = [Text("diagnosing …", style="dim")] if look.summary.state in EXAMINED else []
        return [*note, *asking, Text(look.finding, style="dim")]
    style = TONES.get(verdict.condition, "cyan")
    lines = [Text.assemble((f"{verdict.condition}: ", style), verdict.sentence)]
    if verdict.action:
        lines.append(Text.assemble(("do: ", "bold"), verdict.action))
    return lines


@contextmanager
def _single_keys(news: int) -> Iterator[Callable[[], str]]:
    """Yield a reader of single keys, without Enter, or "" when there is a new state; restore the terminal later."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield lambda: _read_key(descriptor, news)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


_SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
}


def _read_key(descriptor: int, news: int) -> str:
    """Return the next key, or "" when `news` came first."""
    ready = select.select([descriptor, news], [], [])[0]
    if news in ready:
        os.read(news, 4096)
    if descriptor not in ready:
        return ""
    data = os.read(descriptor, 16)
    if not data:  # the terminal was closed
        return "q"
    return _SEQUENCES.get(data, data[:1].decode(errors="replace") if data[:1] != b"\x1b" or data == b"\x1b" else "")
