"""Strategies of test-time compute at the server: what a request may use, what scores it, how its answer is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.ml.serving.server.strategies.answers import answer_chat, answer_prompt
    from craton.ml.serving.server.strategies.link_client import LinkClient
    from craton.ml.serving.server.strategies.offer import StrategyOffer, open_offer, wanted_strategy
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
