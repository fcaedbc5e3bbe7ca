"""Counts the tokens of an answer between `<think>` and `</think>`, token by token, and notes when a budget is spent.

A token counts unless it completes one of the marks. So the count is exact where a mark is one token, as in the models
that have such marks; where it is several, the tokens before the one that completes it count too.
"""

from __future__ import annotations

from typing import Literal

BEGIN, END = "<think>", "</think>"


class ThinkingCounter:
    """`is_inside`: the prompt has opened the thinking. `budget`: maximum tokens of it, None: no limit."""

    def __init__(self, is_inside: bool, budget: int | None = None) -> None:
        self.num_tokens = 0
        self.budget = budget
        self._place: Literal["begin", "inside", "after"] = "inside" if is_inside else "begin"
        self._tail = ""  # the newest text, which may begin a mark

    @property
    def is_spent(self) -> bool:
        """Whether the budget is used up while the thinking is open."""
        return self._place == "inside" and self.budget is not None and self.num_tokens >= self.budget

    def feed(self, text: str) -> None:
        """Take one token: the text that it completes, which may be empty."""
        if self._place == "after":
            return
        self._tail += text
        if self._place == "begin":
            self._begin()
        elif END in self._tail:
            self.close()
        else:
            self.num_tokens += 1
            self._tail = self._tail[1 - len(END) :]

    def close(self) -> None:
        """End the thinking: what follows is the answer."""
        self._place, self._tail = "after", ""

    def _begin(self) -> None:
        text = self._tail.lstrip()
        if not text.startswith(BEGIN):
            if not BEGIN.startswith(text):
                self.close()
            return
        self._place, self._tail = "inside", text[len(BEGIN) :]
        if END in self._tail:
            self.close()
