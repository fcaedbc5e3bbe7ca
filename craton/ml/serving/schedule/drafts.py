"""Guesses at what comes next, from the text itself: after the last few tokens, what followed them before.

A wrong guess costs a little computation and never changes an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST, SHORTEST = 4, 2  # tokens that must be the same
LOOKED_AT = 4096  # of the text, from its end


def guess(tokens: Sequence[int], count: int) -> list[int]:
    """At most so many tokens; none when the end of the text does not occur earlier in it."""
    text = tokens[-LOOKED_AT:]
    for length in range(min(LONGEST, len(text) - 1), SHORTEST - 1, -1):
        end = list(text[-length:])
        last = end[-1]
        for place in range(len(text) - 2, length - 2, -1):
            if text[place] == last and list(text[place - length + 1 : place + 1]) == end:
                return list(text[place + 1 : place + 1 + count])
    return []
