"""Orders from rank 0 of a tensor-parallel engine to the others, as bytes: the input of a step, or a method name with
its arguments. Only the methods of `METHODS` are sent and accepted."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from craton.ml.serving.schedule import DraftInput, Integers, Move, PrefixGroups, PromptPart, RowStart, StepInput
from craton.ml.serving.wire import (
    Check,
    WireError,
    expect,
    integers,
    is_anything,
    is_flag,
    is_integer,
    is_real,
    is_text,
    list_of,
    optional,
    pack,
    pack_sampling,
    reals,
    unpack,
    unpack_sampling,
)

Order = tuple[str, tuple[Any, ...]]

EXECUTE = "execute"
METHODS: dict[str, tuple[Check, ...]] = {
    "load_adapter": (is_text, is_text),
    "unload_adapter": (is_text,),
    "update_from_folder": (is_text,),
    "receive_weights": (is_text, is_real),
    "sleep": (is_integer,),
    "wake": (list_of(is_text),),
}
_END, _CALL, _EXECUTE = 0, 1, 2
_MOVES = ("out", "in", "copy")
_NUM_ARRAYS = 8  # of int32, before the other columns of a step


def encode_order(order: Order | None) -> bytes:
    """Serialize an order; None is the last one."""
    if order is None:
        return pack(_END, None)
    method, arguments = order
    if method != EXECUTE:
        return pack(_CALL, [method, arguments])
    (work,) = arguments
    values = [
        work.decode,
        work.is_tuned,
        work.alternatives,
        [(_MOVES.index(move.kind), move.source, move.target) for move in work.moves],
        [_pack_start(start) for start in work.starts],
        [(part.part, part.begin, part.targets, part.alternatives) for part in work.prompts],
        None if work.allowed is None else work.allowed.shape[1],
        None
        if work.drafts is None
        else (work.drafts.length, work.drafts.requests, len(work.drafts.rows), len(work.drafts.tokens)),
    ]
    groups = work.groups
    of_groups = (
        (_no_integers(), _no_integers())
        if groups is None
        else (groups.members, np.concatenate((groups.ends, groups.rows, groups.tokens)))
    )
    arrays = (work.rows, work.counts, work.lengths, work.tokens, work.sampled, work.sampled_rows, *of_groups)
    columns = [np.ascontiguousarray(element, np.int32) for element in arrays]
    columns.append(np.ascontiguousarray(_no_integers() if work.allowed is None else work.allowed).reshape(-1))
    columns.append(_no_integers() if work.drafts is None else _draft_column(work.drafts))
    flat = chain.from_iterable
    numbers = (
        array("q", flat(work.table)),
        array("q", flat(work.next_tokens)),
        array("q", flat(entry[:2] for entry in work.added)),
        array("d", (item[2] for item in work.added)),
    )
    return pack(_EXECUTE, values, [*columns, *numbers])


def decode_order(data: bytes) -> Order | None:
    """Parse an order; None is the last one. Raise WireError for anything else."""
    kind, values, columns = unpack(data)
    if kind == _END:
        return None
    if kind == _CALL and not columns:
        method, arguments = expect(values, is_text, list_of(is_anything))
        if method not in METHODS:
            raise WireError(f"{method[:40]!r} is not a method of a rank; allowed: {', '.join(METHODS)}")
        return method, tuple(expect(arguments, *METHODS[method]))
    if kind != _EXECUTE or len(columns) != _NUM_ARRAYS + 6:
        raise WireError(f"unknown order: kind {kind} with {len(columns)} columns")
    return EXECUTE, (_decode_work(values, columns),)


def _decode_work(values: Any, columns: Sequence[bytes]) -> StepInput:
    decode, is_tuned, alternatives, moves, starts, prompts, width, draft = expect(
        values,
        is_integer,
        is_flag,
        is_integer,
        list_of(list_of(is_integer)),
        list_of(is_anything),
        list_of(is_anything),
        optional(is_integer),
        optional(list_of(is_integer)),
    )
    rows, counts, lengths, tokens, sampled, sampled_rows, members, groups = map(_integers32, columns[:_NUM_ARRAYS])
    allowed, draft_column, table, next_tokens, places, added = columns[_NUM_ARRAYS:]
    if not len(rows) == len(counts) == len(lengths) or len(sampled) != len(sampled_rows):
        raise WireError("the columns of a step's requests differ in length")
    bias = reals(added)
    return StepInput(
        rows,
        counts,
        lengths,
        decode,
        tokens,
        sampled,
        sampled_rows,
        moves=[_unpack_move(move) for move in moves],
        table=_groups(integers(table), 3),
        starts=[_unpack_start(start) for start in starts],
        next_tokens=_groups(integers(next_tokens), 2),
        is_tuned=is_tuned,
        added=[(*place, value) for place, value in _pairs(_groups(integers(places), 2), bias)],
        allowed=None if width is None else _rows_of(_integers32(allowed), width),
        alternatives=alternatives,
        prompts=[_unpack_prompt(part) for part in prompts],
        drafts=None if draft is None else _decode_drafts(draft, _integers32(draft_column)),
        groups=_unpack_groups(members, groups) if len(members) else None,
    )


def _draft_column(work: DraftInput) -> Integers:
    return np.concatenate((work.rows, work.counts, work.ends, work.tokens, work.places, work.chosen), dtype=np.int32)


def _decode_drafts(values: list[int], column: Integers) -> DraftInput:
    length, requests, rows, tokens = expect(values, is_integer, is_integer, is_integer, is_integer)
    placed = len(column) - 3 * rows - tokens
    if not 0 <= requests <= rows or tokens < 0 or placed < 0 or placed % 2:
        raise WireError(f"a draft model's input of {len(column)} numbers cannot have {rows} rows and {tokens} tokens")
    sizes = (rows, rows, rows, tokens, placed // 2)
    return DraftInput(length, requests, *np.split(column, np.cumsum(sizes)))


def _pack_start(start: RowStart) -> list[Any]:
    return [start.row, start.seed, start.adapter, pack_sampling(start.sampling), start.prompt, start.written]


def _unpack_start(values: Any) -> RowStart:
    row, seed, adapter, sampling, prompt, written = expect(
        values, is_integer, is_integer, is_integer, is_anything, list_of(is_integer), list_of(is_integer)
    )
    return RowStart(row, seed, adapter, unpack_sampling(sampling), tuple(prompt), tuple(written))


def _unpack_move(values: list[int]) -> Move:
    kind, source, target = expect(values, lambda kind: kind in range(len(_MOVES)), is_integer, is_integer)
    return Move(_MOVES[kind], source, target)  # type: ignore[arg-type]


def _unpack_prompt(values: Any) -> PromptPart:
    part, begin, targets, alternatives = expect(values, is_integer, is_integer, list_of(is_integer), is_integer)
    return PromptPart(part, begin, tuple(targets), alternatives)


def _unpack_groups(members: Integers, numbers: Integers) -> PrefixGroups:
    if not len(numbers) or len(numbers) % 3:
        raise WireError(f"groups of requests have {len(numbers)} numbers; expected 3 for each group")
    return PrefixGroups(members, *numbers.reshape(3, -1))


def _integers32(column: bytes) -> Integers:
    if len(column) % 4:
        raise WireError(f"a column of int32 numbers has {len(column)} bytes; expected a multiple of 4")
    return np.frombuffer(column, np.int32).copy()  # torch needs a writable array


def _no_integers() -> Integers:
    return np.zeros(0, np.int32)


def _rows_of(numbers: Integers, width: int) -> Integers:
    if width < 1 or len(numbers) % width:
        raise WireError(f"a table of {len(numbers)} numbers cannot have rows of {width}")
    return numbers.reshape(-1, width)


def _groups(numbers: list[int], size: int) -> list[Any]:
    if len(numbers) % size:
        raise WireError(f"{len(numbers)} numbers cannot form groups of {size}")
    return list(zip(*[iter(numbers)] * size, strict=True))


def _pairs(places: list[Any], values: list[float]) -> list[tuple[Any, float]]:
    if len(places) != len(values):
        raise WireError(f"{len(values)} logit biases for {len(places)} places; the counts must be equal")
    return list(zip(places, values, strict=True))
