"""What a vote counts of a completion, in a form in which equal answers are equal texts.

`1,024`, `1024.0` and `1024` are one number. A completion without such an answer has None, which is no vote. Patterns
may come from a request, so a search for one ends after MATCH_SECONDS.
"""

from __future__ import annotations

import asyncio
import json
import re
from decimal import Decimal, InvalidOperation
from typing import Any

import regex

from craton.job.sections.strategy import AnswerRule

MATCH_SECONDS = 0.2
MAX_DIGITS = 200  # longer numbers are compared as texts
_NUMBER = re.compile(r"(?<![\w.])[-+−]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?![\d])")
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


def counted_answer(text: str, rule: AnswerRule) -> str | None:
    """Return what is counted of a completion; None if it has no such answer."""
    found: str | None
    match rule.kind:
        case "last_number":
            numbers = _NUMBER.findall(text)
            return _number_form(numbers[-1]) if numbers else None
        case "boxed":
            found = last_boxed(text)
        case "regex":
            found = _last_match(rule.argument, text)
        case "json":
            return _json_field(text, rule.argument)
        case "text":
            found = text
    return None if found is None else text_form(found)


async def find_answer(text: str, rule: AnswerRule) -> str | None:
    """Return `counted_answer`; search for a pattern on a thread, so that other requests go on meanwhile."""
    if rule.kind == "regex":
        return await asyncio.to_thread(counted_answer, text, rule)
    return counted_answer(text, rule)


def text_form(text: str) -> str | None:
    """Return a text without differences in white space, in which a number has its shortest form; None if it is
    empty."""
    plain = " ".join(text.split())
    if plain.startswith("$") and plain.endswith("$") and len(plain) > 2:
        plain = plain.strip("$").strip()
    if _NUMBER.fullmatch(plain):
        return _number_form(plain)
    return plain or None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}` whose braces are balanced."""
    at = len(text)
    while (at := text.rfind("\\boxed", 0, at)) >= 0:
        start = at + len("\\boxed")
        start += len(text[start:]) - len(text[start:].lstrip())
        if (end := _closing_brace(text, start)) is not None:
            return text[start + 1 : end]
    return None


def _closing_brace(text: str, start: int) -> int | None:
    if text[start : start + 1] != "{":
        return None
    depth, is_escaped = 0, False
    for at in range(start, len(text)):
        letter = text[at]
        if not is_escaped:
            depth += (letter == "{") - (letter == "}")
            if depth == 0:
                return at
        is_escaped = letter == "\\" and not is_escaped
    return None


def _last_match(pattern: str, text: str) -> str | None:
    """Return the first group, or else the whole, of the last match; None also where a search takes too long."""
    found: str | None = None
    try:
        for match in regex.compile(pattern).finditer(text, timeout=MATCH_SECONDS, concurrent=True):
            found = match.group(1 if match.re.groups else 0)
    except (TimeoutError, regex.error):
        return None
    return found


def _json_field(text: str, field: str) -> str | None:
    blocks = _FENCED.findall(text)
    begin, end = text.find("{"), text.rfind("}")
    for candidate in (text, *reversed(blocks), text[begin : end + 1] if begin >= 0 else ""):
        try:
            value = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        for name in field.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return _value_form(value)
    return None


def _value_form(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return text_form(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number_form(repr(value))
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _number_form(number: str) -> str:
    plain = number.replace(",", "").replace("−", "-")
    if len(plain) > MAX_DIGITS:
        return plain
    try:
        value = Decimal(plain)
    except InvalidOperation:
        return plain
    if not value.is_finite() or abs(value.adjusted()) > MAX_DIGITS:
        return plain
    text = f"{value.normalize():f}"
    return "0" if text in ("-0", "0") else text
