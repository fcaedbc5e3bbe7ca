"""The verifier code: what a program is tested with, and what its reply is worth.

The row's field holds tests: Python statements such as `assert add(1, 2) == 3` (a text, or a list of texts), or a list
of {input, output}: the program then reads its standard input and prints.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from craton.ml.verifiers.answers import UnreadableReferenceError, shortened

_FENCED = re.compile(r"```[ \t]*(?:python|python3|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_HOW = 'give Python statements, e.g. "assert f(1) == 2", a list of them, or a list of {input: text, output: text}'


def program_of(completion: str) -> str:
    """Return the last fenced block of Python, or the whole completion where it has none."""
    blocks = _FENCED.findall(completion)
    return blocks[-1] if blocks else completion


@dataclass(frozen=True)
class ProgramTest:
    """A program with its tests, or with inputs and the outputs that are expected."""

    program: str
    tests: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()  # stay outside the sandbox
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def request(self) -> bytes:
        """What the sandbox gets first: the program, and the inputs it is to read."""
        return json.dumps({"program": self.program, "inputs": self.inputs if not self.tests else None}).encode()

    @property
    def follow_up(self) -> bytes:
        """What the sandbox gets once the program has been executed: the tests, and what a reply must contain."""
        return json.dumps({"tests": self.tests, "nonce": self.nonce}).encode()

    def value(self, reply: Mapping[str, Any]) -> float:
        """1 if the program passed all tests; 0 if it failed one, or ended before the last."""
        if self.tests:
            return float(reply.get("passed") == self.nonce)
        outputs = reply.get("outputs")
        if not isinstance(outputs, list) or len(outputs) != len(self.outputs):
            return 0.0
        return float(all(_same_lines(*both) for both in zip(outputs, self.outputs, strict=True)))


def program_test(completion: str, reference: Any) -> ProgramTest:
    """Return the test of a completion; UnreadableReferenceError if the reference has no tests."""
    program, tests = program_of(completion), _tests(reference)
    if isinstance(tests[0], str):
        return ProgramTest(program, tests=tuple(tests))
    inputs, outputs = (tuple(pair[key] for pair in tests) for key in ("input", "output"))
    return ProgramTest(program, inputs=inputs, outputs=outputs)


def _tests(reference: Any) -> list[Any]:
    if isinstance(reference, str) and reference.lstrip().startswith(("[", "{")):
        with contextlib.suppress(ValueError, RecursionError):  # Python statements may start with a bracket too
            reference = json.loads(reference)
    tests = reference if isinstance(reference, list) else [reference]
    if tests and all(isinstance(test, str) and test.strip() for test in tests):
        for test in tests:
            _check_statements(test)
        return tests
    if tests and all(isinstance(test, dict) and _is_text(test, "input") and _is_text(test, "output") for test in tests):
        return tests
    raise UnreadableReferenceError(f"{shortened(reference)} is no test of a program; {_HOW}")


def _check_statements(test: str) -> None:
    """Raise UnreadableReferenceError if a test is not Python: that is no fault of the program."""
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(test, "tests", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        what = f"{type(error).__name__}: {error}"
        raise UnreadableReferenceError(f"the test {shortened(test)} is not Python ({what}); {_HOW}") from None


def _is_text(test: dict[str, Any], key: str) -> bool:
    return isinstance(test.get(key), str)


def _same_lines(output: object, expected: str) -> bool:
    """Compare apart from white space at the end of lines and of the text."""
    if not isinstance(output, str):
        return False
    ours, theirs = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (output, expected))
    return ours == theirs
