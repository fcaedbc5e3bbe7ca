"""Fields of a request that this server does not implement.

- One that would change the answer is refused (400), unless its value asks for nothing: `best_of: 1`, `suffix: null`.
- One that looks like a mistyped field of ours is refused too, with the name that was meant.
- OpenAI's bookkeeping (`user`, `metadata`, …) and hints are taken without a word.
- Any other is ignored, named in the response's header `X-Ignored-Fields`, and logged once.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Any

from craton.ml.serving.server.errors import BadRequestError

MAX_UNKNOWN = 32
MAX_LOGGED = 100
SIMILARITY = 0.88  # of a name and the one it is taken for; `max_token` and `max_tokens` have 0.95
HARMLESS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prediction", "guided_decoding_backend", "request_id"),
    }
)
# Of OpenAI's API and vLLM's: what would change the answer, and the values that ask for nothing.
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
    "continue_final_message": (False,),
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
    """The fields to warn of, by name. A BadRequestError for one that must not be ignored."""
    if len(extra) > MAX_UNKNOWN:
        raise BadRequestError(
            f"{len(extra)} fields are not known; see the names in /openapi.json", code="unknown_field"
        )
    result = []
    for name in sorted(set(extra) - HARMLESS):
        neutral = NOT_IMPLEMENTED.get(name)
        if neutral is not None:
            if extra[name] is not None and extra[name] not in neutral and (name, extra[name]) != ("best_of", n):
                allowed = " or ".join(repr(value) for value in neutral)
                leave = f"leave it out, or give {allowed}" if neutral else "leave it out"
                raise BadRequestError(f"{name} is not implemented here; {leave}", name[:64], "unsupported_field")
            continue
        meant = difflib.get_close_matches(name[:64], known_fields, 1, SIMILARITY)
        if meant:
            raise BadRequestError(f"{name!r} is not a field; did you mean {meant[0]!r}?", name, "unknown_field")
        result.append(name)
    for name in result:
        if name not in _logged and len(_logged) < MAX_LOGGED:
            _logged.add(name)
            logger.warning("requests have a field %.64r, which is not known here and is ignored", name)
    return result
