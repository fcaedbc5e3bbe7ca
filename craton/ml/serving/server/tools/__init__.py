"""Parses tool calls and reasoning out of an answer while it streams, independent of how it is split into chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.serving.server.tools.choice import (
        Schemas,
        ToolChoice,
        choice_grammar,
        guess_style,
        keeps_special_tokens,
        make_parser,
    )
    from craton.ml.serving.server.tools.parsed import CallPart, Parsed, Parser
    from craton.ml.serving.server.tools.reasoning import ReasoningParser, begins_inside, ends_inside
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
