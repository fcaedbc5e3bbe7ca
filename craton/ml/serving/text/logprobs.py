"""Log-probs in three formats: OpenAI's for chats, OpenAI's for completions, vLLM's for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from craton.ml.serving.messages import Alternatives
from craton.ml.serving.text.answer import TokenScore
from craton.ml.serving.text.vocabulary import Vocabulary

SMALLEST = -9999.0  # JSON has no infinity


def chat_logprobs(scores: Sequence[TokenScore], top: int, vocabulary: Vocabulary | None) -> dict[str, Any]:
    content = []
    for score in scores:
        likeliest = [_entry(token, value, vocabulary) for token, value in _top(score.alternatives, top)]
        content.append({**_entry(score.token, score.logprob, vocabulary), "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def completion_logprobs(
    scores: Sequence[TokenScore], top: int, vocabulary: Vocabulary | None, begin: int
) -> dict[str, Any]:
    """Return OpenAI's completion format. `begin`: offset of the answer after an echoed prompt."""
    return {
        "tokens": [_key(score.token, vocabulary) for score in scores],
        "token_logprobs": [_finite(score.logprob) for score in scores],
        "top_logprobs": [
            {_key(token, vocabulary): value for token, value in _top(score.alternatives, top)} for score in scores
        ],
        "text_offset": [begin + score.offset for score in scores],
    }


def echoed_logprobs(
    prompt: Sequence[int], alternatives: Sequence[Alternatives | None], top: int, vocabulary: Vocabulary | None
) -> dict[str, Any]:
    """Return the log-probs of an echoed prompt; its first token has none."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, end = [], 0
    for token in prompt:
        offsets.append(end)
        end += 0 if vocabulary is None else len(decoder.decode(vocabulary.token_bytes(token)))
    return {
        "tokens": [_key(token, vocabulary) for token in prompt],
        "token_logprobs": [None if place is None else _finite(place.logprobs[0]) for place in alternatives],
        "top_logprobs": [
            None if place is None else {_key(token, vocabulary): value for token, value in _top(place, top)}
            for place in alternatives
        ],
        "text_offset": offsets,
    }


def prompt_logprobs(
    alternatives: Sequence[Alternatives | None], top: int, vocabulary: Vocabulary | None
) -> list[dict[str, Any] | None]:
    """Return vLLM's format, by token id; the prompt's own token first, even if it is not among the likeliest."""
    places: list[dict[str, Any] | None] = []
    for place in alternatives:
        if place is None:
            places.append(None)
            continue
        likeliest = _top(place, top)
        ranks = {token: rank for rank, (token, _) in enumerate(likeliest, 1)}
        entries = {place.tokens[0]: place.logprobs[0], **dict(likeliest)}
        places.append(
            {
                str(token): {
                    "logprob": _finite(value),
                    "rank": ranks.get(token),
                    "decoded_token": _text(token, vocabulary),
                }
                for token, value in entries.items()
            }
        )
    return places


def _top(alternatives: Alternatives | None, count: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens; the sampled one only if it is among them."""
    if alternatives is None or not count:
        return []
    # The first, the sampled one, may come again with another last digit; clients compare the two values.
    values = dict(zip(reversed(alternatives.tokens), reversed(alternatives.logprobs), strict=True))
    likeliest = sorted(values.items(), key=lambda item: -item[1])[:count]
    return [(token, _finite(value)) for token, value in likeliest]


def _entry(token: int, logprob: float, vocabulary: Vocabulary | None) -> dict[str, Any]:
    encoded = b"" if vocabulary is None else vocabulary.token_bytes(token)
    return {"token": _text(token, vocabulary), "logprob": _finite(logprob), "bytes": list(encoded)}


def _text(token: int, vocabulary: Vocabulary | None) -> str:
    return f"token_id:{token}" if vocabulary is None else vocabulary.token_text(token)


def _key(token: int, vocabulary: Vocabulary | None) -> str:
    """Return a unique name of a token, also for a part of a character: OpenAI's `bytes:\\xf0`."""
    if vocabulary is None:
        return _text(token, vocabulary)
    encoded = vocabulary.token_bytes(token)
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in encoded)


def _finite(logprob: float) -> float:
    return max(logprob, SMALLEST)
