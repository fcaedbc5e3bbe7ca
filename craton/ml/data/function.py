"""A user's own data source: `data.source: package.module:function`.

`function(job)` returns a callable that gives the sample of a global index: a `Sample`, a mapping of arrays with
`tokens` and others, or up to `sequence` + 1 token ids. If the job has a tokenizer, also a text, or a mapping of
`prompt` and `completion`, of which only the completion is learnt. A function with a `split` parameter is also called
for "validation". Errors name the function and the index.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from craton.job import Job
from craton.ml.data.errors import DataError
from craton.ml.data.indexed_function import IndexedFunction
from craton.ml.data.sample import IGNORED, Sample
from craton.ml.data.tokenizer import end_of_document, load_tokenizer

_OWN = {"tokens": np.int64, "labels": np.int64, "positions": np.int64, "weight": np.float32, "documents": np.int32}


class FunctionSource:
    """Samples of a user's callable, validated."""

    epoch_samples = None

    def __init__(
        self,
        function: IndexedFunction,
        sequence: int,
        vocab: int | None = None,
        tokenizer: Path | None = None,
    ) -> None:
        self.sequence = sequence
        self._function, self._vocab = function, vocab
        self._tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
        self._end = None if tokenizer is None else end_of_document(tokenizer, load_tokenizer(tokenizer))

    @classmethod
    def of_job(cls, job: Job, split: str, vocab: int | None, tokenizer: Path | None = None) -> FunctionSource:
        function = IndexedFunction.of_job(job, split, "sample", "lambda index: rows[index % len(rows)]")
        return cls(function, job.sequence, vocab, tokenizer)

    def sample(self, index: int) -> Sample:
        answer = self._function(index)
        try:
            sample = self._sample(answer)
            self._check(sample)
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(f"{self._function.place(index)} {error}") from error
        return sample

    def _sample(self, answer: Any) -> Sample:
        if isinstance(answer, Sample):
            return answer
        if isinstance(answer, str):
            return self._from_ids(self._encoded(answer), {})
        if isinstance(answer, Mapping) and set(answer) == {"prompt", "completion"}:
            return self._completion(str(answer["prompt"]), str(answer["completion"]))
        if not isinstance(answer, Mapping):
            return self._from_ids(_ids(answer), {})
        arrays = {str(name): np.asarray(value) for name, value in answer.items()}
        if "tokens" not in arrays:
            raise ValueError(f"has no 'tokens', only {sorted(arrays)}")
        extra = {name: array for name, array in arrays.items() if name not in _OWN}
        if "labels" not in arrays:
            if own := set(arrays) & {"positions", "weight", "documents"}:
                raise ValueError(f"has {sorted(own)} but no 'labels'; give labels too, each the token after its token")
            return self._from_ids(_ids(arrays["tokens"]), extra)
        own_arrays = {name: arrays[name].astype(kind) for name, kind in _OWN.items() if name in arrays}
        own_arrays.setdefault("positions", np.arange(self.sequence))
        own_arrays.setdefault("weight", (own_arrays["labels"] != IGNORED).astype(np.float32))
        return Sample(**own_arrays, extra=extra)

    def _completion(self, prompt: str, completion: str) -> Sample:
        """Return the sample of a prompt with its completion, which alone is learnt."""
        before, after = self._encoded(prompt, is_whole=False), self._encoded(completion, begins=False)
        sample = self._from_ids(np.concatenate((before, after)), {})
        sample.labels[: len(before) - 1] = IGNORED
        sample.weight[: len(before) - 1] = 0.0
        return sample

    def _encoded(self, text: str, begins: bool = True, is_whole: bool = True) -> NDArray[np.int64]:
        """Return the ids of a text: `begins` a document, and `is_whole` to its end, with the end-of-text token."""
        if self._tokenizer is None:
            raise TypeError("is a text; set data.tokenizer: a folder, a Hub id, or bpe:259, which has only bytes")
        ids = self._tokenizer.encode(text, add_special_tokens=begins).ids
        return np.array([*ids, self._end] if is_whole and self._end is not None else ids, np.int64)

    def _from_ids(self, ids: NDArray[np.int64], extra: Mapping[str, NDArray]) -> Sample:
        """Split ids into tokens and labels; pad a short row with positions without loss."""
        if not 2 <= len(ids) <= self.sequence + 1:
            raise ValueError(
                f"has {len(ids)} token ids; allowed: 2 to {self.sequence + 1} (data.sequence and the token after)"
            )
        tokens = np.zeros(self.sequence, np.int64)
        labels = np.full(self.sequence, IGNORED, np.int64)
        tokens[: len(ids) - 1], labels[: len(ids) - 1] = ids[:-1], ids[1:]
        return Sample(
            tokens, labels, np.arange(self.sequence), (labels != IGNORED).astype(np.float32), extra=dict(extra)
        )

    def _check(self, sample: Sample) -> None:
        for name in _OWN:
            array = getattr(sample, name)
            if name == "documents" and array is None:
                continue
            if np.shape(array) != (self.sequence,):
                raise ValueError(f"has {name} of shape {np.shape(array)}; needed: ({self.sequence},), data.sequence")
        limit = self._vocab or np.iinfo(np.int64).max
        for name, array in (("tokens", sample.tokens), ("labels", sample.labels[sample.labels != IGNORED])):
            wrong = np.flatnonzero((array < 0) | (array >= limit))
            if len(wrong):
                raise ValueError(
                    f"has token id {int(array[wrong[0]])} among its {name}, outside the vocabulary of {limit:,}"
                )


def _ids(answer: Any) -> NDArray[np.int64]:
    array = np.asarray(answer)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise TypeError(
            f"is {type(answer).__name__}{f' of {array.dtype}' if array.ndim else ''}; needed: a Sample, a mapping with "
            "'tokens', or a flat sequence of token ids"
        )
    return array.astype(np.int64)
