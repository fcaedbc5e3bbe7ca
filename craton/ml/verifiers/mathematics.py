"""The verifier math: math-verify decides whether two expressions are equal.

SymPy's parser evaluates text that the model wrote, and may take forever: call it in a sandboxed worker only. The
library's own time limits are off. At its limit it would count a sample as wrong; the pool gives it no verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from craton.ml.verifiers.answers import UnreadableReferenceError, reference_text, shortened

_DELIMITERS = ("$", "\\boxed", "\\(", "\\[", "\\begin{")


def math(completion: str, reference: Any, options: Mapping[str, Any]) -> float:
    """1 if the last expression of the completion equals the answer."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    text = reference_text(reference)
    configurations = (LatexExtractionConfig(), ExprExtractionConfig())
    gold: list[Any] = []
    for candidate in (text,) if any(mark in text for mark in _DELIMITERS) else (f"${text}$", text):
        gold = gold or parse(candidate, configurations, parsing_timeout=None, raise_on_error=False)
    if not any(not isinstance(expression, str) for expression in gold):
        raise UnreadableReferenceError(f"{shortened(reference)} is no expression that math-verify can parse")
    found = parse(completion, configurations, parsing_timeout=None, raise_on_error=True)
    return float(verify(gold, found, timeout_seconds=None, raise_on_error=True))
