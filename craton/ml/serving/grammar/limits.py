"""Limits on the cost of a client's grammar, in bytes or time, independent of the number of requests.

A grammar is an untrusted program: its size says little about its compile time.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from craton.errors import CratonError
from craton.ml.serving.messages import Grammar

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_GRAMMAR_BYTES = 256 << 10  # of its text; OpenAI allows a schema 120,000 characters
MAX_SECONDS = 3  # of CPU time, to compile it and follow it for TRIED_TOKENS
MAX_WAIT_SECONDS = 60.0  # for these, on a busy machine
QUICK_SECONDS = 0.5  # after which a grammar moves to the slow lane,
QUICK_CPU_SECONDS = 0.1  # once it has had this much CPU time, many times what a usual grammar needs
MAX_BYTES = 256 << 20  # of memory while compiling
MAX_MASK_SECONDS = 0.1  # of CPU time for one token bitmask; all requests of the step wait for it
TRIED_TOKENS = 24
CACHE_BYTES = 128 << 20  # of cached compiled grammars
# JSON whitespace: room for a line break and ten levels of indentation. Without a limit a degenerate model generates
# whitespace until it runs out of tokens.
_BLANKS = r"[\x20\x0A\x0D\x09]{1,41}"


class GrammarError(CratonError):
    """A grammar cannot be compiled or exceeds a limit, or does not allow a token."""


def parser_limits() -> LLParserLimits:
    """Return limits for llguidance. Its defaults allow steps of seconds and lexers of hundreds of MB."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        verbose_errors=False,
        max_grammar_size=200_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=25_000,
        max_items_in_row=2_000,
        max_lexer_states=50_000,
    )


def check_size(grammar: Grammar) -> None:
    """Raise for a grammar whose text is too long."""
    size = len(grammar.text.encode(errors="surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the {grammar.kind} has {size:,} bytes; the maximum is {MAX_GRAMMAR_BYTES:,}")


def source_of(grammar: Grammar) -> str:
    """Return the grammar in llguidance's format."""
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    schema = {"type": "object"}
    if grammar.kind == "json_schema":
        try:
            schema = json.loads(grammar.text)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the json_schema is not JSON: {error}") from None
        if not isinstance(schema, dict):
            raise GrammarError(f"the json_schema is {grammar.text.strip()[:40]!r}; it must be a JSON object")
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": _BLANKS})
