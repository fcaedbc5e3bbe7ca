"""A plan in the terminal: the verdict first, then the details behind it, then the alternatives.

Nothing is truncated at 80 columns or more; without a colour terminal the same text is printed plain.
"""

from __future__ import annotations

from datetime import date

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from craton import formatting
from craton.planning.report import findings
from craton.planning.result import Plan
from craton.telemetry import step_phases
from craton.terminal_marks import PHASE_STYLES

_PHASE_NOTES = {"communication": "exposed", "checkpoint": "blocked"}
_MEMORY_STYLES = ("blue", "cyan", "magenta", "yellow", "green", "red", "white")
_MEMORY_GLYPHS = "█▓▒"  # neighbours differ without colour too
_EIGHTHS = " ▏▎▍▌▋▊▉"
_NUM_ALTERNATIVES = 5
_CHOSEN = "◆"


def render_plan(plan: Plan, console: Console, start: date | None = None) -> None:
    """Print the whole plan; with `start`, also the end dates of the run."""
    _print_verdict(plan, console, start)
    _print_step(plan, console)
    _print_memory(plan, console)
    _print_storage(plan, console)
    _print_alternatives(plan, console)
    _print_sensitivities(plan, console)
    if plan.warnings:
        console.print()
    for warning in plan.warnings:
        _print_lines(console, Text("! ", style="bold yellow"), Text(warning))


def render_front(plan: Plan, console: Console) -> None:
    """Print every cluster of the search, fastest first, with its layout and why it was or was not chosen."""
    rows = findings.candidates(plan)
    priced = any(item.cost_dollars is not None and item.fits for item, _ in rows)
    finding = findings.front_text(plan) if priced else "no price is known for any of them"
    _print_lines(console, Text("Clusters  ", style="bold"), Text(finding))
    numbers = _table("  cluster", ">step", ">run", ">cost", ">goodput", "why")
    layouts = _table("  cluster", "layout")
    for entry, chosen in rows:
        mark = (f"{_CHOSEN} " if chosen else "  ", "bold green")
        _add_row(
            numbers,
            Text.assemble(mark, (entry.cluster, "bold" if chosen else "")),
            formatting.duration(entry.step_seconds),
            formatting.duration(entry.run_seconds),
            "no price" if entry.cost_dollars is None else formatting.dollars(entry.cost_dollars),
            "–" if entry.goodput is None else formatting.percent(entry.goodput),
            Text(entry.reason, style="bold" if chosen else "" if entry.fits else "red"),
        )
        _add_row(layouts, Text.assemble(mark, entry.cluster), str(entry.layout))
    for table in (numbers, layouts):
        table.columns[0].no_wrap = True
        console.print(table, highlight=False)
        console.print()


def _print_verdict(plan: Plan, console: Console, start: date | None) -> None:
    status = ("FITS", "bold green") if plan.fits else ("DOES NOT FIT", "bold red")
    console.print(Text.assemble((plan.job, "bold"), "  ", status), highlight=False)
    console.print(Text(findings.verdict(plan)), highlight=False)
    if sharing := findings.sharing_text(plan.cluster):
        _print_lines(console, Text("sharing     ", style="dim"), Text(sharing))
    _print_lines(console, Text("layout      ", style="dim"), _wrapped_layout(plan, console.width - 12))
    _print_lines(console, Text("profile     ", style="dim"), Text(findings.calibration_text(plan)))
    _print_lines(console, Text("bottleneck  ", style="dim"), _bottleneck(plan))
    console.print()

    speed = f"{formatting.count(plan.tokens_per_second)} tokens/s, {formatting.percent(plan.mfu)} MFU"
    stale = plan.cost is not None and plan.cost.price_age_days > findings.STALE_PRICE_DAYS
    table = _table("", ">predicted", findings.INTERVAL_NAME, "")
    _add_row(
        table,
        "step",
        Text(formatting.duration(plan.step_seconds), style="bold"),
        formatting.duration_range(plan.step_seconds_low, plan.step_seconds_high),
        speed,
    )
    _add_row(
        table,
        "run",
        Text(formatting.duration(plan.run_seconds), style="bold"),
        formatting.duration_range(plan.run_seconds_low, plan.run_seconds_high),
        findings.batch_text(plan),
    )
    if start and (days := findings.end_days(plan, start)):
        ends, first, last = days
        done = Text(formatting.day(ends), style="bold")
        _add_row(table, "done", done, formatting.day_range(first, last), f"if started {formatting.day(start)}")
    cost = plan.cost
    _add_row(
        table,
        "cost",
        Text(formatting.dollars(cost.cost_dollars) if cost else "–", style="bold"),
        formatting.dollars_range(cost.cost_dollars_low, cost.cost_dollars_high) if cost else "",
        Text(findings.price_text(plan), style="yellow" if stale or cost is None else ""),
    )
    _add_row(
        table,
        "goodput",
        Text(formatting.percent(plan.goodput.goodput), style="bold"),
        formatting.percent_range(plan.goodput.goodput_low, plan.goodput.goodput_high),
        findings.failure_text(plan),
    )
    console.print(table, highlight=False)


def _print_step(plan: Plan, console: Console) -> None:
    _print_heading(console, "Step", findings.step_text(plan))
    scale, unit = (1.0, "s") if plan.step_seconds >= 0.1 else (1e3, "ms")
    bar_width = max(10, min(48, console.width - 62))
    longest = max(plan.phases.values())
    table = _table("", f">{unit}", ">share", "")
    for phase in step_phases(plan.phases):
        seconds = plan.phases.get(phase, 0.0)
        parts = findings.shown_parts(plan, phase)
        note = f" ({_PHASE_NOTES[phase]})" if phase in _PHASE_NOTES else ""
        only = f": {parts[0][0]}" if len(parts) == 1 else ""
        _add_row(
            table,
            Text.assemble((phase, "bold"), (note + only, "dim")),
            f"{seconds * scale:.3f}",
            formatting.percent(seconds / plan.step_seconds),
            Text(_bar(seconds / longest, bar_width), style=PHASE_STYLES[phase]),
        )
        for name, part_seconds in parts if len(parts) > 1 else ():
            _add_row(
                table,
                Text(f"  {name}", style="dim"),
                Text(f"{part_seconds * scale:.3f}", style="dim"),
                Text(formatting.percent(part_seconds / plan.step_seconds), style="dim"),
                Text(_thin_bar(part_seconds / longest, bar_width), style=f"dim {PHASE_STYLES[phase]}"),
            )
    _print_indented(console, table)
    if rollouts := findings.rollout_text(plan):
        _print_heading(console, "Rollouts", rollouts)


def _print_memory(plan: Plan, console: Console) -> None:
    _print_heading(console, "Memory", findings.memory_text(plan), "" if plan.fits else "red")
    parts = sorted(((name, size) for name, size in plan.memory_parts.items() if size > 0), key=lambda part: -part[1])
    whole = max(plan.memory_bytes, plan.memory_limit_bytes)
    width = min(console.width, 100) - 2
    bar, legend = Text(), [Text("GiB:")]
    drawn, total = 0, 0.0
    for index, (name, size) in enumerate(parts):
        glyph, style = _MEMORY_GLYPHS[index % 3], _MEMORY_STYLES[index % len(_MEMORY_STYLES)]
        total += size
        end = round(width * total / whole)
        bar.append(glyph * (end - drawn), style=style)
        drawn = end
        legend.append(Text.assemble((glyph, style), f" {name} {formatting.gibibytes(size)}"))
    bar.append("·" * (width - drawn), style="dim")
    if not plan.fits:
        mark = min(width - 1, round(width * plan.memory_limit_bytes / whole))
        bar = Text.assemble(bar[:mark], ("|", "bold red"), bar[mark + 1 :])
        legend.append(Text("| GPU limit", style="bold red"))
    _print_indented(console, bar)
    _print_packed(console, legend)


def _print_storage(plan: Plan, console: Console) -> None:
    _print_heading(console, "Checkpoints and recovery", findings.storage_text(plan))
    rows = findings.tier_rows(plan)
    if not rows:
        _print_indented(console, Text("no checkpoint tiers are planned", style="dim"))
        return
    wide = console.width >= 96
    columns = ["  tier", ">every", ">write", ">blocks", ">read", ">best\nevery", ">lost per\nfailure", ">goodput"]
    table = _table(*columns, *([findings.INTERVAL_NAME] if wide else []))
    for name, texts in rows:
        chosen = name == plan.goodput.method
        cells = [Text.assemble((f"{_CHOSEN} " if chosen else "  ", "bold green"), (name, "bold" if chosen else ""))]
        cells += [Text(text) for text in texts]
        _add_row(table, *cells if wide else cells[:-1])
    console.print(table, highlight=False)


def _print_alternatives(plan: Plan, console: Console) -> None:
    if not plan.alternatives and plan.runner_up is None:
        return
    _print_heading(console, "Alternatives", f"{plan.layouts_evaluated:,} layouts evaluated")
    table = _table("what changes", ">step", ">memory", "why not")
    for alternative in plan.alternatives[:_NUM_ALTERNATIVES]:
        _add_row(
            table,
            findings.layout_change(plan.layout, alternative.layout),
            formatting.duration(alternative.step_seconds),
            Text(formatting.memory(alternative.memory_bytes), style="" if alternative.fits else "red"),
            alternative.reason,
        )
    if plan.alternatives:
        _print_indented(console, table)
    if plan.runner_up is not None:
        text = Text.assemble((plan.runner_up.cluster, "bold"), f": {findings.runner_up_text(plan.runner_up)}")
        _print_lines(console, Text("  other hardware  ", style="dim"), text)


def _print_sensitivities(plan: Plan, console: Console) -> None:
    if not plan.sensitivities:
        return
    _print_heading(console, "Sensitivity", "what moves the step, and by how much")
    largest = sorted(plan.sensitivities, key=lambda entry: -abs(entry.effect))
    items = [
        Text.assemble(f"{item.name} {item.change}".strip() + ": ", (findings.effect_text(item), "bold"))
        for item in largest
    ]
    _print_packed(console, items)


def _wrapped_layout(plan: Plan, width: int) -> Text:
    """Wrap the layout between its entries, never between a name and its size."""
    lines: list[str] = []
    for word in str(plan.layout).split(" · "):
        if lines and len(lines[-1]) + len(word) + 5 <= width:
            lines[-1] += f" · {word}"
        else:
            lines.append(word)
    return Text(" ·\n".join(lines), style="bold")


def _bottleneck(plan: Plan) -> Text:
    limit = plan.bottleneck
    return Text.assemble((findings.bottleneck_text(plan), "bold"), f". {limit.text} Relief: {limit.relief}")


def _bar(share: float, width: int) -> str:
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def _thin_bar(share: float, width: int) -> str:
    halves = round(max(0.0, min(1.0, share)) * width * 2)
    return "━" * (halves // 2) + ("╸" if halves % 2 else "")


def _table(*columns: str) -> Table:
    """A borderless table; a leading ">" aligns a column of numbers to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in columns:
        right = name.startswith(">")
        # Numbers never wrap; text may, at a space.
        table.add_column(name.removeprefix(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table


def _add_row(table: Table, *cells: str | Text) -> None:
    """Convert strings to `Text`, because rich would interpret [brackets] and :names: in a plain string."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def _print_heading(console: Console, title: str, finding: str, style: str = "") -> None:
    console.print()
    _print_lines(console, Text(f"{title}  ", style="bold"), Text(finding, style=style))


def _print_lines(console: Console, label: Text, text: Text) -> None:
    """Print a label and text that wraps under itself, not under the label."""
    grid = Table.grid(padding=0)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(label, text)
    console.print(grid, highlight=False)


def _print_indented(console: Console, renderable: Table | Text) -> None:
    console.print(Padding(renderable, (0, 0, 0, 2)), highlight=False)


def _print_packed(console: Console, items: list[Text]) -> None:
    """Print items side by side, as many per line as fit, none broken in two."""
    lines: list[Text] = []
    for item in items:
        if lines and lines[-1].cell_len + 3 + item.cell_len <= console.width - 2:
            lines[-1].append("   ").append(item)
        else:
            lines.append(item.copy())
    for line in lines:
        _print_indented(console, line)
