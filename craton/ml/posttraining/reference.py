"""Reference log-probabilities of preference pairs: computed once, before the first step, and kept.

All ranks compute them together, in the layout that they train in, only for pairs that the run will see. Rank 0 reads
and writes the files and passes the values on. The run directory has a copy, so a recovered or resumed run goes on with
exactly the same values; another one beside the shards serves later runs with the same weights and rows. A file that is
torn, of other pairs or of other weights is ignored.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from craton.formatting import counted, duration, percent
from craton.job import Job
from craton.ml.data import PairedSource, Sample
from craton.ml.posttraining.frozen import frozen_model
from craton.ml.posttraining.objectives import Pairs
from craton.ml.training import Batch, Objective, SetupError, TrainingSetup, evaluate, without_adapters
from craton.ml.training.parallel import Pipeline, Ranks
from craton.telemetry.files import replace_bytes

CHUNK_BATCHES = 8  # micro-batches of a rank between two signs of progress
PROGRESS_SECONDS = 2.0  # between two lines
FORMAT = 1

Values = NDArray[np.float32]  # [pairs, 2]: sums of log p over the chosen and the rejected completion; NaN: unknown


@dataclass(frozen=True)
class Wanted:
    """The pairs of a source that need values: those of its first samples."""

    name: str  # in the run directory
    source: PairedSource
    samples: int

    @property
    def indices(self) -> range:
        whole = self.source.epoch_samples
        return range(self.samples if whole is None else min(self.samples, whole))


def attach_references(setup: TrainingSetup, wanted: Sequence[Wanted]) -> None:
    """Give every source the reference log-probabilities of its pairs. All ranks call it."""
    reader: PairReader | None = None
    for item in wanted:
        source, files = item.source, reference_files(setup, item)
        size = source.num_pairs(item.samples)
        read = read_first(files, size, source.mark) if setup.ranks.rank == 0 else np.zeros((size, 2), np.float32)
        known = _summed(setup.ranks, torch.from_numpy(read))
        missing = [index for index in item.indices if np.isnan(known[source.pair_numbers(index)]).any()]
        if missing:
            reader = reader or PairReader(setup)
            known = np.where(np.isnan(known), reader.read(source, missing, size), known)
        if setup.ranks.rank == 0:
            for path in files:
                write_values(path, known, source.mark)
        source.reference = known


def reference_files(setup: TrainingSetup, item: Wanted) -> list[Path]:
    """Where the values of a source are kept: in the run directory, and beside its shards."""
    files = [setup.directory.path / "reference" / f"{item.name}.values"]
    folder = item.source.cache_folder
    return files if folder is None else [*files, folder / f"reference-{weights_key(setup.job)}.values"]


def weights_key(job: Job) -> str:
    """Identify the reference's weights, and the precision in which they compute."""
    assert job.train is not None
    assert job.preference is not None
    named = job.preference.reference_model
    folder = job.weights_folder if named == "start" else Path(named or "")
    if folder is not None:
        paths = sorted((*folder.glob("*.safetensors"), *folder.glob("config.json")))
        marks: list[object] = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        marks.append(str(folder))
    elif job.trained_run is not None:
        job_file = job.trained_run / "job.yaml"
        last = job.weights_job.steps if job.weights_job is not None else None
        marks = [str(job.trained_run), last, job_file.stat().st_mtime_ns if job_file.is_file() else 0]
    else:
        marks = [str(job.model_shape or job.model), job.train.seed]
    return hashlib.sha256(json.dumps([job.precision, *marks]).encode()).hexdigest()[:16]


class PairReader:
    """Computes log-probabilities of pairs with the reference's weights."""

    def __init__(self, setup: TrainingSetup) -> None:
        preference, ranks = setup.job.preference, setup.ranks
        assert preference is not None
        named = preference.reference_model
        if named == "start" and setup.missing_weights:
            raise SetupError(f"the reference log-probabilities are not kept any more: {setup.missing_weights}")
        self._setup = setup
        self._model = setup.model if named == "start" else frozen_model(setup, named)
        self._objective = Objective("reference", self._note)
        self._pipeline = Pipeline(self._model, ranks, self._objective) if ranks.pipeline else None
        self._found = torch.zeros(0, 2)

    def read(self, source: PairedSource, indices: Sequence[int], size: int) -> Values:
        """Return the values of the pairs of these samples, the same on every rank; NaN for all others."""
        ranks, clock = self._setup.ranks, self._setup.clock
        self._found = torch.full((size, 2), torch.nan, device=ranks.device)
        chunk = CHUNK_BATCHES * ranks.data_world * ranks.layout.micro_batch * ranks.layout.pp
        started = said = time.monotonic()
        for first in range(0, len(indices), chunk):
            part = _NumberedPairs(source, indices[first : first + chunk])
            with without_adapters(self._model):
                evaluate.evaluate(self._model, part, self._objective, ranks, len(part.indices), self._pipeline)
            clock.page.beat()
            clock.page.spring()
            if ranks.rank == 0 and time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                done = min(1.0, (first + chunk) / len(indices))
                print(f"reference log-probabilities: {percent(done)} after {duration(said - started)}", flush=True)
        is_counted = ranks.counts_loss and ranks.place["cp"] == 0
        is_known = ~torch.isnan(self._found) & is_counted
        values = _summed(ranks, torch.where(is_known, self._found, 0.0))
        times = _summed(ranks, is_known.float())
        if ranks.rank == 0:
            pairs, seconds = int((times[:, 0] > 0).sum()), time.monotonic() - started
            self._setup.recorder.event("reference", pairs=pairs, seconds=round(seconds, 3))
            if seconds > PROGRESS_SECONDS:
                print(f"reference log-probabilities of {counted(pairs, 'pair')}: {duration(seconds)}", flush=True)
        with np.errstate(invalid="ignore"):
            return np.where(times > 0, values / times, np.nan).astype(np.float32)

    def _note(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Keep the sums of a batch's pairs; as an objective, it has no loss."""
        pairs = Pairs.of(log_probs * batch.weight, batch)
        exists = pairs.exists > 0.5  # padding rows have none
        sums = torch.stack((pairs.chosen, pairs.rejected), dim=-1)
        self._found[batch.extra["pair_number"][exists]] = sums[exists].to(self._found.dtype)
        return 0.0 * log_probs.sum(), {}


@dataclass(frozen=True)
class _NumberedPairs:
    """Some samples of a source, with the numbers of their pairs."""

    source: PairedSource
    indices: Sequence[int]
    epoch_samples: int | None = None

    @property
    def sequence(self) -> int:
        return self.source.sequence

    def sample(self, place: int) -> Sample:
        index = self.indices[place]
        sample, numbers = self.source.sample(index), self.source.pair_numbers(index)
        padded = np.full(self.source.slots, -1, np.int64)
        padded[: len(numbers)] = numbers
        return replace(sample, extra={**sample.extra, "pair_number": padded})


def read_first(files: Sequence[Path], size: int, mark: NDArray[np.uint64]) -> Values:
    """Return the values of the first sound file, which may have fewer; all unknown if there is none."""
    result = np.full((size, 2), np.nan, np.float32)
    for path in files:
        with suppress(OSError, ValueError, KeyError, TypeError):
            header, _, data = path.read_bytes().partition(b"\n")
            about = json.loads(header)
            is_sound = about["crc32"] == zlib.crc32(data) and about["mark"] == mark.tolist()
            values = np.frombuffer(data, "<f4").reshape(-1, 2)
            if is_sound and about["format"] == FORMAT:
                result[: len(values)] = values[:size]
                break
    return result


def write_values(path: Path, values: Values, mark: NDArray[np.uint64]) -> None:
    """Write a file, unless it holds the same; a folder that is not writable keeps none."""
    data = values.astype("<f4").tobytes()
    header = json.dumps({"format": FORMAT, "crc32": zlib.crc32(data), "mark": mark.tolist()}).encode()
    with suppress(OSError):
        if path.is_file() and path.read_bytes() == header + b"\n" + data:
            return
        path.parent.mkdir(exist_ok=True)
        replace_bytes(path, header + b"\n" + data)


def _summed(ranks: Ranks, values: Tensor) -> Values:
    """Sum over ranks; those that do not count pass zeros."""
    summed: Values = ranks.sum(values.to(ranks.device, torch.float32, copy=True)).cpu().numpy()
    return summed
