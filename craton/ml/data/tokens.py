"""Pre-training rows from token shards: windows of the token stream in shuffled order, and mixtures of such sources.

Window w is tokens [w · sequence, (w + 1) · sequence] of the stream, so every token is a label once per epoch and only
the last incomplete window is dropped. With `pack` (sequence packing), documents in a row stay separate; without it, the
row counts as one document.
"""

from __future__ import annotations

from collections.abc import Sequence

from craton.ml.data.errors import DataError
from craton.ml.data.order import Turns, shuffled
from craton.ml.data.sample import Sample, Source, window
from craton.ml.data.shards import Shards


class TokenSource:
    """Windows of a folder of token shards. `vocab` is the model's; ids beyond it raise an error."""

    def __init__(self, shards: Shards, sequence: int, seed: int, pack: bool = True, vocab: int | None = None) -> None:
        if shards.tokens <= sequence:
            raise DataError(
                f"{shards.folder}: has {shards.tokens:,} tokens, too few for one sample of data.sequence {sequence:,} "
                "and the token after it; use more text or a shorter data.sequence"
            )
        if vocab is not None:
            shards.check_vocabulary(vocab)
        self.shards = shards
        self.sequence = sequence
        self.epoch_samples = (shards.tokens - 1) // sequence
        self._seed, self._pack, self._vocab = seed, pack, vocab

    def sample(self, index: int) -> Sample:
        start = shuffled(index, self.epoch_samples, self._seed) * self.sequence
        stop = start + self.sequence + 1
        tokens = self.shards.read(start, stop, self._vocab)
        return window(tokens, self.shards.boundaries(start, stop) if self._pack else None)


class Mixture:
    """Several sources, each with its share of the samples; every source keeps its own order."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]) -> None:
        assert len(sources) == len(weights) > 0
        lengths = {source.sequence for source in sources}
        assert len(lengths) == 1, f"sources of one mixture must have the same sequence length, not {lengths}"
        self.sources = tuple(sources)
        self.sequence = sources[0].sequence
        self._turns = Turns(weights)
        known = [source.epoch_samples for source in sources if source.epoch_samples is not None]
        self.epoch_samples = sum(known) if len(known) == len(sources) else None

    def sample(self, index: int) -> Sample:
        number, within = self._turns(index)
        return self.sources[number].sample(within)
