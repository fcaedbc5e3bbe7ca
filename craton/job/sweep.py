"""The members of a sweep: the job with each combination of values, checked like a job file.

`sweep_jobs` is a pure function. Each member has the values of its combination, a name made from them, and the rest of
the job. An error names the line of the value in the sweep, and the combination if several keys disagree.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from craton.job.document import Document, Location, Section, allowed_keys, check_name, parse_section, shown_value
from craton.job.dump import job_data
from craton.job.errors import ContentError
from craton.job.jobfile import TRAINING_KINDS, Job
from craton.job.sections import SweepEntry, SweepSection
from craton.nearest import did_you_mean, nearest_names
from craton.telemetry.members import RESERVED_NAMES

MAX_MEMBER_NAME = 40  # characters
# Keys that may differ between the members of a sweep; the others say where and how the whole sweep runs.
SWEPT_KEYS = (
    "model",
    "data",
    "train",
    "layout",
    "checkpoint",
    "recover",
    "objective",
    "reward",
    "preference",
    "policy",
    "rollout",
    "verify",
)
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class SweptJob:
    """One member of a sweep: its job, and the values in which it differs from the others."""

    name: str
    values: dict[str, Any]  # dotted key → value, as the job has it: `1k` is 1024, paths are absolute
    job: Job


def sweep_jobs(job: Job) -> list[SweptJob]:
    """Return the members of a job's sweep, in order; ContentError names what is wrong with a combination."""
    assert job.sweep is not None, f"{job.name} has no sweep"
    return _expand(job, _document_of(job))


def check_sweep(job: Job, document: Document) -> Job:
    """Check every combination of a job's sweep; return the job with the values as its members have them."""
    if job.sweep is None:
        return job
    members = _expand(job, document)
    if job.sweep.entries:
        written = job.sweep.combinations()
        entries = tuple(entry.with_name(member.values) for entry, member in zip(written, members, strict=True))
        resolved = job.sweep.model_copy(update={"entries": entries})
    else:
        by_place = {key: [None] * len(values) for key, values in job.sweep.grid.items()}
        for entry, member in zip(job.sweep.combinations(), members, strict=True):
            for key, (_, place) in entry.places.items():
                by_place[key][int(place)] = member.values[key]
        resolved = job.sweep.model_copy(update={"grid": {key: tuple(values) for key, values in by_place.items()}})
    return job.model_copy(update={"sweep": resolved})


def with_missing_values(document: Document, root: type[Section]) -> Document:
    """Return the document with the first value of each key that only its sweep gives, so that it is a whole job."""
    if document.data.get("kind") not in TRAINING_KINDS:
        return document
    try:
        sweep = SweepSection.model_validate(document.data.get("sweep"))
    except ValueError:
        return document  # there is none, or the job reports what is wrong with it
    _check_keys(sweep, document, root)
    first = next(iter(sweep.combinations()))
    everywhere = set(first.values).intersection(*sweep.entries) if sweep.entries else set(first.values)
    missing = {key for key in everywhere if not _has(document.data, key.split("."))}
    entry = SweepEntry(None, {key: value for key, value in first.values.items() if key in missing}, first.places)
    return _with_values(document, entry) if missing else document


def _expand(job: Job, document: Document) -> list[SweptJob]:
    assert job.sweep is not None
    base = {key: value for key, value in job_data(job).items() if key not in ("sweep", "chaos")}
    entries = list(job.sweep.combinations())
    if job.weights_job is not None and (shaped := [key for key in job.sweep.keys if key.partition(".")[0] == "model"]):
        raise _problem(
            document,
            _first_place(entries, shaped[0]),
            f"sweep: {shaped[0]}: the model is that of {job.weights_job.name}; sweep it there, or remove `job:`",
        )
    for entry in entries:
        if isinstance(model := entry.values.get("model"), dict) and "job" in model:
            raise _problem(
                document,
                entry.places["model"],
                "sweep: model: a sweep cannot choose between jobs; give folders instead",
            )
    jobs = [_member(job, replace(document, data=base), entry) for entry in entries]
    values = [
        {key: _resolved(member, key, value) for key, value in entry.values.items()}
        for entry, member in zip(entries, jobs, strict=True)
    ]
    _check_differ(document, job.sweep, entries, values)
    names = _names(document, entries, values)
    return [
        SweptJob(name, chosen, member.model_copy(update={"name": name}))
        for name, chosen, member in zip(names, values, jobs, strict=True)
    ]


def _member(job: Job, document: Document, entry: SweepEntry) -> Job:
    """Return the job with the values of a combination."""
    changed = _with_values(document, entry)
    if job.weights_job is not None:
        changed = replace(changed, data={**changed.data, "model": _plain(job.model)})
    try:
        member = parse_section(Job, changed)
    except ContentError as error:
        problem = error.problems[0]
        which = ", ".join(f"{key} {shown_value(value)}" for key, value in entry.values.items())
        is_about_one = any(f": {key}: " in problem for key in entry.values)
        raise ContentError([problem if is_about_one else f"{problem} (sweep: {which})"]) from None
    member = member.with_document(changed) if document.name else member
    return member if job.weights_job is None else member.with_weights_of(job.weights_job, job.trained_run)


def _document_of(job: Job) -> Document:
    return job.document or Document("", Path(), {}, {})


def _with_values(document: Document, entry: SweepEntry) -> Document:
    """Return the document with these values; their lines are those in the sweep."""
    data, lines = copy.deepcopy(document.data), dict(document.lines)
    for key, value in entry.values.items():
        *sections, last = key.split(".")
        target: Any = data
        for number, section in enumerate(sections):
            inner = target.get(section)
            if inner is None or (inner == "auto" and section == "layout"):
                inner = target[section] = {}
            if not isinstance(inner, dict):
                raise _problem(
                    document,
                    entry.places[key],
                    f"sweep: {key}: {'.'.join(sections[: number + 1])} is {shown_value(inner)}, not a mapping with "
                    "such a key; sweep the whole key, or write a mapping",
                )
            target = inner
        target[last] = value
        location: Location = tuple(key.split("."))
        line = document.line(("sweep", *entry.places[key]))
        lines = {place: number for place, number in lines.items() if place[: len(location)] != location}
        lines |= {location[:depth]: line for depth in range(1, len(location)) if location[:depth] not in lines}
        lines[location] = line
    return replace(document, data=data, lines=lines)


def _check_keys(sweep: SweepSection, document: Document, root: type[Section]) -> None:
    """Refuse keys that do not exist, that the members must share, or that contain each other."""
    entries, keys = list(sweep.combinations()), sweep.keys
    for key in keys:
        parts = key.split(".")
        allowed = SWEPT_KEYS if len(parts) == 1 else allowed_keys(root, tuple(parts[:-1]))
        if parts[0] in SWEPT_KEYS and parts[-1] in allowed:
            continue
        raise _problem(document, _first_place(entries, key), f"sweep: {_unknown(parts, allowed, root)}")
    for key in keys:
        inner = next((other for other in keys if other.startswith(f"{key}.")), None)
        if inner is not None:
            raise _problem(
                document, _first_place(entries, inner), f"sweep: {inner} is a part of {key}; keep one of them"
            )


def _unknown(parts: Sequence[str], allowed: Sequence[str], root: type[Section]) -> str:
    """Return what is wrong with a key that a sweep does not allow."""
    key = ".".join(parts)
    if parts[0] in root.model_fields and parts[0] not in SWEPT_KEYS:
        why = {
            "sweep": "a sweep cannot contain a sweep",
            "name": "members are named by their values, or by `name:` in the entries of `list:`",
        }.get(parts[0], "all members share it")
        return (
            f"key {shown_value(key)} cannot be swept: {why}; allowed: {', '.join(SWEPT_KEYS)} and the keys under them"
        )
    if parts[0] in SWEPT_KEYS and allowed:
        near = [f"{'.'.join(parts[:-1])}.{name}" for name in nearest_names(parts[-1], allowed)]
        advice = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        return (
            f"key {shown_value(key)} is not known; allowed under {'.'.join(parts[:-1])}: {', '.join(allowed)}{advice}"
        )
    dotted = {name: f"{section}.{name}" for section in SWEPT_KEYS for name in allowed_keys(root, (section,))}
    near = [dotted[name] for name in nearest_names(parts[-1], dotted)]
    advice = f"; did you mean {near[0]!r}?" if near else did_you_mean(key, SWEPT_KEYS)
    return f"key {shown_value(key)} is not known; allowed: {', '.join(SWEPT_KEYS)} and the keys under them{advice}"


def _check_differ(
    document: Document, sweep: SweepSection, entries: Sequence[SweepEntry], values: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse a value that a list of a grid has twice, and an entry of `list:` that is there twice."""
    seen: dict[str, Location] = {}
    for entry, chosen in zip(entries, values, strict=True):
        for key, place in ((None, ("list", 0)),) if sweep.entries else entry.places.items():
            text = json.dumps(chosen if key is None else [key, chosen[key]], sort_keys=True, default=str)
            here = place if key is not None else next(iter(entry.places.values()))[:2]
            if seen.setdefault(text, here) != here:
                what = f"{key}: {shown_value(chosen[key])}" if key is not None else f"list: {shown_value(chosen)}"
                lines = sorted({document.line(("sweep", *at)) for at in (seen[text], here)})
                more = f" (lines {' and '.join(map(str, lines))})" if len(lines) > 1 else ""
                raise _problem(document, here, f"sweep: {what} is given twice; remove one{more}")


def _names(document: Document, entries: Sequence[SweepEntry], values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a unique name for each member: as written, else `learning_rate-0.001-hidden-64`. A name that is too long,
    or that several members would have, is cut and numbered."""
    _check_written_names(document, entries)
    lasts = Counter(key.rpartition(".")[2] for key in {key for chosen in values for key in chosen})
    whole = [
        entry.name or "-".join(f"{_key_text(key, lasts)}-{_value_text(value)}" for key, value in chosen.items())
        for entry, chosen in zip(entries, values, strict=True)
    ]
    names = [_safe(text) for text in whole]
    counts = Counter(name.casefold() for name in names)
    for number, (name, entry) in enumerate(zip(names, entries, strict=True), start=1):
        if entry.name is None and (len(name) > MAX_MEMBER_NAME or counts[name.casefold()] > 1):
            suffix = f"-{number}"
            names[number - 1] = name[: MAX_MEMBER_NAME - len(suffix)].rstrip("-._") + suffix
    if len({name.casefold() for name in names}) < len(names):
        width = len(str(len(names)))
        return [entry.name or f"member-{number:0{width}}" for number, entry in enumerate(entries, start=1)]
    return names


def _check_written_names(document: Document, entries: Sequence[SweepEntry]) -> None:
    written: dict[str, int] = {}
    for number, entry in enumerate(entries):
        if entry.name is None:
            continue
        place = ("list", number, "name")
        if not isinstance(entry.name, str):
            raise _problem(document, place, f"sweep.list[{number}].name: {entry.name!r} is not a text; quote it")
        try:
            name = check_name(entry.name)
        except ValueError as error:
            raise _problem(document, place, f"sweep.list[{number}].name: {error}") from None
        if name in RESERVED_NAMES:
            raise _problem(
                document, place, f"sweep.list[{number}].name: a file of the run is called {name!r}; rename it"
            )
        if len(name) > MAX_MEMBER_NAME:
            raise _problem(
                document, place, f"sweep.list[{number}].name: {name!r} is longer than {MAX_MEMBER_NAME} characters"
            )
        if written.setdefault(name.casefold(), number) != number:
            raise _problem(
                document,
                place,
                f"sweep.list: entries {written[name.casefold()]} and {number} have the same name {name!r}; rename one",
            )


def _key_text(key: str, lasts: Mapping[str, int]) -> str:
    last = key.rpartition(".")[2]
    return key if lasts[last] > 1 else last


def _value_text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        return repr(value).replace("+", "")
    if isinstance(value, Mapping):
        named = value.get("name")
        return str(named) if named else "-".join(f"{key}-{_value_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return "-".join(map(_value_text, value))
    text = str(value)
    return text.rstrip("/").rpartition("/")[2]


def _safe(text: str) -> str:
    """Return a text as a name of a run."""
    return _NOT_IN_A_NAME.sub("-", text).strip("-._") or "member"


def _resolved(job: Job, key: str, written: Any) -> Any:
    """Return the value of a key as the job has it; as written if the job has none, as for `layout: auto`."""
    value: Any = job
    for part in key.split("."):
        value = getattr(value, part, None)
    return written if value is None else _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _has(data: Any, parts: Sequence[str]) -> bool:
    for part in parts:
        if not isinstance(data, dict) or data.get(part) is None:
            return False
        data = data[part]
    return True


def _first_place(entries: Sequence[SweepEntry], key: str) -> Location:
    return next(entry.places[key] for entry in entries if key in entry.places)


def _problem(document: Document, place: Location, text: str) -> ContentError:
    return ContentError([f"{document.name}:{document.line(('sweep', *place))}: {text}"])
