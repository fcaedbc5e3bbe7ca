"""Preference rows to tokens: a prompt with a chosen and a rejected completion, and a loss mask on the completions.

A row has `chosen` and `rejected`, each a text, a message or a list of messages, and a `prompt`, a text or messages;
`system` may hold a system message. Without a prompt, or where both conversations repeat it, the prompt is what both
have in common: messages, or tokens of a text. Messages are rendered with the tokenizer's chat template, and so are
texts with a prompt if the tokenizer has one; other texts are used as they are. A row that cannot be used is left out,
with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from craton.ml.data.chat import ChatEncoder, Messages, template_of
from craton.ml.data.documents import DocumentChunk, records
from craton.ml.data.encoding import Encoded
from craton.ml.data.errors import DataError
from craton.ml.data.tokenizer import end_of_document, load_tokenizer

PAIR_FIELDS = ("prompt", "chosen", "rejected", "system")
ROLES = {"human": "user", "gpt": "assistant"}  # of conversations with `from` and `value`

Row = Mapping[str, Any]
Side = tuple[list[int], list[int]]  # token ids, loss mask


@dataclass(frozen=True)
class PairRow:
    """A prompt and two completions: all three texts, or all three messages. An empty text is a prompt that is the
    beginning of both completions."""

    prompt: str | Messages
    chosen: str | Messages
    rejected: str | Messages

    @classmethod
    def of(cls, row: Row, columns: Mapping[str, str], uses_chat: bool) -> PairRow:
        """Parse a row; DataError says why it cannot be used. With `uses_chat` texts with a prompt become messages."""
        chosen, rejected = (_completion(row, name, columns) for name in ("chosen", "rejected"))
        prompt = _content(row, "prompt", columns)
        system = _content(row, "system", columns)
        if isinstance(chosen, str) != isinstance(rejected, str):
            raise DataError("has a text and a list of messages; `chosen` and `rejected` must be of one kind")
        if chosen == rejected:
            raise DataError("`chosen` equals `rejected`, so there is nothing to prefer")
        if isinstance(chosen, str) and isinstance(rejected, str):
            return cls._of_texts(prompt, system, chosen, rejected, uses_chat)
        assert not isinstance(chosen, str)
        assert not isinstance(rejected, str)
        return cls._of_messages(prompt, system, chosen, rejected)

    @classmethod
    def _of_texts(
        cls, prompt: str | Messages | None, system: str | Messages | None, chosen: str, rejected: str, uses_chat: bool
    ) -> PairRow:
        if prompt is None:
            return cls("", chosen, rejected)
        if isinstance(prompt, str) and not uses_chat:
            text = f"{system}\n{prompt}" if isinstance(system, str) and system else prompt
            return cls(text, chosen, rejected)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        answers = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
        return cls(_with_system(messages, system), *answers)

    @classmethod
    def _of_messages(
        cls, prompt: str | Messages | None, system: str | Messages | None, chosen: Messages, rejected: Messages
    ) -> PairRow:
        if isinstance(prompt, list):
            shared = len(prompt) if chosen[: len(prompt)] == prompt == rejected[: len(prompt)] else 0
        else:  # as text, the prompt is also the first message where the conversations are whole
            shared = _common(chosen, rejected)
            prompt = chosen[:shared] or ([{"role": "user", "content": prompt}] if prompt else None)
        if not prompt:
            raise DataError("`chosen` and `rejected` have no message in common, and there is no `prompt`")
        chosen, rejected = chosen[shared:], rejected[shared:]
        for name, messages in (("chosen", chosen), ("rejected", rejected)):
            if all(message["role"] != "assistant" for message in messages):
                raise DataError(f"`{name}` has no message of the role `assistant` after the prompt")
        return cls(_with_system(prompt, system), chosen, rejected)


class PairEncoder:
    """Encodes rows as pairs of token ids with loss masks: first the chosen, then the rejected sequence."""

    def __init__(self, folder: Path, columns: Mapping[str, str] | None = None) -> None:
        self._chat = ChatEncoder(folder) if template_of(folder) else None
        self._tokenizer = load_tokenizer(folder)
        self._end = end_of_document(folder, self._tokenizer)
        self._columns = columns or {}

    def __call__(self, pieces: Sequence[DocumentChunk]) -> Encoded:
        ids: list[int] = []
        loss: list[int] = []
        ends: list[int] = []
        dropped: list[str] = []
        text_bytes = 0
        for piece in pieces:
            if piece.kind == "text":
                raise DataError(f"{piece.name}: is not a file of pairs; use JSONL (.jsonl) or Parquet (.parquet)")
            text_bytes += len(piece.data) or piece.took
            for where, row in records(piece):
                try:
                    sides = self.encode(row)
                except DataError as error:
                    dropped.append(f"{where}: {error}")
                    continue
                for tokens, learnt in sides:
                    ids += tokens
                    loss += learnt
                    ends.append(len(ids))
        return Encoded(
            np.array(ids, np.uint32),
            np.array(ends, np.int64),
            text_bytes,
            np.array(loss, np.uint8),
            dropped=tuple(dropped),
        )

    def encode(self, row: Row) -> tuple[Side, Side]:
        """Return the two sequences of a row, each with its loss mask."""
        pair = PairRow.of(row, self._columns, uses_chat=self._chat is not None)
        tools = row.get("tools") or None
        chosen, rejected = self._render(pair, tools) if isinstance(pair.prompt, list) else self._plain(pair)
        if chosen == rejected:
            raise DataError("`chosen` and `rejected` are the same tokens, so there is nothing to prefer")
        for name, (_, learnt) in (("chosen", chosen), ("rejected", rejected)):
            if not any(learnt[1:]):
                raise DataError(f"`{name}` has no token after its prompt")
        return chosen, rejected

    def answered(self, prompt: str | Messages, completion: str) -> list[int]:
        """Return the tokens of one side of a pair: a text and its completion, or messages and the answer to them."""
        if isinstance(prompt, str):
            return self._ids(f"{prompt}{completion}")
        if self._chat is None:
            raise DataError("the prompt has messages, and the tokenizer no chat template")
        messages = [_message(message, "prompt") for message in prompt]
        *_, (ids, _) = self._chat.encode({"messages": [*messages, {"role": "assistant", "content": completion}]})
        return ids

    def _plain(self, pair: PairRow) -> tuple[Side, Side]:
        assert isinstance(pair.prompt, str)
        both = [self._ids(f"{pair.prompt}{completion}") for completion in (pair.chosen, pair.rejected)]
        shared = _common(*both)
        if pair.prompt:
            # A token may reach over the end of the prompt: it belongs to the completion.
            shared = min(shared, _common(self._tokenizer.encode(pair.prompt).ids, both[0]))
        if not shared:
            raise DataError("`chosen` and `rejected` have no beginning in common, and there is no `prompt`")
        chosen, rejected = ((ids, [0] * shared + [1] * (len(ids) - shared)) for ids in both)
        return chosen, rejected

    def _ids(self, text: str) -> list[int]:
        ids = list(self._tokenizer.encode(text).ids)
        if self._end is not None and (not ids or ids[-1] != self._end):
            ids.append(self._end)
        return ids

    def _render(self, pair: PairRow, tools: Any) -> tuple[Side, Side]:
        assert isinstance(pair.prompt, list)
        if self._chat is None:
            raise DataError("has messages, but the first row of the data has none, and the tokenizer no chat template")
        prompt = self._chat.prompt_ids(pair.prompt, tools)
        sides = []
        for completion in (pair.chosen, pair.rejected):
            assert isinstance(completion, list)
            # A template that renders earlier turns differently gives a sample per turn: the last has the whole answer.
            *_, (ids, learnt) = self._chat.encode({"messages": [*pair.prompt, *completion], "tools": tools})
            sides.append((ids, learnt))
        shared = min(_common(prompt, ids) for ids, _ in sides)
        chosen, rejected = ((ids, [0] * shared + learnt[shared:]) for ids, learnt in sides)
        return chosen, rejected


def has_messages(row: Row, columns: Mapping[str, str]) -> bool:
    """Whether a row needs a chat template."""
    values = (row.get(columns.get(name, name)) for name in ("prompt", "chosen", "rejected"))
    return any(isinstance(value, list | dict) for value in values)


def check_columns(columns: Mapping[str, str]) -> None:
    """Refuse names under `data.columns` that no row of pairs has."""
    for name in columns:
        if name not in PAIR_FIELDS:
            raise DataError(f"data.columns: {name!r} is no field of a pair; allowed: {', '.join(PAIR_FIELDS)}")


def _completion(row: Row, name: str, columns: Mapping[str, str]) -> str | Messages:
    content = _content(row, name, columns)
    if content is None:
        field = columns.get(name, name)
        names = ", ".join(map(repr, list(row)[:8])) or "none"
        problem = f"field {field!r} is null" if field in row else f"has no field {field!r}"
        raise DataError(f"{problem}; its fields are {names}: `data.columns: {{{name}: NAME}}` reads another")
    if not content:
        raise DataError(f"`{name}` is empty")
    return content


def _content(row: Row, name: str, columns: Mapping[str, str]) -> str | Messages | None:
    """Return a text, or messages of known form; None if there is none."""
    value = row.get(columns.get(name, name))
    if value is None and name in columns and columns[name] not in row:
        raise DataError(f"has no field {columns[name]!r}, which data.columns gives as {name}; it has {list(row)[:8]}")
    if value is None or (name in ("prompt", "system") and value in ("", [])):
        return None
    if isinstance(value, str):
        return value if value.strip() or name in ("prompt", "system") else ""
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise DataError(f"`{name}` is {type(value).__name__}; it must be a text or a list of messages")
    return [_message(item, name) for item in items]


def _message(item: dict[str, Any], name: str) -> dict[str, Any]:
    if item.get("role") is None and isinstance(item.get("from"), str):
        item = {"role": ROLES.get(item["from"], item["from"]), "content": item.get("value")}
    if not isinstance(item.get("role"), str):
        raise DataError(f"a message of `{name}` has no role; each message needs `role` and `content`")
    content = item.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
        item = {**item, "content": content}
    if not isinstance(content, str) and not (content is None and item.get("tool_calls")):
        raise DataError(f"a message of `{name}` has content of type {type(content).__name__}; it must be a text")
    return {key: value for key, value in item.items() if value is not None}


def _with_system(prompt: Messages, system: str | Messages | None) -> Messages:
    if not isinstance(system, str) or any(message["role"] == "system" for message in prompt):
        return prompt
    return [{"role": "system", "content": system}, *prompt]


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common beginning."""
    limit = min(len(first), len(second))
    return next((place for place in range(limit) if first[place] != second[place]), limit)
