"""What a tokenizer worker does with a piece of the input: documents to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from craton.ml.data.documents import DocumentChunk, texts_of
from craton.ml.data.tokenizer import end_of_document, load_tokenizer


@dataclass(frozen=True)
class Encoded:
    """The documents of one task, in the order of the input."""

    tokens: NDArray[np.uint32]
    ends: NDArray[np.int64]  # of the documents that end here; the rest continues in the next task
    text_bytes: int
    loss: NDArray[np.uint8] | None = None  # loss mask of chats and pairs: 1 where a token is learnt
    left_out: tuple[str, ...] = ()  # skipped files that are not UTF-8
    dropped: tuple[str, ...] = ()  # skipped rows of pairs: `file:line: why`


class TextEncoder:
    """Encodes texts as ids, each followed by the tokenizer's end-of-text id if it has one."""

    def __init__(self, folder: Path, field: str) -> None:
        self._tokenizer = load_tokenizer(folder)
        self._end = end_of_document(folder, self._tokenizer)
        self._field = field

    def __call__(self, pieces: Sequence[DocumentChunk]) -> Encoded:
        texts, begins, ends, left_out, text_bytes = [], [], [], [], 0
        for piece in pieces:
            chunk_texts = texts_of(piece, self._field)
            if piece.kind == "text" and not chunk_texts:
                left_out.append(piece.name)
                continue
            texts += chunk_texts
            begins += [piece.first] * len(chunk_texts)
            ends += [piece.last] * len(chunk_texts)
            text_bytes += len(piece.data) if piece.kind == "text" else sum(len(text.encode()) for text in chunk_texts)
        return self._join(self._encode(texts, begins), ends, text_bytes, tuple(left_out))

    def _encode(self, texts: list[str], begins: list[bool]) -> list[list[int]]:
        """Return the ids of each text; only the beginning of a document gets the tokenizer's prefix tokens."""
        if all(begins):
            return [item.ids for item in self._tokenizer.encode_batch_fast(texts)]
        return [
            self._tokenizer.encode(text, add_special_tokens=begin).ids
            for text, begin in zip(texts, begins, strict=True)
        ]

    def _join(self, ids: list[list[int]], ends: list[bool], text_bytes: int, left_out: tuple[str, ...]) -> Encoded:
        parts: list[list[int]] = []
        places: list[int] = []
        length = 0
        for document, ended in zip(ids, ends, strict=True):
            if ended and self._end is not None and (not document or document[-1] != self._end):
                document.append(self._end)
            if document:
                parts.append(document)
                length += len(document)
            if ended and length > (places[-1] if places else 0):
                places.append(length)
        tokens = np.concatenate([np.array(part, np.uint32) for part in parts]) if parts else np.zeros(0, np.uint32)
        return Encoded(tokens, np.array(places, np.int64), text_bytes, left_out=left_out)
