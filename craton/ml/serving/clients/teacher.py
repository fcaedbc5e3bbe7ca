"""A teacher behind an OpenAI endpoint: its log-probabilities of tokens that the policy sampled.

Token ids are sent, never texts, so the teacher must have the policy's tokenizer. The endpoint must return
`prompt_logprobs`, as Craton's servers and vLLM do. Its key is read from the environment when a request is sent; it is
in no file, and removed from error messages.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craton.errors import CratonError
from craton.job.sections.posttraining import ApiEndpoint

REQUESTS = 16  # at the same time, of one rank
REPLY_SECONDS = 120.0
ATTEMPTS, RETRY_SECONDS = 5, 2.0


class TeacherError(CratonError):
    """The teacher cannot be asked, or does not say how likely given tokens are."""


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    """The key is for one host; a redirect would take it to another."""

    def redirect_request(self, *_: Any) -> None:
        return None


class TeacherEndpoint:
    """Asks an endpoint for log-probabilities, several sequences at a time."""

    def __init__(self, endpoint: ApiEndpoint) -> None:
        self._endpoint = endpoint
        self._model = endpoint.model or self._first_model()

    def check(self) -> None:
        """Raise TeacherError if the endpoint does not return log-probabilities of given tokens."""
        self._ask([1, 2])

    def read(self, sequences: Sequence[Sequence[int]], check: Callable[[], None]) -> list[NDArray[np.float32]]:
        """Return log p of every token but the first, for each sequence. `check` is called while they are awaited."""
        with ThreadPoolExecutor(REQUESTS) as threads:
            futures = [threads.submit(self._ask, list(map(int, sequence))) for sequence in sequences]
            try:
                for future in futures:
                    while not future.done():
                        check()
                        time.sleep(0.01)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
            return [future.result() for future in futures]

    def _ask(self, tokens: list[int]) -> NDArray[np.float32]:
        request = {
            "model": self._model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0
        }  # fmt: skip
        choice = (self._call("completions", request).get("choices") or [{}])[0]
        places = choice.get("prompt_logprobs")
        if not isinstance(places, list) or len(places) != len(tokens):
            raise TeacherError(
                f"policy.teacher: {self._endpoint.url} returns no log-probabilities of given tokens "
                "(prompt_logprobs); use a Craton server, vLLM, or the teacher's folder"
            )
        try:
            values = [place[str(token)]["logprob"] for token, place in zip(tokens[1:], places[1:], strict=True)]
            return np.array(values, np.float32)
        except (KeyError, TypeError) as error:
            raise TeacherError(
                f"policy.teacher: {self._endpoint.url} returned log-probabilities of other tokens: {error!r}"
            ) from None

    def _first_model(self) -> str:
        listed = self._call("models", None).get("data") or []
        if not listed:
            raise TeacherError(f"policy.teacher: {self._endpoint.url} lists no model; name one with `model`")
        return str(listed[0]["id"])

    def _call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """Return the reply. A server that is busy or starting is asked again."""
        base, key_name = self._endpoint.url.rstrip("/"), self._endpoint.key
        address = f"{base}/{path}" if base.endswith("/v1") else f"{base}/v1/{path}"
        key = os.environ.get(key_name, "") if key_name else ""
        if key_name and not key:
            raise TeacherError(
                f"policy.teacher: the variable {key_name} is not set; set it, and name it in run.secrets"
            )
        headers = {"Content-Type": "application/json", "User-Agent": "craton"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        opener, reason = urllib.request.build_opener(_RefuseRedirects), ""
        for attempt in range(ATTEMPTS):
            request = urllib.request.Request(address, None if body is None else json.dumps(body).encode(), headers)
            try:
                with opener.open(request, timeout=REPLY_SECONDS) as response:
                    reply = json.load(response)
                return reply if isinstance(reply, dict) else {}
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {error.read(300).decode(errors='replace')}"
                if error.code not in (408, 429, 500, 502, 503, 504):
                    break
            except (OSError, ValueError) as error:
                reason = str(getattr(error, "reason", error))
            if attempt + 1 < ATTEMPTS:
                time.sleep(RETRY_SECONDS)
        reason = reason.replace(key, "***") if key else reason
        raise TeacherError(f"policy.teacher: {address} failed: {reason}")
