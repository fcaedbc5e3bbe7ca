"""Render HTML templates: everything is escaped, and numbers are formatted as in the terminal."""

from __future__ import annotations

import math
import time
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from craton import formatting
from craton.observability.web.sources import cause_first

FOLDER = Path(__file__).parent
STATE_TONES = {
    "running": "good",
    "done": "good",
    "healthy": "good",
    "ready": "good",
    "restarting": "warn",
    "starting": "calm",
    "waiting": "calm",
    "reading": "calm",
    "spare": "calm",
    "stopping": "calm",
    "stopped": "calm",
    "slow": "warn",
    "pending": "warn",
    "alert": "warn",
    "unknown": "calm",
    "firing": "bad",
}


OF_MEMBER = ":"  # between the names of an owner and a member, in an address


def render(template: str, **context: Any) -> str:
    return _environment().get_template(template).render(**context)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "address": address,
        "amount": formatting.amount,
        "cause_first": cause_first,
        "ago": ago,
        "change_tone": change_tone,
        "clock": formatting.clock,
        "digits": formatting.digits,
        "dollars": formatting.dollars,
        "duration": formatting.duration,
        "health_tone": health_tone,
        "loss": formatting.loss,
        "moment": formatting.moment,
        "percent": formatting.percent,
        "score": formatting.score,
        "whole_duration": formatting.whole_duration,
        "stored": formatting.stored,
        "sortable": sortable,
        "tone": tone,
    }
    environment.globals |= {"change": formatting.change, "duration_range": formatting.duration_range}
    return environment


def address(name: str) -> str:
    """Return the name of a run for an address of the page."""
    return quote(name.replace("/", OF_MEMBER), safe=OF_MEMBER)


def tone(state: str) -> str:
    """Return the tone of a state: good, calm, warn or bad."""
    return STATE_TONES.get(state, "bad")


def health_tone(health: str) -> str:
    """Return the tone of a node's health. `stopped` is bad here: a signal stopped one of its ranks."""
    return "warn" if health in ("slow", "alert") else "bad"


def sortable(value: float | None) -> str:
    """Format for JavaScript's Number: unknown values sort last, NaN sorts beyond all others."""
    if value is None:
        return "-Infinity"
    return repr(float(value)) if math.isfinite(value) else "Infinity"


def change_tone(change: str, more_is_better: bool = True) -> str:
    """Return the tone of a change against the plan: calm up to 10% worse, a warning up to 25%, bad beyond."""
    if change == formatting.UNKNOWN:
        return "none"
    if change.startswith("×"):
        return "good" if more_is_better else "bad"
    percent = float(change.strip("+−±%")) * (-1 if change.startswith("−") else 1)
    worse = -percent if more_is_better else percent
    return "good" if worse <= 10 else "warn" if worse <= 25 else "bad"


def ago(then: float | None) -> str:
    """Return a coarse age that does not change at every refresh: 20 s ago, 5m ago."""
    if then is None:
        return formatting.UNKNOWN
    seconds = max(0.0, time.time() - then)
    if seconds < 10:
        return "just now"
    if seconds < 60:
        return f"{10 * int(seconds / 10)} s ago"
    return f"{formatting.duration(60 * int(seconds / 60))} ago"
