"""Between an engine's tokens and texts: the tokens of a prompt, and what an output delta adds to an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from craton.ml.serving.clients.answer import AnswerDelta, InferenceRequest
from craton.ml.serving.clients.errors import RequestRefusedError
from craton.ml.serving.messages import OutputDelta
from craton.ml.serving.settings import ServingError
from craton.ml.serving.text import AnswerReader, ChatTemplate, Detokenizer, Vocabulary, load_template

ENDPOINT = "the engine in this process"  # its name in errors


class EngineTexts:
    """The tokenizer and chat template of an engine's model. Without a tokenizer, prompts are token ids, and answers
    have no text."""

    def __init__(self, vocabulary: Vocabulary | None, template: ChatTemplate | None, endpoint: str = ENDPOINT) -> None:
        self._vocabulary = vocabulary
        self._template = template
        self._endpoint = endpoint

    @classmethod
    def of_folder(cls, tokenizer_folder: Path | None) -> EngineTexts:
        if tokenizer_folder is None:
            return cls(None, None)
        return cls(Vocabulary(tokenizer_folder), load_template(tokenizer_folder))

    @property
    def has_texts(self) -> bool:
        return self._vocabulary is not None

    @property
    def has_chats(self) -> bool:
        return self._template is not None

    def tokens(self, request: InferenceRequest) -> tuple[int, ...]:
        prompt: Any = request.prompt
        if request.prompt_kind == "token":
            return tuple(prompt)
        if self._vocabulary is None or (request.prompt_kind == "chat" and self._template is None):
            raise RequestRefusedError(
                f"{self._endpoint}: the prompt is a {request.prompt_kind}, and there is no tokenizer for it; send "
                "token ids"
            )
        try:
            if request.prompt_kind == "chat":
                assert self._template is not None
                goes_on = request.continues_message
                text = self._template.render(
                    _messages(prompt), add_generation_prompt=not goes_on, continue_final_message=goes_on
                )
                return tuple(self._vocabulary.encode(text, with_special_tokens=False))
            return tuple(self._vocabulary.encode(prompt, with_special_tokens=True))
        except (ServingError, UnicodeEncodeError, TypeError) as error:
            raise RequestRefusedError(f"{self._endpoint}: {error}") from None

    def encode(self, text: str) -> tuple[int, ...] | None:
        """Return the tokens of a text alone; None without a tokenizer."""
        return None if self._vocabulary is None else tuple(self._vocabulary.encode(text, with_special_tokens=False))

    def reader(self, request: InferenceRequest, prompt: tuple[int, ...]) -> AnswerReader | None:
        """Return what makes text of an answer's tokens, or None."""
        if self._vocabulary is None:
            return None
        return AnswerReader(Detokenizer(self._vocabulary, prompt), request.stop, request.sampling.min_tokens)


def answer_delta(delta: OutputDelta, reader: AnswerReader | None) -> AnswerDelta:
    """Return what an output delta adds to its answer. If a stop string ends the answer, it has `finish`, and the
    engine's request may still run."""
    added = AnswerDelta(
        "", delta.tokens, delta.logprobs, delta.alternatives, delta.versions, delta.finish, delta.stop_token
    )
    if delta.stop_token is not None:
        added.stop_logprob, added.stop_version = delta.stop_logprob, delta.stop_version
    if reader is None:
        return added
    addition = reader.read(delta)
    num_tokens = len(addition.tokens)
    added.text, added.tokens = addition.text, addition.tokens
    added.logprobs, added.versions = delta.logprobs[:num_tokens], delta.versions[:num_tokens]
    added.alternatives = delta.alternatives[:num_tokens]
    if reader.is_stopped:
        added.finish, added.stop_reason = "stop", addition.reason
        added.stop_logprob = added.stop_version = None
    return added


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [dict(message) for message in messages]
