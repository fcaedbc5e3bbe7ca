"""Replies of OpenAI-compatible servers that are no answers: models, error messages, and why there is no reply."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re

import aiohttp

SHOWN_CHARACTERS = 200
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)


def unreachable_reason(error: Exception) -> str:
    """Return why a request failed without a response, with the remedy."""
    if isinstance(error, aiohttp.InvalidURL):
        return "not a valid URL"
    if isinstance(error, aiohttp.ClientConnectorError):
        code = error.os_error.errno
        # asyncio's text for a refused connection is unclear; for an unknown host name the number is not an errno.
        reason = os.strerror(code) if code and code > 0 else error.os_error.strerror or error
        return f"cannot connect ({reason}); check that the server is running and the port is right"
    if isinstance(error, asyncio.TimeoutError):
        return "the server does not answer in time"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
        return "the server closed the connection before it replied"
    return f"the server does not speak HTTP correctly ({str(error) or type(error).__name__})"


def model_cards(reply: object) -> list[dict[str, object]]:
    """Return the models in a reply of /v1/models; none if it has another form."""
    cards = reply.get("data") if isinstance(reply, dict) else None
    return [card for card in cards if isinstance(card, dict) and "id" in card] if isinstance(cards, list) else []


def error_message(text: str) -> str:
    """Return the error message of a server's response: from its JSON, or the title of a proxy's HTML page."""
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        document = json.loads(text)
        document = document.get("error", document.get("detail", document))
        text = document["message"] if isinstance(document, dict) and "message" in document else document
    text = str(text)
    if text.lstrip().startswith("<"):
        title = _TITLE.search(text)
        text = f"an HTML page, {title[1].strip()!r}" if title else "an HTML page"
    return " ".join(text.split())[:SHOWN_CHARACTERS] or "no reason given"
