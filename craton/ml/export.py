"""From a checkpoint to a Hugging Face folder: `python -m craton.ml.export RUN FOLDER [--step N] [--dtype bf16|fp32]`.

Reads a checkpoint of any number of ranks in one process and one tensor at a time, adds what adapters learnt to the
weights they adapt, and puts the tokenizer beside them. The folder appears when it is whole.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from craton.agent import read_launch
from craton.errors import CratonError
from craton.job import Job, Layout, load_job
from craton.ml.models import (
    Decoder,
    DecoderConfig,
    config_from_huggingface,
    config_from_shape,
    load_weights,
    model_folder,
    save_folder,
)
from craton.ml.training.checkpoint import find_checkpoint, read_tensors
from craton.ml.training.checkpoint_files import shapes_in
from craton.telemetry import RunDirectory, find_run

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_PREFIX = "model."


class ExportError(CratonError):
    """A run holds no model that can be opened or written."""


@dataclass(frozen=True)
class RunModel:
    """The model of a run as one of its checkpoints holds it."""

    run: RunDirectory
    job: Job
    step: int
    checkpoint: Path

    @property
    def config(self) -> DecoderConfig:
        if (shape := self.job.model_shape) is None:
            raise ExportError(
                f"run {self.run.name} trains {self.job.model}, which is not a decoder that Hugging Face knows; its "
                f"weights are in {self.checkpoint}, read them with torch.distributed.checkpoint"
            )
        return config_from_shape(shape)

    def weights(self) -> Mapping[str, Tensor]:
        """Every weight by its name in the decoder, read when it is asked for."""
        assert self.job.train is not None
        if self.job.train.lora:
            return self.model(torch.device("cpu"), torch.float32).state_dict()
        return _SavedWeights(self.checkpoint)

    def model(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The trained model, in one process."""
        assert self.job.train is not None
        if self.job.model_shape is not None and not self.job.train.lora:
            model: nn.Module = _empty_decoder(self.config, device, dtype)
            self._fill(dict(model.state_dict()))
            return model
        return self._model_of_training().to(device, dtype)

    def tokenizer_folder(self) -> Path:
        """Where the tokenizer lies that made the run's data."""
        from craton.ml.data import find_tokenizer, model_tokenizer, tokenizer_folder

        kept = self.run.path / "tokenizer"
        if kept.is_dir():
            return find_tokenizer(str(kept))
        found = tokenizer_folder(self.job) or model_tokenizer(self.job)
        if found is None and self.job.data.tokenizer is not None:
            found = find_tokenizer(self.job.data.tokenizer)
        if found is None:
            raise ExportError(
                f"run {self.run.name} knows no tokenizer: neither its data nor its model has one; name one with "
                "--tokenizer FOLDER"
            )
        return found

    def _model_of_training(self) -> nn.Module:
        """As the loop builds it: with a user's own code, or with adapters, which are merged."""
        from craton.ml.functions import search_folder
        from craton.ml.training.build import build_model
        from craton.ml.training.lora import merge_adapters
        from craton.ml.training.parallel import make_ranks

        assert self.job.train is not None
        plain = self.job.model_copy(update={"train": self.job.train.model_copy(update={"compile": False})})
        ranks = make_ranks(Layout(precision="fp32"), torch.device("cpu"), 0, 1)
        search_folder(self._job_folder())
        model = build_model(plain, ranks)
        saved = {name.removeprefix(_PREFIX) for name in shapes_in(self.checkpoint)}
        self._fill({name: tensor for name, tensor in model.state_dict().items() if name in saved})
        merge_adapters(model)
        return model

    def _job_folder(self) -> Path:
        """Where the run's ranks look for a user's own functions."""
        launched = read_launch(self.run).env if self.run.launch_path.is_file() else {}
        return Path(launched.get("CRATON_JOB_FOLDER", "."))

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
    """The model of a run, by its name or path, at its newest checkpoint or the given one."""
    from craton.ml.training.build import tier_folders

    run = find_run(name)
    job = load_job(run.job_path)
    if job.train is None:
        raise ExportError(f"run {run.name} is of kind {job.kind}, which trains no model")
    found, folder = find_checkpoint(tier_folders(job, run), step)
    return RunModel(run, job, found, folder)


def open_model(name: str, step: int | None = None) -> RunModel | FolderModel:
    """The model of a run, or of a folder or Hub id of Hugging Face."""
    if (Path(name).expanduser() / "config.json").is_file():
        return FolderModel(Path(name).expanduser())
    try:
        return open_run(name, step)
    except CratonError as error:
        if "/" in name and not Path(name).exists():
            return FolderModel(model_folder(name))
        raise error


def export(run: str, folder: Path, step: int | None = None, dtype: str = "bf16", tokenizer: str | None = None) -> int:
    """Writes the folder and returns the step that is in it."""
    from craton.ml.data import find_tokenizer

    opened = open_run(run, step)
    tokenizer_folder = find_tokenizer(tokenizer) if tokenizer else opened.tokenizer_folder()
    save_folder(opened.weights(), opened.config, folder, tokenizer_folder, DTYPES[dtype])
    return opened.step


class _SavedWeights(Mapping[str, Tensor]):
    """The weights in a checkpoint, each read when it is asked for."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        saved = shapes_in(checkpoint).items()
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
    """The command; 2 when what was given cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m craton.ml.export", description="Write a Hugging Face folder.")
    parser.add_argument("run", metavar="RUN", help="name or directory of a run")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="new folder to write")
    parser.add_argument("--step", type=int, help="default: the newest checkpoint")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of the weights")
    parser.add_argument("--tokenizer", help="folder or Hub id; default: that of the run's data or model")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(arguments)
    try:
        step = export(options.run, options.folder, options.step, options.dtype, options.tokenizer)
    except (CratonError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        if options.json:
            print(json.dumps({"error": str(error), "problems": [str(error)]}))
        return 2
    if options.json:
        print(json.dumps({"folder": str(options.folder), "step": step, "dtype": options.dtype}))
    else:
        print(f"wrote {options.folder}: step {step} of {options.run} in {options.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
