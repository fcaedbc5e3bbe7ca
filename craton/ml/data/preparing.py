"""From a job to its samples: tokenize raw text once and cache it, then open the same shards in every rank.

`prepare` runs before the ranks and may take minutes. `open_source` runs in each rank and only opens files that
`prepare` has already opened once. The cache key is the names, sizes and times of the input files and the tokenizer, so
changed text is tokenized again. Data at an s3:// URL is read through a mirror on each machine: shards are fetched one
by one when they are read, text at once. A validation path that is also a training path holds out 1% of its documents.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from craton.formatting import counted
from craton.job import Job
from craton.job.sections import MIN_BPE_VOCABULARY
from craton.ml.data.chat import template_of
from craton.ml.data.conversations import ChatSource
from craton.ml.data.documents import STANDARD_LIBRARY, find_files
from craton.ml.data.errors import DataError
from craton.ml.data.function import FunctionSource
from craton.ml.data.order import key_of
from craton.ml.data.pair_rows import PairEncoder, check_columns
from craton.ml.data.pairs import PairedSource, PairFunction, PairSource
from craton.ml.data.prompts import PromptEncoder, PromptFunction, PromptMixture, PromptRows, PromptSource, write_prompts
from craton.ml.data.sample import Source
from craton.ml.data.shards import FORMAT, INDEX, SHARD_SUFFIXES, ShardKind, Shards, is_shard_folder
from craton.ml.data.tokenizer import TOKENIZER, check_same_tokenizer, find_tokenizer, mark_of, mirror_tokenizer
from craton.ml.data.tokenizing import VALIDATION, Progress, Tokenized, tokenize, train_tokenizer
from craton.ml.data.tokens import Mixture, TokenSource
from craton.ml.functions import search_folder
from craton.remote import is_url

HELD_OUT_SHARE = 0.01

SHARD_KINDS: dict[str, ShardKind] = {"sft": "chat", "dpo": "pair"}  # by the kind of the job; others: text

Split = Literal["train", "validation"]

logger = logging.getLogger("craton.data")


def prepare(job: Job, cache: Path | None = None, progress: Progress | None = None) -> dict[str, Path]:
    """Tokenize what is not tokenized yet. Returns the folder of shards for each path under `data:`, after checking that
    all of them fit the job's model. A job that starts from the weights of another one shares its tokenizer, which may
    be trained with the data of that one."""
    if job.weights_job is not None and job.data.tokenizer is None and has_data(job.weights_job):
        prepare(job.weights_job, cache, progress)
    places = _Places.of_job(job, cache or default_cache())
    if places.trains_tokenizer and not (places.tokenizer / TOKENIZER).is_file():
        raw = [places.local(path) for path in places.training if path in places.raw]
        train_tokenizer(raw, places.bpe_vocabulary, places.tokenizer, progress=progress)
    shape = job.model_shape
    for path in places.raw:
        folder = places.folder(path)
        if is_shard_folder(folder):
            continue
        if shape is not None:
            _check_vocabulary_before(places.tokenizer, shape.vocab)
        share = HELD_OUT_SHARE if path in places.held_out else 0.0
        if job.kind == "grpo":
            write_prompts(places.local(path), folder, places.tokenizer, job.data.columns, share)
            continue
        done = tokenize(
            [places.local(path)],
            folder,
            tokenizer=places.tokenizer,
            validation=share,
            progress=progress,
            kind=places.kind,
            columns=job.data.columns,
        )
        _say_left_out(path, done)
    folders = {path: places.folder(path) for path in (*places.training, *places.validation)}
    _check_tokenizers(job, folders, places)
    if places.kind != "text":
        _say_rows(job, folders)
    open_data = open_prompts if job.kind == "grpo" else open_source
    if places.training:  # report errors before the ranks start
        open_data(job, "train", folders)
    if places.validation and job.validates:
        open_data(job, "validation", folders)
    if job.kind == "dpo" and not places.training:
        search_folder(job.folder)
        open_source(job).sample(0)
    return folders


def has_data(job: Job) -> bool:
    """Whether the job names data, files or a function; else it cannot be prepared."""
    return bool(job.data.mixture) or job.data.source is not None


def open_source(
    job: Job, split: Split = "train", paths: Mapping[str, Path] | None = None, vocab: int | None = None
) -> Source:
    """Open the samples of a job. `paths` is what `prepare` returned, by default what it would find now. `vocab` is the
    model's, for models whose shape is not in the job."""
    shape = job.model_shape
    vocab = vocab or (shape.vocab if shape else None)
    parts = job.data.mixture if split == "train" else job.data.validation_mixture
    if job.kind == "dpo":
        pairs, weights = open_pairs(job, split, paths, vocab)
        return pairs[0] if len(pairs) == 1 else Mixture(pairs, weights)
    if job.data.source and not parts:
        return FunctionSource.of_job(job, split, vocab, tokenizer_folder(job))
    make = ChatSource if job.kind == "sft" else TokenSource
    sources: list[Source] = [make(*opened, job.data.pack, vocab) for opened in _open_parts(job, split, paths)]
    if len(sources) == 1:
        return sources[0]
    return Mixture(sources, [weight for _, weight in parts])


def open_pairs(
    job: Job, split: Split = "train", paths: Mapping[str, Path] | None = None, vocab: int | None = None
) -> tuple[list[PairedSource], list[float]]:
    """Open the pairs of a job of kind dpo, like `open_source`: each source of the mixture, and its weight."""
    parts = job.data.mixture if split == "train" else job.data.validation_mixture
    if job.data.source and not parts:
        folder = tokenizer_folder(job)
        if folder is None:
            raise DataError(f"data.source {job.data.source} gives texts; set data.tokenizer to the model's tokenizer")
        return [PairFunction.of_job(job, split, PairEncoder(folder, job.data.columns), vocab)], [1.0]
    sources = [PairSource(*opened, job.data.pack, vocab) for opened in _open_parts(job, split, paths)]
    slots = max(source.slots for source in sources)
    for source in sources:
        source.slots = slots  # rows of one batch have the same shapes
    return list(sources), [weight for _, weight in parts]


def open_prompts(
    job: Job, split: Split = "train", paths: Mapping[str, Path] | None = None, vocab: int | None = None
) -> PromptSource:
    """Open the prompts of a job of kind grpo, like `open_source`. Prompts without room for a completion are left
    out."""
    shape = job.model_shape
    vocab = vocab or (shape.vocab if shape else None)
    parts = job.data.mixture if split == "train" else job.data.validation_mixture
    max_tokens = job.sequence - job.max_completion_tokens
    if job.data.source and not parts:
        folder = tokenizer_folder(job)
        if folder is None:
            raise DataError(f"data.source {job.data.source} gives texts; set data.tokenizer to the model's tokenizer")
        return PromptFunction.of_job(job, split, PromptEncoder(folder), max_tokens)
    if not parts:
        raise DataError(f"the job has no data.{'path' if split == 'train' else 'validation'}; set it")
    assert job.train is not None, f"kind {job.kind} does not train"
    folders = paths if paths is not None else _found(job)
    sources: list[PromptSource] = []
    for number, (path, _) in enumerate(parts):
        folder = Path(folders[path])
        if split == "validation" and path in dict(job.data.mixture):
            folder = _held_out(folder, path)
        rows = PromptRows(folder, key_of(job.train.seed, number), max_tokens, vocab, source=path)
        if rows.left_out and paths is not None:  # said once, before the ranks start
            logger.warning("%s: %d prompts are longer than %d tokens and left out", path, rows.left_out, max_tokens)
        sources.append(rows)
    return sources[0] if len(sources) == 1 else PromptMixture(sources, [weight for _, weight in parts])


def _open_parts(job: Job, split: Split, paths: Mapping[str, Path] | None) -> Iterator[tuple[Shards, int, int]]:
    """Yield the shards, the sequence length and the seed of each part of the mixture."""
    parts = job.data.mixture if split == "train" else job.data.validation_mixture
    if not parts:
        raise DataError(f"the job has no data.{'path' if split == 'train' else 'validation'}; set it")
    assert job.train is not None, f"kind {job.kind} does not train"
    folders = paths if paths is not None else _found(job)
    for number, (path, _) in enumerate(parts):
        folder = Path(folders[path])
        if split == "validation" and path in dict(job.data.mixture):
            folder = _held_out(folder, path)
        yield Shards(folder), job.sequence, key_of(job.train.seed, number)


def tokenizer_folder(job: Job, paths: Mapping[str, Path] | None = None) -> Path | None:
    """Return the folder of the tokenizer of a job's data. For a user's own source, the one that the job names, else the
    model's, if there is one."""
    if job.data.source is not None and not job.data.mixture:
        places = _Places.of_job(job, default_cache())
        named = places.tokenizer if places.tokenizer_name else None
        return named if named is not None and (named / TOKENIZER).is_file() else None
    folders = paths if paths is not None else _found(job) if job.data.mixture else {}
    return next((Path(folder) for folder in folders.values() if (Path(folder) / TOKENIZER).is_file()), None)


def tokenizer_of_run(job: Job, run: Path) -> Path | None:
    """Return the folder of the tokenizer of a run in this directory: the one kept there, else that of its data, its
    model or its job; None without any."""
    kept = run / "tokenizer"
    if kept.is_dir():
        return find_tokenizer(str(kept))
    found = tokenizer_folder(job) or model_tokenizer(job)
    if found is None and job.data.tokenizer is not None:
        found = find_tokenizer(job.data.tokenizer)
    return found


def default_cache() -> Path:
    """Return CRATON_CACHE, else the system's cache folder."""
    if cache := os.environ.get("CRATON_CACHE"):
        return Path(cache).expanduser() / "data"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "craton" / "data"


@dataclass(frozen=True)
class _Places:
    """Where all data of a job is or will be; computed without reading any of it."""

    cache: Path
    kind: ShardKind
    training: tuple[str, ...]
    validation: tuple[str, ...]
    raw: Mapping[str, str]  # path -> key of its files
    tokenizer_name: str | None
    mirrors: Mapping[str, str]  # URL -> the local folder that mirrors it
    columns: Mapping[str, str]  # field of a row -> its name in the files

    @classmethod
    def of_job(cls, job: Job, cache: Path) -> _Places:
        training = tuple(path for path, _ in job.data.mixture)
        validation = tuple(path for path, _ in job.data.validation_mixture)
        mirrors = {path: _mirror(path) for path in dict.fromkeys((*training, *validation)) if is_url(path)}
        raw = {
            path: _files_key(mirrors.get(path, path))
            for path in dict.fromkeys((*training, *validation))
            if not _is_shards(mirrors.get(path, path))
        }
        kind = SHARD_KINDS.get(job.kind, "text")
        if kind == "pair":
            check_columns(job.data.columns)
        folder = model_tokenizer(job)
        name = job.data.tokenizer or (str(folder) if folder else None)
        if raw and name is None:
            raise DataError(
                f"{next(iter(raw))}: is raw text, but no tokenizer is set; set data.tokenizer to a folder with a "
                f"{TOKENIZER}, a Hub id, or bpe:4096 to train one on the text"
            )
        is_bytes = job.data.source is not None and not training and name == f"bpe:{MIN_BPE_VOCABULARY}"
        if name and name.startswith("bpe:") and not is_bytes and not any(path in raw for path in training):
            if job.data.source is not None:
                raise DataError(
                    f"data.tokenizer {name} would be trained on text, but data.source gives its texts later; write "
                    f"bpe:{MIN_BPE_VOCABULARY}, which has only bytes, or give a folder"
                )
            raise DataError(
                f"data.tokenizer {name} would be trained on raw text, but data.path holds token shards; remove it: the "
                "shards include their tokenizer"
            )
        if name and name.startswith("bpe:") and (kind != "text" or job.kind == "grpo"):
            raise DataError(
                f"data.tokenizer {name}: {job.kind} needs the tokenizer of the model it fine-tunes; give its folder"
            )
        return cls(cache, kind, training, validation, raw, name, mirrors, job.data.columns)

    @property
    def held_out(self) -> tuple[str, ...]:
        return tuple(path for path in self.validation if path in self.training)

    @property
    def trains_tokenizer(self) -> bool:
        return self.tokenizer_name is not None and self.tokenizer_name.startswith("bpe:")

    @property
    def bpe_vocabulary(self) -> int:
        assert self.tokenizer_name is not None
        return int(self.tokenizer_name.removeprefix("bpe:"))

    @property
    def tokenizer(self) -> Path:
        """Return the folder of the tokenizer; a trained one is named by its size and its training text."""
        assert self.tokenizer_name is not None
        if not self.trains_tokenizer:
            return find_tokenizer(self.tokenizer_name)
        texts = [self.raw[path] for path in self.training if path in self.raw]
        return self.cache / f"bpe-{self.bpe_vocabulary}-{_key(FORMAT, texts)}"

    def local(self, path: str) -> str:
        return self.mirrors.get(path, path)

    def folder(self, path: str) -> Path:
        if path not in self.raw:
            return Path(self.local(path))
        if self.trains_tokenizer:
            tokenizer = self.tokenizer.name
        else:
            tokenizer = hashlib.sha256((self.tokenizer / TOKENIZER).read_bytes()).hexdigest()
        more: list[object] = [dict(self.columns)] if self.columns else []
        if self.kind == "pair":  # texts with a prompt are rendered if there is a template
            more += [template_of(self.tokenizer)]
        key = _key(FORMAT, self.kind, self.raw[path], tokenizer, path in self.held_out, *more)
        return self.cache / f"{Path(path).name.split('.')[0]}-{key}"


def model_tokenizer(job: Job) -> Path | None:
    """Return the folder of the tokenizer beside the job's model, if there is one on this machine."""
    if job.weights_job is not None:
        return _tokenizer_of(job.weights_job)
    if not isinstance(job.model, str):
        return None
    if is_url(job.model):
        folder = mirror_tokenizer(job.model)
        return folder if (folder / TOKENIZER).is_file() else None
    path = Path(job.model)
    if path.exists():
        folder = path if path.is_dir() else path.parent
        return folder if (folder / TOKENIZER).is_file() else None
    if job.model.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(job.model, TOKENIZER)
    return Path(cached).parent if isinstance(cached, str) else None


def check_other_model(job: Job, folder: str, key: str) -> None:
    """Raise DataError if a folder has no model, or one with another tokenizer than the job's data: a teacher, a
    reference or a reward model reads the policy's token ids."""
    if not (Path(folder) / "config.json").is_file():
        raise DataError(f"{key}: {folder} has no config.json; give the folder of a model in Hugging Face format")
    own = tokenizer_folder(job)
    if own is not None and (Path(folder) / TOKENIZER).is_file():
        check_same_tokenizer(mark_of(own), own, Path(folder), f"that of {key}")


def prepared_folders(job: Job) -> dict[str, Path] | None:
    """Return the folders of a job's tokens, as `prepare` would; None if they are not tokenized yet."""
    try:
        return _found(job)
    except (DataError, OSError):
        return None


def _tokenizer_of(trained: Job) -> Path | None:
    """Return the folder of the tokenizer with which a job trains; None if this machine does not have it."""
    name = trained.data.tokenizer
    if name is not None and not name.startswith("bpe:"):
        return find_tokenizer(name)
    folders = prepared_folders(trained) if trained.data.mixture else {}
    return tokenizer_folder(trained, folders or {}) or model_tokenizer(trained)


def _found(job: Job) -> dict[str, Path]:
    """Return the folders of a prepared job."""
    places = _Places.of_job(job, default_cache())
    folders = {path: places.folder(path) for path in (*places.training, *places.validation)}
    for path, folder in folders.items():
        if not is_shard_folder(folder):
            raise DataError(
                f"{path}: is not tokenized yet, or has changed since; `craton run` tokenizes it before it starts, "
                "craton.ml.data.prepare(job) does only that"
            )
    return folders


def _held_out(folder: Path, path: str) -> Path:
    if is_shard_folder(folder / VALIDATION):
        return folder / VALIDATION
    raise DataError(
        f"data.validation {path} is the training data, but none of its documents were held out (there were too few, or "
        "the shards were made without --validation); run `craton data tokenize --validation 0.1`, or use other data"
    )


def _check_tokenizers(job: Job, folders: Mapping[str, Path], places: _Places) -> None:
    """Check that one tokenizer made all shards, that it is the model's, and that it fits the model's vocabulary."""
    opened = [Shards(folder) for folder in folders.values()]
    shape = job.model_shape
    beside = model_tokenizer(job)
    # A model that starts from random weights may use any tokenizer that the job names.
    must_match = beside is not None and (
        job.data.tokenizer is None or job.weights_job is not None or job.weights_folder is not None
    )
    for shards in opened:
        mark, first = shards.index.tokenizer, opened[0].index.tokenizer
        if mark.fingerprint != first.fingerprint:
            raise DataError(
                f"{shards.folder}: made with tokenizer {mark.name}, but {opened[0].folder} with {first.name}; a job "
                "needs a single tokenizer: tokenize one of them again"
            )
        if must_match:
            assert beside is not None
            check_same_tokenizer(mark, shards.folder, beside, "the one beside the model")
        if shape is not None:
            shards.check_vocabulary(shape.vocab, f"model {shape.name}")
        if places.tokenizer_name and not places.trains_tokenizer:
            check_same_tokenizer(mark, shards.folder, places.tokenizer, "data.tokenizer")


def _check_vocabulary_before(tokenizer: Path, vocab: int) -> None:
    mark = mark_of(tokenizer)
    if mark.vocab_size > vocab:
        raise DataError(
            f"tokenizer {tokenizer} has {mark.vocab_size:,} ids, but the model has a vocabulary of {vocab:,}; use "
            "the model's own tokenizer, or a model with a larger `vocab`"
        )


def _say_left_out(path: str, done: Tokenized) -> None:
    if done.dropped:
        logger.warning("%s: left out %s, e.g. %s", path, counted(done.dropped, "row"), done.first_dropped)
    if done.left_out and path != STANDARD_LIBRARY:
        logger.warning("%s: skipped %d files that are not UTF-8, e.g. %s", path, len(done.left_out), done.left_out[0])


def _say_rows(job: Job, folders: Mapping[str, Path]) -> None:
    """Plan the packed rows for every rank, and warn about conversations and pairs that do not fit."""
    make, noun = (PairSource, "pairs") if job.kind == "dpo" else (ChatSource, "conversations")
    for path, folder in folders.items():
        rows = make(Shards(folder), job.sequence, 0, job.data.pack).rows
        for count, outcome in ((rows.truncated, "truncated to"), (rows.dropped, "dropped: nothing to learn within")):
            if count:
                logger.warning("%s: %d %s %s data.sequence %d", path, count, noun, outcome, job.sequence)


def _mirror(url: str) -> str:
    """Return the local mirror of a URL: for shards everything but the token files, otherwise everything."""
    from craton.infrastructure.storage import CachedFolder

    folder = CachedFolder(url)
    is_shards = INDEX in folder.listing and is_shard_folder(folder.path(INDEX).parent)
    return str(folder.mirror(lambda name: not (is_shards and name.endswith(SHARD_SUFFIXES))))


def _is_shards(path: str) -> bool:
    return path != STANDARD_LIBRARY and Path(path).is_dir() and is_shard_folder(Path(path))


def _files_key(path: str) -> str:
    files = [(str(file.path), file.size, file.path.stat().st_mtime_ns) for file in find_files([path])]
    return _key(files)


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
