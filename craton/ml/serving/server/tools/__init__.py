"""Tool calls and reasoning in an answer's text: found as it streams, the same however it is cut into chunks."""

from craton.ml.serving.server.tools.choice import (
    Schemas,
    ToolChoice,
    choice_grammar,
    guess_style,
    keeps_special_tokens,
    make_parser,
)
from craton.ml.serving.server.tools.parsed import CallPart, Parsed, Parser, Plain
from craton.ml.serving.server.tools.reasoning import ReasoningParser, begins_inside

__all__ = [
    "CallPart",
    "Parsed",
    "Parser",
    "Plain",
    "ReasoningParser",
    "Schemas",
    "ToolChoice",
    "begins_inside",
    "choice_grammar",
    "guess_style",
    "keeps_special_tokens",
    "make_parser",
]
