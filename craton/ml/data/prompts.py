"""Prompts of reinforcement learning: rows with a `prompt`, a text or the messages of a chat, and any further fields.

`write_prompts` renders and tokenizes every prompt once, before the ranks start. The result is a folder of token shards
with one document per prompt, and the rows beside them in the same order (rows.jsonl, and where each of them ends). A
`PromptSource` is a pure function of the prompt index: prompt 17 is the same in any order and after any restart. Prompts
longer than the job allows are left out and counted.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from craton.formatting import counted
from craton.ml.data.chat import end_of_turn, ensure_template
from craton.ml.data.documents import find_files, rows_of
from craton.ml.data.errors import DataError, first_problems
from craton.ml.data.indexed_function import IndexedFunction
from craton.ml.data.order import Turns, key_of, shuffled
from craton.ml.data.pair_rows import PairEncoder
from craton.ml.data.shards import Shards
from craton.ml.data.tokenizer import copy_tokenizer, end_of_document, load_tokenizer, mark_of
from craton.ml.data.writer import ShardWriter, new_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROMPT = "prompt"
HELD_OUT = "validation"  # prompts held out for validation: a folder inside the folder
_ANSWER = "fortytwo"  # an answer, to find what the template writes after one
_NO_TEXT = "has half of a surrogate pair, such as \\ud83d alone, which is no character; remove it"
ROWS, ROW_ENDS = "rows.jsonl", "rows.ends"

Row = Mapping[str, Any]

logger = logging.getLogger("craton.data")


@dataclass(frozen=True)
class Prompt:
    """A prompt as the policy reads it, and its row, for verifiers."""

    index: int
    tokens: tuple[int, ...]
    row: Row

    @property
    def content(self) -> Any:
        """The text, or the messages, as written."""
        return self.row[PROMPT]


class PromptSource(Protocol):
    """Prompts by their index, endlessly."""

    def prompt(self, index: int) -> Prompt: ...


class PromptEncoder:
    """Renders and tokenizes prompts: texts as the beginning of a document, messages with the chat template."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer = load_tokenizer(folder)
        self._chat: PreTrainedTokenizerFast | None = None
        self._pairs: PairEncoder | None = None

    def __call__(self, row: Row) -> list[int]:
        content = row.get(PROMPT)
        if isinstance(content, str):
            tokens = self._ids(content, add_special_tokens=True)
        elif isinstance(content, list) and content:
            tokens = self._render(content, row)
        else:
            names = ", ".join(map(repr, list(row)[:8])) or "none"
            problem = "is neither a text nor a list of messages" if PROMPT in row else "is missing"
            raise DataError(f"`{PROMPT}` {problem}; the fields are {names}: data.columns: {{prompt: NAME}} renames one")
        if not tokens:
            raise DataError(f"`{PROMPT}` is empty")
        return list(tokens)

    def _render(self, messages: list[Any], row: Row) -> list[int]:
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise DataError(f"message {number} has no role; each message needs `role` and `content`")
        options: dict[str, Any] = {"tools": row["tools"]} if row.get("tools") else {}
        try:
            text = self.chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        except Exception as error:  # noqa: BLE001  (a template is a program: it may raise anything)
            raise DataError(f"the chat template rejects it: {type(error).__name__}: {error}") from None
        return self._ids(str(text))

    def next_turn(self, text: str, is_chat: bool, last: int) -> list[int]:
        """Return the tokens between a completion that ended with the token `last` and the next one: the text as it is,
        or as the message of a user, with what the chat template writes around it."""
        if not is_chat:
            return self._ids(text)
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": text},
        ]
        try:
            whole = str(self.chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # noqa: BLE001  (a template is a program: it may raise anything)
            raise DataError(f"the chat template rejects a turn: {type(error).__name__}: {error}") from None
        tokens = self._ids(whole.partition(_ANSWER)[2])
        return tokens[1:] if tokens and tokens[0] == last else tokens

    def answered(self, content: Any, completion: str) -> list[int]:
        """Return the tokens of a prompt with its whole answer, as preference pairs have them."""
        if self._pairs is None:
            self._pairs = PairEncoder(self._folder)
        return self._pairs.answered(content, completion)

    def _ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError:  # of a str that is no Unicode text
            raise DataError(f"`{PROMPT}` {_NO_TEXT}") from None

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of sampled tokens, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end a completion: the end of a text, and that of a turn in a chat."""
        ends = (end_of_document(self._folder, self._tokenizer), end_of_turn(self._folder))
        return tuple(dict.fromkeys(token for token in ends if token is not None))

    @property
    def chat(self) -> PreTrainedTokenizerFast:
        """The tokenizer with its chat template."""
        if self._chat is None:
            from transformers import PreTrainedTokenizerFast

            ensure_template(self._folder)
            self._chat = PreTrainedTokenizerFast.from_pretrained(self._folder)
        return self._chat


def write_prompts(
    path: str | Path, to: Path, tokenizer: Path, columns: Mapping[str, str], held_out_share: float = 0.0
) -> None:
    """Tokenize the prompts of JSONL or Parquet files into the folder `to`."""
    files = find_files([path])
    with new_folder(to) as folder:
        copy_tokenizer(tokenizer, folder)
        mark = mark_of(folder, str(tokenizer))
        encode = PromptEncoder(folder)
        writers = [_PromptWriter(folder, ShardWriter(folder, mark))]
        if held_out_share:
            (folder / HELD_OUT).mkdir()
            copy_tokenizer(folder, folder / HELD_OUT)
            writers.append(_PromptWriter(folder / HELD_OUT, ShardWriter(folder / HELD_OUT, mark)))
        problems: dict[str, list[str]] = {}  # where each of them occurs
        for where, written in rows_of(files):
            try:
                row = _renamed(written, columns)
                tokens, line = np.array(encode(row), np.uint32), _line_of(row)
            except DataError as error:
                problems.setdefault(str(error), []).append(where)
                continue
            is_held_out = key_of(zlib.crc32(tokens.tobytes())) / 2**64 < held_out_share
            writers[int(is_held_out)].append(tokens, line)
        if problems:
            raise first_problems([_said_once(problem, places) for problem, places in problems.items()], str(path))
        if not all(writer.count for writer in writers):
            raise DataError(f"{path}: has too few prompts; give a file with more rows, or other data for validation")
        for writer in writers:
            writer.close()


class PromptRows:
    """The prompts of a folder, in an order that is a function of the seed; at most `max_tokens` long."""

    def __init__(
        self, folder: Path, seed: int, max_tokens: int, vocab: int | None = None, source: str | None = None
    ) -> None:
        """`source`: what the user named, for error messages; default: the folder."""
        self.shards = Shards(folder)
        if not (folder / ROWS).is_file():
            raise DataError(
                f"{folder}: holds token shards without rows; kind grpo needs JSONL or Parquet with `prompt`"
            )
        if vocab is not None:
            self.shards.check_vocabulary(vocab)
        self._ends = self.shards.document_ends()
        lengths = np.diff(self._ends, prepend=0)
        self._usable = np.flatnonzero(lengths <= max_tokens)
        self.left_out = len(lengths) - len(self._usable)
        if not len(self._usable):
            raise DataError(
                f"{source or folder}: all {len(lengths):,} prompts are longer than {max_tokens:,} tokens, which is "
                f"what rollout.max_tokens leaves of data.sequence (the shortest has {int(lengths.min()):,}); raise "
                "data.sequence, or lower rollout.max_tokens"
            )
        self._seed = seed
        self._row_ends = np.fromfile(folder / ROW_ENDS, np.uint64)
        self._rows = (folder / ROWS).open("rb")

    def __len__(self) -> int:
        return len(self._usable)

    def prompt(self, index: int) -> Prompt:
        number = int(self._usable[shuffled(index, len(self._usable), self._seed)])
        start = int(self._ends[number - 1]) if number else 0
        tokens = self.shards.read(start, int(self._ends[number]))
        begin = int(self._row_ends[number - 1]) if number else 0
        self._rows.seek(begin)
        row = json.loads(self._rows.read(int(self._row_ends[number]) - begin))
        return Prompt(index, tuple(tokens.tolist()), row)


class PromptMixture:
    """Several sources, each with its share of the prompts."""

    def __init__(self, sources: Sequence[PromptSource], weights: Sequence[float]) -> None:
        self._sources, self._turns = sources, Turns(weights)

    def prompt(self, index: int) -> Prompt:
        number, inside = self._turns(index)
        found = self._sources[number].prompt(inside)
        return Prompt(index, found.tokens, found.row)


class PromptFunction:
    """Prompts of a user's function, which gives the row of an index."""

    def __init__(self, function: IndexedFunction, encode: PromptEncoder, max_tokens: int) -> None:
        self._function, self._encode, self._max_tokens = function, encode, max_tokens

    @classmethod
    def of_job(cls, job: Any, split: str, encode: PromptEncoder, max_tokens: int) -> PromptFunction:
        example = "lambda index: {'prompt': …, 'answer': …}"
        return cls(IndexedFunction.of_job(job, split, "prompt", example), encode, max_tokens)

    def prompt(self, index: int) -> Prompt:
        where, row = self._function.place(index), self._function(index)
        if not isinstance(row, Mapping):
            raise DataError(f"{where} is {type(row).__name__}; needed: a row such as {{'prompt': …, 'answer': …}}")
        try:
            tokens = self._encode(row)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        if len(tokens) > self._max_tokens:
            raise DataError(
                f"{where} has {len(tokens):,} tokens; allowed: {self._max_tokens:,}, which is what rollout.max_tokens "
                "leaves of data.sequence"
            )
        return Prompt(index, tuple(tokens), row)


class _PromptWriter:
    """Writes tokens and rows of one folder."""

    def __init__(self, folder: Path, shards: ShardWriter) -> None:
        self._folder, self._shards = folder, shards
        self._rows = (folder / ROWS).open("wb")
        self._ends: list[int] = []

    @property
    def count(self) -> int:
        return len(self._ends)

    def append(self, tokens: Any, line: bytes) -> None:
        self._shards.append(tokens, np.array([len(tokens)], np.int64))
        self._rows.write(line)
        self._ends.append(self._rows.tell())

    def close(self) -> None:
        self._rows.close()
        np.array(self._ends, np.uint64).tofile(self._folder / ROW_ENDS)
        self._shards.close()


def _line_of(row: Row) -> bytes:
    """Return a row as it is kept."""
    try:
        return json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n"
    except RecursionError:
        raise DataError("is nested too deeply") from None
    except UnicodeEncodeError:
        raise DataError(f"field {next(name for name in row if not _is_text(name, row[name]))!r} {_NO_TEXT}") from None


def _is_text(*values: Any) -> bool:
    try:
        json.dumps(values, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


def _said_once(problem: str, places: Sequence[str]) -> str:
    others = f" (and so {counted(len(places) - 1, 'other row')})" if len(places) > 1 else ""
    return f"{places[0]}: {problem}{others}"


def _renamed(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the row with its columns under the names that are read: {prompt: question} makes `prompt` of
    `question`."""
    missing = [written for written in columns.values() if written not in row]
    if missing:
        raise DataError(f"has no field {missing[0]!r} that data.columns names; it has {', '.join(map(repr, row))}")
    taken = {name: row[written] for name, written in columns.items()}
    return {**{name: value for name, value in row.items() if name not in columns.values()}, **taken}
