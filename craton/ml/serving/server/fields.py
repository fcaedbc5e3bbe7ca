"""Request fields that this server does not implement.

- A field that would change the answer is refused (400), unless its value is neutral: `best_of: 1`, `suffix: null`.
- A probable typo is refused too, with the nearest field name.
- OpenAI's bookkeeping (`user`, `metadata`, …) and hints are accepted silently.
- Any other field is ignored, named in the response header `X-Ignored-Fields`, and logged once.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Any

from craton.ml.serving.server.errors import BadRequestError

MAX_UNKNOWN = 32
MAX_LOGGED = 100
SIMILARITY = 0.88  # minimum similarity of a typo and its field; `max_token` and `max_tokens` have 0.95
HARMLESS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prediction", "guided_decoding_backend", "request_id"),
    }
)
# Fields of OpenAI's and vLLM's APIs that would change the answer, with their neutral values.
NOT_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "guided_whitespace_pattern": (),
}

logger = logging.getLogger("craton.serving")
_logged: set[str] = set()


def unknown_fields(extra: Mapping[str, Any], known_fields: Mapping[str, Any], n: int = 1) -> list[str]:
    """Return the names of ignored fields. Raise BadRequestError for one that must not be ignored."""
    if len(extra) > MAX_UNKNOWN:
        raise BadRequestError(
            f"{len(extra)} fields are unknown; the known ones are in /openapi.json", code="unknown_field"
        )
    result = []
    for name in sorted(set(extra) - HARMLESS):
        neutral = NOT_IMPLEMENTED.get(name)
        if neutral is not None:
            if extra[name] is not None and extra[name] not in neutral and (name, extra[name]) != ("best_of", n):
                allowed = " or ".join(repr(value) for value in neutral)
                remedy = f"omit it, or set it to {allowed}" if neutral else "omit it"
                raise BadRequestError(f"{name} is not supported; {remedy}", name[:64], "unsupported_field")
            continue
        meant = difflib.get_close_matches(name[:64], known_fields, 1, SIMILARITY)
        if meant:
            raise BadRequestError(f"unknown field {name!r}; did you mean {meant[0]!r}?", name, "unknown_field")
        result.append(name)
    for name in result:
        if name not in _logged and len(_logged) < MAX_LOGGED:
            _logged.add(name)
            logger.warning("ignoring unknown request field %.64r", name)
    return result
