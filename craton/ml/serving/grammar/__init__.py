"""Structured output: grammars, their limits, and the process that checks them first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.serving.grammar.grammars import Grammars, GrammarState
    from craton.ml.serving.grammar.limits import GrammarError, check_size
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
