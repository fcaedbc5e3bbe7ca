"""What a completion answers, by an `AnswerRule`: the text that majority@k counts."""

from __future__ import annotations

import json
import re
from contextlib import suppress

from craton.job.sections.strategy import AnswerRule

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_BOXED = "\\boxed{"
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


def answer_of(text: str, rule: AnswerRule) -> str | None:
    """Return the answer in a form in which equal answers are equal texts; None if there is none."""
    if rule.kind == "last_number":
        found = _NUMBER.findall(text)
        return _plain_number(found[-1]) if found else None
    if rule.kind == "boxed":
        return _boxed(text)
    if rule.kind == "regex":
        matches = list(re.finditer(rule.argument, text, re.DOTALL))
        return (matches[-1][1] if matches[-1].re.groups else matches[-1][0]) if matches else None
    if rule.kind == "json":
        return _json_field(text, rule.argument)
    return text.strip() or None


def _plain_number(text: str) -> str:
    """`1,024.50` as `1024.5`."""
    plain = text.replace(",", "")
    plain = plain.rstrip("0").rstrip(".") if "." in plain else plain
    sign, digits = ("-", plain[1:]) if plain.startswith("-") else ("", plain)
    whole, dot, rest = digits.partition(".")
    whole = whole.lstrip("0") or "0"
    return whole if whole == "0" and not rest else f"{sign}{whole}{dot}{rest}"


def _boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{…}, with nested braces."""
    begin = text.rfind(_BOXED)
    if begin < 0:
        return None
    depth, start = 1, begin + len(_BOXED)
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place].strip()
    return None


def _json_field(text: str, field: str) -> str | None:
    for candidate in (text, *reversed(_FENCED.findall(text))):
        with suppress(ValueError, RecursionError):
            document = json.loads(candidate)
            if isinstance(document, dict) and field in document:
                return json.dumps(document[field], sort_keys=True)
    return None
