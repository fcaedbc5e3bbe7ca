"""Chats to tokens with the tokenizer's chat template, and a loss mask on the assistant's turns.

A line of JSONL has `messages` (role and content each; `tools` beside them if the template takes them), or `prompt` and
`completion`, each a string or a list of messages. If the template marks assistant text with `{% generation %}`, these
marks make the loss mask. Otherwise the conversation is rendered up to and including each of its turns, and what a turn
adds to its prompt belongs to the assistant. A template that renders earlier turns differently once later ones follow
(such as one that drops old reasoning) gives one sample per assistant turn, each exactly what the model would see.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from craton.ml.data.documents import DocumentChunk, records
from craton.ml.data.encoding import Encoded
from craton.ml.data.errors import DataError, first_problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DEFAULT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else -%}
{{ message['content'] + '<|im_end|>' }}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
TEMPLATE = "chat_template.jinja"

_ANSWER = "fortytwo"  # an answer, to find what the template writes after one
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")

Turn = tuple[str, list[tuple[int, int]]]  # a rendered text, and its assistant spans
Messages = list[dict[str, Any]]

logger = logging.getLogger("craton.data")


def template_of(folder: Path) -> str:
    """Return a tokenizer's chat template, or its templates as JSON; "" without one."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    written = _config(folder).get("chat_template") or ""
    return written if isinstance(written, str) else json.dumps(written)


def ensure_template(folder: Path) -> None:
    """Give a tokenizer without a chat template the default one, with a warning."""
    if template_of(folder):
        return
    (folder / TEMPLATE).write_text(DEFAULT_TEMPLATE, encoding="utf-8")
    logger.warning(
        "the tokenizer has no chat template; using <|im_start|>role … <|im_end|>. Put a %s beside its tokenizer.json "
        "to use another",
        TEMPLATE,
    )


def end_of_turn(folder: Path) -> int | None:
    """Return the special token after an assistant's message in the chat template; None without one. A model that was
    fine-tuned on chats ends its answers with it, not with the end-of-text token."""
    if not template_of(folder):
        return None
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    try:
        token = token_after_answer(tokenizer)
    except Exception:  # noqa: BLE001  (a template is a program: it may raise anything)
        return None
    return token if token in tokenizer.added_tokens_decoder else None


def token_after_answer(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Return the first token that the chat template writes after an assistant's message."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    after = tokenizer(text.rpartition(_ANSWER)[2], add_special_tokens=False)["input_ids"]
    return int(after[0]) if after else None


class ChatEncoder:
    """Encodes chat lines as token ids and a loss mask."""

    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        template = self._tokenizer.get_chat_template()
        self._is_marked = _MARKS.search(template) is not None

    def __call__(self, pieces: Sequence[DocumentChunk]) -> Encoded:
        ids: list[int] = []
        loss: list[int] = []
        ends: list[int] = []
        text_bytes = 0
        problems: list[str] = []
        for piece in pieces:
            if piece.kind != "jsonl":
                raise DataError(f"{piece.name}: is not a chat file; use JSONL with `messages` in each line")
            text_bytes += len(piece.data)
            for where, record in records(piece):
                try:
                    for tokens, learnt in self.encode(record):
                        ids += tokens
                        loss += learnt
                        ends.append(len(ids))
                except DataError as error:
                    problems.append(f"{where}: {error}")
        if problems:
            raise first_problems(problems, pieces[0].name)
        return Encoded(np.array(ids, np.uint32), np.array(ends, np.int64), text_bytes, np.array(loss, np.uint8))

    def prompt_ids(self, messages: Messages, tools: Any = None) -> list[int]:
        """Return the ids of messages that an answer follows."""
        options: dict[str, Any] = {"tools": tools} if tools else {}
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        except Exception as error:  # noqa: BLE001  (a template is a program: it may raise anything)
            raise DataError(f"the chat template rejects it: {type(error).__name__}: {error}") from None
        return list(self._tokenizer(str(text), add_special_tokens=False)["input_ids"])

    def encode(self, record: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield (ids, loss mask) of each sample of a conversation; usually one."""
        messages = messages_of(record)
        options: dict[str, Any] = {"tools": record["tools"]} if record.get("tools") else {}
        try:
            if self._is_marked:
                encoded = self._tokenizer.apply_chat_template(
                    messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
                )
                yield list(encoded["input_ids"]), [int(mark) for mark in encoded["assistant_masks"]]
                return
            turns = self._turns(messages, options)
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001  (a template is a program: it may raise anything)
            raise DataError(f"the chat template rejects it: {type(error).__name__}: {error}") from None
        for text, spans in turns:
            encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            starts = [start for start, _ in encoded["offset_mapping"]]
            yield list(encoded["input_ids"]), [int(any(a <= start < b for a, b in spans)) for start in starts]

    def _turns(self, messages: Messages, options: dict[str, Any]) -> list[Turn]:
        """Return the conversation with the assistant's spans; each turn if a later turn changes an earlier one."""

        def render(upto: int, prompt: bool = False) -> str:
            return str(
                self._tokenizer.apply_chat_template(
                    messages[:upto], tokenize=False, add_generation_prompt=prompt, **options
                )
            )

        turns: list[Turn] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            text = render(number + 1)
            start = _common(render(number, prompt=True), text) if number else 0
            if number and start < _common(render(number), text):
                raise DataError(
                    "the assistant's text cannot be separated from the rest; add {% generation %} to the chat template"
                )
            turns.append((text, [(start, len(text))]))
        whole = render(len(messages))
        if all(whole.startswith(text) for text, _ in turns):
            return [(whole, [span for _, spans in turns for span in spans])]
        return turns


def messages_of(record: dict[str, Any]) -> Messages:
    """Return the messages of one line, validated."""
    if "messages" in record:
        messages = record["messages"]
    elif "prompt" in record and "completion" in record:
        messages = _as_messages(record["prompt"], "user") + _as_messages(record["completion"], "assistant")
    else:
        names = ", ".join(map(repr, list(record)[:8])) or "none"
        raise DataError(f"has neither `messages` nor `prompt` and `completion`; its fields are {names}")
    if not isinstance(messages, list) or not messages:
        raise DataError("`messages` is not a list of messages")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"message {number} has no role; each message needs `role` and `content`")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise DataError(
                f"message {number} has content of type {type(content).__name__}; only strings are supported"
            )
    if all(message["role"] != "assistant" for message in messages):
        raise DataError("has no message of the role `assistant`, so there is nothing to learn")
    return messages


def _as_messages(value: Any, role: str) -> Messages:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list):
        return value
    raise DataError("`prompt` and `completion` must be strings or lists of messages")


def _common(first: str, second: str) -> int:
    """Return the length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _config(folder: Path) -> dict[str, Any]:
    try:
        document = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
