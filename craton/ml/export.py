"""Export a checkpoint as a Hugging Face folder: `python -m craton.ml.export RUN FOLDER [--step N] [--dtype bf16|fp32]`;
with `--adapters` only its LoRA adapters, in PEFT's format.

Reads a checkpoint of any number of ranks in one process and one tensor at a time, merges LoRA adapters into the
weights, and adds the tokenizer. The folder, local or at an s3:// URL, appears only when it is complete. If the run's
checkpoints also go to an object store, a copy is written there as exports/FOLDER.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from craton.errors import CratonError
from craton.infrastructure import StorageError
from craton.infrastructure.storage import copy_down, open_store
from craton.job import Job, load_job
from craton.job.layout import Layout
from craton.job.sections import place_of
from craton.ml.export_adapters import CONFIG as ADAPTER_CONFIG
from craton.ml.export_adapters import save_adapters
from craton.ml.models import (
    SCORE,
    Decoder,
    DecoderConfig,
    config_from_huggingface,
    config_of_job,
    load_weights,
    model_folder,
    save_folder,
)
from craton.ml.training.checkpoint import FoundStep, find_checkpoint, read_tensors, saved_steps
from craton.remote import is_url
from craton.telemetry import RunDirectory, find_run, read_json

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CONFIG = "config.json"  # a folder at a URL is complete when it has this
_PREFIX = "model."


class ExportError(CratonError):
    """The run has no model that can be opened or exported."""


@dataclass(frozen=True)
class RunModel:
    """The model of a run at one of its checkpoints."""

    run: RunDirectory
    job: Job
    step: int
    checkpoint: FoundStep

    @property
    def config(self) -> DecoderConfig:
        if self.job.model_shape is None:
            raise ExportError(
                f"run {self.run.name} trains {self.job.model}, which is not a Hugging Face decoder; its "
                f"weights are in {self.checkpoint}; read them with torch.distributed.checkpoint"
            )
        return config_of_job(self.job)

    def weights(self) -> Mapping[str, Tensor]:
        """Every weight by its name in the decoder, read on access."""
        assert self.job.train is not None
        if self.job.train.lora:
            return self.model(torch.device("cpu"), torch.float32).state_dict()
        return _SavedWeights(self.checkpoint)

    def adapters(self) -> dict[str, Tensor]:
        """The LoRA weights, by their names in the decoder, and the head of a reward model."""
        assert self.job.train is not None
        if not self.job.train.lora:
            raise ExportError(
                f"run {self.run.name} trains all weights, not adapters; export the model without --adapters"
            )
        saved = _SavedWeights(self.checkpoint)
        scored = () if self.config.has_token_head else (SCORE,)  # values of a policy are not published
        return {name: saved[name] for name in saved if name.endswith((".lora_a", ".lora_b")) or name in scored}

    def model(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The trained model, in one process."""
        assert self.job.train is not None
        if self.job.model_shape is not None and not self.job.train.lora:
            model: nn.Module = _empty_decoder(self.config, device, dtype)
            self._fill(dict(model.state_dict()))
            return model
        return self._model_of_training().to(device, dtype)

    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer that made the run's data."""
        from craton.ml.data import tokenizer_of_run

        result = tokenizer_of_run(self.job, self.run.path)
        if result is None:
            raise ExportError(
                f"run {self.run.name} has no tokenizer: neither its data nor its model has one; give one with "
                "--tokenizer FOLDER"
            )
        return result

    def _model_of_training(self) -> nn.Module:
        """The model as the training loop builds it: with user code, or with adapters, which are merged."""
        from craton.ml.functions import search_folder
        from craton.ml.training import build_model, merge_adapters
        from craton.ml.training.parallel import make_ranks

        assert self.job.train is not None
        plain = self.job.model_copy(update={"train": self.job.train.model_copy(update={"compile": False})})
        ranks = make_ranks(Layout(precision="fp32"), torch.device("cpu"), 0, 1)
        search_folder(self._job_folder())
        model = build_model(plain, ranks)
        saved = {name.removeprefix(_PREFIX) for name in self.checkpoint.shapes}
        self._fill({name: tensor for name, tensor in model.state_dict().items() if name in saved})
        merge_adapters(model)
        return model

    def _job_folder(self) -> Path:
        """The folder in which the run's ranks search for user code."""
        environment = read_json(self.run.launch_path).get("env") or {}
        return Path(environment.get("CRATON_JOB_FOLDER", "."))

    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        read_tensors(self.checkpoint, {_PREFIX + name: tensor for name, tensor in tensors.items()})


@dataclass(frozen=True)
class FolderModel:
    """A model in a Hugging Face folder or the Hub's local cache."""

    folder: Path
    step: None = None

    def model(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        model = _empty_decoder(config_from_huggingface(self.folder), device, dtype)
        load_weights(model, self.folder)
        return model

    def tokenizer_folder(self) -> Path:
        from craton.ml.data import find_tokenizer

        return find_tokenizer(str(self.folder))


def open_run(name: str, step: int | None = None) -> RunModel:
    """Open the model of a run, by name or path, at the given or else the latest checkpoint."""
    from craton.ml.training import tier_folders

    run = find_run(name)
    job = load_job(run.job_path)
    if job.train is None:
        raise ExportError(f"run {run.name} is of kind {job.kind}, which does not train a model")
    checkpoint = find_checkpoint(tier_folders(job, run), step)
    return RunModel(run, job, checkpoint.step, checkpoint)


def checkpoint_steps(name: str) -> list[int]:
    """Return the steps of a run's checkpoints."""
    from craton.ml.training import tier_folders

    run = find_run(name)
    return saved_steps(tier_folders(load_job(run.job_path), run))


def open_model(name: str, step: int | None = None) -> RunModel | FolderModel:
    """Open the model of a run, of a Hugging Face folder (local or at a URL), or of a Hub id."""
    if is_url(name):
        return FolderModel(model_folder(name))
    if (Path(name).expanduser() / "config.json").is_file():
        return FolderModel(Path(name).expanduser())
    try:
        return open_run(name, step)
    except CratonError as error:
        if "/" in name and not Path(name).exists():
            return FolderModel(model_folder(name))
        raise error


@dataclass(frozen=True)
class Exported:
    """Result of an export: the step, and where the copy of the folder is."""

    step: int
    copy: str | None


def export(
    run: str,
    folder: Path | str,
    step: int | None = None,
    dtype: str = "bf16",
    tokenizer: str | None = None,
    copy: bool = True,
) -> Exported:
    """Write the folder, and with `copy` also to the run's object tier, if it has one. Writes nothing if the URL, or the
    place of the copy, already holds a model."""
    from craton.ml.data import find_tokenizer

    opened = open_run(run, step)
    tokenizer_folder = find_tokenizer(tokenizer) if tokenizer else opened.tokenizer_folder()
    if is_url(folder):
        _check_place(str(folder))
        with TemporaryDirectory(dir=opened.run.path, prefix="export-") as staged:
            local = save_folder(
                opened.weights(), opened.config, Path(staged) / "model", tokenizer_folder, DTYPES[dtype]
            )
            copy_down(local, str(folder), seal=CONFIG)
        return Exported(opened.step, None)
    below = _object_place(opened) if copy else None
    target = f"{below}/exports/{Path(folder).resolve().name}" if below else None
    if target is not None:
        try:
            _check_place(target)
        except CratonError as error:
            raise ExportError(
                f"{folder} cannot be copied to the object tier: {error}; fix this, or export with --no-copy"
            ) from error
    save_folder(opened.weights(), opened.config, folder, tokenizer_folder, DTYPES[dtype])
    if target is None:
        return Exported(opened.step, None)
    try:
        copy_down(folder, target, seal=CONFIG)
    except StorageError as error:
        raise ExportError(
            f"{folder} is complete, but its copy failed: {error}; fix this, or export with --no-copy"
        ) from error
    return Exported(opened.step, target)


def export_adapters(run: str, folder: Path | str, step: int | None = None, dtype: str = "bf16") -> Exported:
    """Write the adapters of a run, locally or to a URL, to be served or loaded with their base model."""
    opened = open_run(run, step)
    tensors, lora = opened.adapters(), opened.job.train.lora if opened.job.train else None
    assert lora is not None
    base = opened.job.model if isinstance(opened.job.model, str) else ""
    if not is_url(folder):
        save_adapters(tensors, opened.config, lora, base, folder, DTYPES[dtype])
        return Exported(opened.step, None)
    _check_place(str(folder), ADAPTER_CONFIG)
    with TemporaryDirectory(dir=opened.run.path, prefix="export-") as staged:
        local = save_adapters(tensors, opened.config, lora, base, Path(staged) / "adapters", DTYPES[dtype])
        copy_down(local, str(folder), seal=ADAPTER_CONFIG)
    return Exported(opened.step, None)


def _check_place(url: str, seal: str = CONFIG) -> None:
    """Check before the work starts that the place is free and writable."""
    store = open_store(url)
    store.check_writable()
    if store.exists(seal):
        raise ExportError(f"{url}: already holds a model; remove it, or choose another place")


def _object_place(opened: RunModel) -> str | None:
    """The object-store prefix of the run's checkpoints, if it has one."""
    storage = opened.job.cluster.file.storage if opened.job.cluster.file else None
    places = [place_of(tier, storage, opened.run.path) for tier in opened.job.checkpoint.places]
    return next((place.place for place in places if place.is_url), None)


class _SavedWeights(Mapping[str, Tensor]):
    """The weights in a checkpoint, each read on access."""

    def __init__(self, checkpoint: FoundStep) -> None:
        self._checkpoint = checkpoint
        saved = checkpoint.shapes.items()
        self._shapes = {name.removeprefix(_PREFIX): shape for name, shape in saved if name.startswith(_PREFIX)}

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self._shapes[name]
        tensor = torch.empty(shape, dtype=dtype)
        read_tensors(self._checkpoint, {_PREFIX + name: tensor})
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _empty_decoder(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config)
    return model.to(dtype).to_empty(device=device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; exit code 2 on a user error."""
    parser = argparse.ArgumentParser(prog="python -m craton.ml.export", description="Write a Hugging Face folder.")
    parser.add_argument("run", metavar="RUN", help="name or directory of a run")
    parser.add_argument("folder", metavar="FOLDER", help="new folder to write, or an s3:// URL")
    parser.add_argument("--step", type=int, help="checkpoint step [default: latest]")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="weight dtype [default: bf16]")
    parser.add_argument("--tokenizer", help="tokenizer folder or Hub id [default: that of the run's data or model]")
    parser.add_argument("--adapters", action="store_true", help="export only the LoRA adapters, in PEFT's format")
    parser.add_argument("--no-copy", action="store_true", help="do not copy the folder to the run's object tier")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(arguments)
    try:
        if options.adapters:
            done = export_adapters(options.run, options.folder, options.step, options.dtype)
        else:
            done = export(
                options.run, options.folder, options.step, options.dtype, options.tokenizer, copy=not options.no_copy
            )
    except (CratonError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        if options.json:
            print(json.dumps({"error": str(error), "problems": [str(error)]}))
        return 2
    if options.json:
        copied = {"copy": done.copy} if done.copy else {}
        print(json.dumps({"folder": options.folder, "step": done.step, "dtype": options.dtype, **copied}))
    else:
        label = "adapters of step" if options.adapters else "step"
        print(f"wrote {options.folder}: {label} {done.step} of {options.run} in {options.dtype}")
        if done.copy:
            print(f"copied to {done.copy}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
