"""The verifier code: what a program is tested with, and what its reply is worth.

The row's field holds tests: Python statements such as `assert add(1, 2) == 3` (a text, or a list of texts), or a list
of {input, output}: the program then reads its standard input and prints.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from craton.ml.verifiers.answers import UnreadableReferenceError, shortened

_FENCED = re.compile(r"```[ \t]*(?:python|python3|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_HOW = 'give Python statements, e.g. "assert f(1) == 2", a list of them, or a list of {input: text, output: text}'


def program_of(completion: str) -> str:
    """Return the last fenced block of Python, or the whole completion where it has none."""
    blocks = _FENCED.findall(completion)
    return blocks[-1] if blocks else completion


def program_request(completion: str, reference: Any) -> dict[str, Any]:
    """Return what the sandbox gets: the program with its tests or inputs, and a number that only they see."""
    request: dict[str, Any] = {"program": program_of(completion), "nonce": secrets.token_hex(16)}
    tests = _tests(reference)
    if isinstance(tests[0], str):
        return {**request, "tests": tests}
    return {**request, "inputs": [pair["input"] for pair in tests]}


def program_value(reply: Mapping[str, Any], request: Mapping[str, Any], reference: Any) -> float:
    """1 if the program passed all tests; 0 if it failed one, or ended before the last."""
    if reply.get("nonce") != request["nonce"]:
        return 0.0
    if "tests" in request:
        return float(reply.get("passed") == [True] * len(request["tests"]))
    outputs = reply.get("outputs")
    expected = [pair["output"] for pair in _tests(reference)]
    if not isinstance(outputs, list) or len(outputs) != len(expected):
        return 0.0
    return float(all(_same_lines(*both) for both in zip(outputs, expected, strict=True)))


def _tests(reference: Any) -> list[Any]:
    if isinstance(reference, str) and reference.lstrip().startswith(("[", "{")):
        with contextlib.suppress(ValueError):  # Python statements may start with a bracket too
            reference = json.loads(reference)
    tests = reference if isinstance(reference, list) else [reference]
    if tests and all(isinstance(test, str) and test.strip() for test in tests):
        return tests
    if tests and all(isinstance(test, dict) and _is_text(test, "input") and _is_text(test, "output") for test in tests):
        return tests
    raise UnreadableReferenceError(f"{shortened(reference)} is no test of a program; {_HOW}")


def _is_text(test: dict[str, Any], key: str) -> bool:
    return isinstance(test.get(key), str)


def _same_lines(output: object, expected: str) -> bool:
    """Compare apart from white space at the end of lines and of the text."""
    if not isinstance(output, str):
        return False
    ours, theirs = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (output, expected))
    return ours == theirs
