"""A tool environment: the model may use a calculator for some turns before it answers.

    rollout: {environment: custom_environment:Calculator, turns: 4}
    reward: [{verifier: math}]

The model writes `<calculate>12 * 7</calculate>` and reads `<result>84</result>` as its next turn. A completion without
a call ends the episode; the job's `reward` then compares it with the row's answer.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from typing import Any

CALL = re.compile(r"<calculate>(.*?)</calculate>", re.DOTALL)
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


class Calculator:
    """One instance serves one episode, in a process of its own."""

    def reset(self, row: Mapping[str, Any]) -> str:
        """Return the prompt of the episode."""
        return f"{row['prompt']}\nUse <calculate>...</calculate> to compute.\n"

    def step(self, completion: str) -> str | None:
        """Return the result of the last call as the next turn; None ends the episode."""
        calls = CALL.findall(completion)
        if not calls:
            return None
        try:
            result = f"{compute(calls[-1]):g}"
        except (ValueError, SyntaxError, ArithmeticError, RecursionError) as error:
            result = f"error: {error}"
        return f"\n<result>{result}</result>\n"


def compute(expression: str) -> float:
    """Return the value of a formula of numbers, + - * / and brackets."""
    return value_of(ast.parse(expression.strip(), mode="eval").body)


def value_of(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return float(OPERATIONS[type(node.op)](value_of(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return float(OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right)))
    raise ValueError(f"{ast.unparse(node)} is no formula of numbers, + - * / and brackets")
