"""Serializes the messages between front end and engine; parsing checks every type.

The output deltas of a step, sent every step, are two columns: integers and log-probabilities. A prompt is a column too,
followed by one for the generated tokens of a continued request. All else is JSON.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import fields
from multiprocessing.connection import Connection
from typing import Any, get_args

from craton.ml.serving.messages import (
    Abort,
    Alternatives,
    Control,
    EngineReply,
    Failed,
    Finish,
    Fork,
    ForkBranch,
    Grammar,
    LogprobsMode,
    OutputDelta,
    Ready,
    Reply,
    Request,
    Sampling,
    Stats,
    Submit,
)
from craton.ml.serving.wire.packing import (
    Check,
    WireError,
    expect,
    integers,
    is_anything,
    is_flag,
    is_integer,
    is_mapping,
    is_real,
    is_text,
    list_of,
    optional,
    pack,
    reals,
    receive_bytes,
    unpack,
)

Message = Request | Reply

_PIECES, _SUBMIT, _FORK = 0, 1, 8
_FINISHES: tuple[Finish, ...] = get_args(Finish)
_GRAMMARS = ("json_schema", "json_object", "regex", "lark")
_PIECE_HEAD = 9  # integers before the tokens of a delta
_PIECE_SCORES = 2  # numbers before the log-probabilities of a delta
_SAMPLING: tuple[Check, ...] = (
    is_integer,  # max_tokens
    is_real,  # temperature
    is_integer,  # top_k
    *(is_real,) * 5,  # top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty
    optional(is_integer),  # seed
    list_of(list_of(is_real)),  # logit_bias
    is_integer,  # min_tokens
    list_of(is_integer),  # stop_tokens
    is_flag,  # ignore_eos
    *(optional(is_integer),) * 2,  # logprobs, prompt_logprobs
    optional(list_of(is_text)),  # grammar
    lambda mode: mode in get_args(LogprobsMode),  # logprobs_mode
)
_RARE: tuple[Check, ...] = (list_of(is_anything), optional(list_of(is_anything)), is_text, is_flag)  # of a delta
# The other messages, whose fields are sent in order.
_OTHERS: dict[type, tuple[int, tuple[Check, ...]]] = {
    Abort: (2, (is_integer, optional(is_integer))),
    Control: (3, (is_integer, is_text, is_mapping)),
    EngineReply: (4, (is_integer, is_anything, is_text)),
    Failed: (5, (is_text,)),
    Ready: (
        6,
        (is_text, is_integer, is_integer, list_of(is_text), is_integer, is_integer, is_text, is_real),
    ),
    Stats: (7, (*(is_integer,) * 21, list_of(is_integer), *(is_real,) * 6, is_integer, is_text, is_text)),
}
assert all(len(fields(message)) == len(checks) for message, (_, checks) in _OTHERS.items()), "every field is sent"
_BY_KIND = {kind: (message, checks) for message, (kind, checks) in _OTHERS.items()}
_WITH_TUPLES = (Ready, Stats)


class MessageLine:
    """A connection that carries messages."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: Message) -> None:
        self._connection.send_bytes(encode(message))

    def recv(self) -> Any:
        """Wait for the next message. Raise EOFError or OSError if the connection closes, WireError if it is invalid."""
        return decode(receive_bytes(self._connection))

    def poll(self, seconds: float = 0.0) -> bool:
        return self._connection.poll(seconds)

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()


def encode(message: Message) -> bytes:
    if isinstance(message, list):
        return _encode_pieces(message)
    if isinstance(message, Submit):
        rest = [message.id, pack_sampling(message.sampling), message.copies, message.priority, message.adapter]
        columns = [message.prompt, message.generated] if message.generated else [message.prompt]
        return pack(_SUBMIT, rest, [array("q", tokens) for tokens in columns])
    if isinstance(message, Fork):
        branches = [[branch.id, pack_sampling(branch.sampling)] for branch in message.branches]
        return pack(_FORK, [message.id, branches, message.index])
    kind, _ = _OTHERS[type(message)]
    return pack(kind, [getattr(message, field.name) for field in fields(message)])


def decode(data: bytes) -> Message:
    """Parse a message; raise WireError if it is invalid."""
    kind, values, columns = unpack(data)
    if kind == _PIECES and len(columns) == 2:
        return _decode_pieces(values, integers(columns[0]), reals(columns[1]))
    if kind == _SUBMIT and len(columns) in (1, 2):
        number, sampling, copies, priority, adapter = expect(
            values, is_integer, is_anything, is_integer, is_integer, optional(is_text)
        )
        prompt, generated = (tuple(integers(column)) for column in (*columns, b"")[:2])
        return Submit(number, prompt, unpack_sampling(sampling), copies, priority, adapter, generated)
    if kind == _FORK and not columns:
        return _decode_fork(values)
    if kind not in _BY_KIND or columns:
        raise WireError(f"unknown message: kind {kind} with {len(columns)} columns")
    message, checks = _BY_KIND[kind]
    values = expect(values, *checks)
    if message in _WITH_TUPLES:
        values = [tuple(value) if type(value) is list else value for value in values]
    decoded: Message = message(*values)
    return decoded


def _decode_fork(values: Any) -> Fork:
    number, branches, index = expect(values, is_integer, list_of(is_anything), is_integer)
    pairs = [expect(branch, is_integer, is_anything) for branch in branches]
    return Fork(number, tuple(ForkBranch(branch, unpack_sampling(sampling)) for branch, sampling in pairs), index)


def pack_sampling(sampling: Sampling) -> list[Any]:
    """Return the values for JSON."""
    grammar = sampling.grammar
    return [
        sampling.max_tokens,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
        sampling.seed,
        list(sampling.logit_bias.items()),
        sampling.min_tokens,
        sampling.stop_tokens,
        sampling.ignore_eos,
        sampling.logprobs,
        sampling.prompt_logprobs,
        None if grammar is None else [grammar.kind, grammar.text],
        sampling.logprobs_mode,
    ]


def unpack_sampling(values: Any) -> Sampling:
    values = list(expect(values, *_SAMPLING))
    bias, stops, grammar = values[9], values[11], values[15]
    if any(len(pair) != 2 or type(pair[0]) is not int for pair in bias):
        raise WireError("an entry of logit_bias is not a pair of token and number")
    if grammar is not None and (len(grammar) != 2 or grammar[0] not in _GRAMMARS):
        raise WireError(f"unknown kind of grammar; allowed: {', '.join(_GRAMMARS)}")
    values[9], values[11] = dict(bias), tuple(stops)
    values[15] = None if grammar is None else Grammar(*grammar)
    return Sampling(*values)


def _encode_pieces(pieces: Sequence[OutputDelta]) -> bytes:
    numbers, scores = array("q", (len(pieces),)), array("d")
    rare: dict[int, list[Any]] = {}
    for place, piece in enumerate(pieces):
        numbers.extend(
            (
                piece.id,
                piece.index,
                len(piece.tokens),
                len(piece.logprobs),
                len(piece.versions),
                piece.cached_tokens,
                0 if piece.finish is None else 1 + _FINISHES.index(piece.finish),
                -1 if piece.stop_token is None else piece.stop_token,
                piece.stop_version,
            )
        )
        numbers.extend(piece.tokens)
        numbers.extend(piece.versions)
        scores.extend((piece.admitted, piece.stop_logprob))
        scores.extend(piece.logprobs)
        if piece.alternatives or piece.prompt_logprobs is not None or piece.error or piece.is_ours or piece.generated:
            prompt = piece.prompt_logprobs
            rare[place] = [
                [_pack_alternatives(alternative) for alternative in piece.alternatives],
                None if prompt is None else [None if item is None else _pack_alternatives(item) for item in prompt],
                piece.error,
                piece.is_ours,
                *([piece.generated] if piece.generated else []),
            ]
    return pack(_PIECES, list(rare.items()) if rare else None, [numbers, scores])


def _decode_pieces(values: Any, numbers: list[int], scores: list[float]) -> list[OutputDelta]:
    if not numbers or not 0 <= (count := numbers[0]) <= len(scores):
        raise WireError("a message of output deltas has no valid count")
    pieces: list[OutputDelta] = []
    at, score = 1, 0
    for _ in range(count):
        head = numbers[at : at + _PIECE_HEAD]
        if len(head) < _PIECE_HEAD or min(head[2:5]) < 0 or not 0 <= head[6] <= len(_FINISHES):
            raise WireError("an output delta is truncated, or has an unknown finish reason")
        number, index, num_tokens, num_scores, num_versions, cached, finish, stop, stop_version = head
        tokens_end = at + _PIECE_HEAD + num_tokens
        scores_end = score + _PIECE_SCORES + num_scores
        if scores_end > len(scores):
            raise WireError("an output delta has fewer log-probabilities than its header states")
        pieces.append(
            OutputDelta(
                number,
                index,
                numbers[at + _PIECE_HEAD : tokens_end],
                scores[score + _PIECE_SCORES : scores_end],
                [],
                numbers[tokens_end : tokens_end + num_versions],
                None,
                cached,
                scores[score],
                _FINISHES[finish - 1] if finish else None,
                None if stop < 0 else stop,
                scores[score + 1],
                stop_version,
            )
        )
        at, score = tokens_end + num_versions, scores_end
    if at != len(numbers) or score != len(scores):
        raise WireError("output deltas have more or fewer numbers than their headers state")
    if values is None:
        return pieces
    if type(values) is not list:
        raise WireError("the optional fields of output deltas are not a list")
    for entry in values:
        place, rest = expect(entry, lambda place: is_integer(place) and 0 <= place < count, is_anything)
        piece = pieces[place]
        if type(rest) is list and len(rest) == len(_RARE) + 1:
            (piece.generated,) = expect([rest.pop()], list_of(is_integer))
        alternatives, prompt, piece.error, piece.is_ours = expect(rest, *_RARE)
        piece.alternatives = [_unpack_alternatives(alternative) for alternative in alternatives]
        if prompt is not None:
            piece.prompt_logprobs = [None if item is None else _unpack_alternatives(item) for item in prompt]
    return pieces


def _pack_alternatives(alternatives: Alternatives) -> list[Any]:
    return [alternatives.tokens, alternatives.logprobs]


def _unpack_alternatives(values: Any) -> Alternatives:
    tokens, logprobs = expect(values, list_of(is_integer), list_of(is_real))
    return Alternatives(tuple(tokens), tuple(logprobs))
