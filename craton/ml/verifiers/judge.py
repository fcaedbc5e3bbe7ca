"""The verifier judge: a model behind an OpenAI endpoint rates a completion.

The key is read from the environment when a request is sent. It is in no file, and removed from error messages.
"""

from __future__ import annotations

import json
import math
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from craton.ml.verifiers.answers import reference_text
from craton.ml.verifiers.errors import VerifierError

INSTRUCTION = """Rate the answer to a task with a number between 0 (wrong or useless) and 1 (right and complete).

Task:
{prompt}

Reference answer (may be empty):
{answer}

Answer to rate:
{completion}

Reply with the number alone."""
MAX_TOKENS = 1024  # models that reason first need more than the number
REPLY_BYTES = 1 << 20
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_PLACEHOLDER = re.compile(r"\{(prompt|completion|answer)\}")


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    """The key is for one host; a redirect would take it to another."""

    def redirect_request(self, *_: Any) -> None:
        return None


class JudgeError(VerifierError):
    """The judge could not be asked, or its reply has no number."""


def judge(prompt: object, completion: str, answer: object, options: Mapping[str, Any], seconds: float) -> float:
    """Return the last number of the judge's reply; our own instruction asks for one between 0 and 1."""
    texts = {
        "prompt": prompt_text(prompt),
        "completion": completion,
        "answer": "" if answer is None else reference_text(answer),
    }
    # One pass: a completion that contains "{answer}" does not get the answer filled in.
    instruction = _PLACEHOLDER.sub(lambda match: texts[match[1]], options["instruction"] or INSTRUCTION)
    endpoint = options["endpoint"]
    model = endpoint["model"] or _first_model(endpoint, seconds)
    request = {
        "model": model,
        "messages": [{"role": "user", "content": instruction}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    reply = _call(endpoint, "chat/completions", request, seconds)
    try:
        text = reply["choices"][0]["message"]["content"] or ""
        numbers = [float(number) for number in _NUMBER.findall(text)]
    except (KeyError, IndexError, TypeError):
        shown = without_key(json.dumps(reply), endpoint)[:200]
        raise JudgeError(f"the judge at {endpoint['url']} sent no message: {shown}") from None
    shown = repr(without_key(text, endpoint)[-200:])
    if not numbers or not math.isfinite(numbers[-1]):
        raise JudgeError(f"the judge's reply has no number: {shown}")
    if not options["instruction"] and not 0 <= numbers[-1] <= 1:
        raise JudgeError(f"the judge's reply does not end with a number from 0 to 1: {shown}")
    return numbers[-1]


def prompt_text(prompt: object) -> str:
    """Return a prompt as text: messages one below the other with their roles."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence):
        return reference_text(prompt)
    return "\n\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt)


def _first_model(endpoint: Mapping[str, Any], seconds: float) -> str:
    reply = _call(endpoint, "models", None, seconds)
    try:
        return str(reply["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise JudgeError(f"the judge at {endpoint['url']} lists no model; name one in endpoint.model") from None


def _call(endpoint: Mapping[str, Any], path: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
    base = endpoint["url"].rstrip("/")
    address = f"{base}/{path}" if base.endswith("/v1") else f"{base}/v1/{path}"
    headers = {"Content-Type": "application/json", "User-Agent": "craton"}
    key = os.environ.get(endpoint["key"], "") if endpoint["key"] else ""
    if endpoint["key"] and not key:
        raise JudgeError(f"the variable {endpoint['key']} with the judge's key is not set; name it in run.secrets")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(address, None if body is None else json.dumps(body).encode(), headers)
    try:
        opener = urllib.request.build_opener(_RefuseRedirects)
        with opener.open(request, timeout=seconds) as response:
            return json.loads(response.read(REPLY_BYTES))
    except (json.JSONDecodeError, UnicodeDecodeError):
        reason = "its reply is not JSON; the URL must be that of an OpenAI-compatible server"
    except urllib.error.HTTPError as error:
        reason = f"{error.code} {error.read(300).decode(errors='replace')}"
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "reason", error))
    raise JudgeError(f"the judge at {address} failed: {without_key(reason, endpoint)}")


def without_key(text: str, endpoint: Mapping[str, Any]) -> str:
    """Return a text in which the key is hidden: what a judge sends may repeat it."""
    key = os.environ.get(endpoint["key"], "") if endpoint["key"] else ""
    return text.replace(key, "***") if key else text
