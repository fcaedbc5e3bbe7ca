"""The job file: what a user wants, checked before anything costs money.

`load_job` returns a frozen `Job` whose model can be found, whose batch is a whole number of sequences and whose keys
are all known, or raises one JobError that lists every problem with its line. Whether the cluster exists and the layout
fits it is for craton.infrastructure and `check_layout`.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)

from craton.job.clusterfile import ClusterSpec, PriceNumbers, SchedulerKind
from craton.job.document import Document, Location, parse_document, read_document
from craton.job.errors import ContentError, JobError, LayoutError
from craton.job.layout import Layout, Offload, Precision, Recompute, Schedule
from craton.job.model import ModelShape
from craton.job.modelspec import ModelSpec, is_function, model_shape
from craton.job.section import ConflictError, Section, parse_section
from craton.job.units import Count, Seconds, Size, TokenCount, Whole, parse_seconds

Kind = Literal["pretrain", "sft", "dpo", "grpo", "serve", "command"]
Tracker = Literal["tensorboard", "wandb", "mlflow"]
TRAINING_KINDS = ("pretrain", "sft", "dpo", "grpo")
DEFAULT_SEQUENCE = 8192  # of a model that could see more: long contexts are asked for, not stumbled into

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_NO_SEQUENCE = "data.sequence is missing, and the model does not say how long its sequences are"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def load_job(path: Path | str) -> Job:
    """Reads and checks a job file."""
    return _job(read_document(path))


def parse_job(text: str, name: str = "job.yaml", folder: Path | str = ".") -> Job:
    """The same from a string; relative paths in it start at `folder`."""
    return _job(parse_document(text, name, folder))


def _check_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(f"{value!r} is not a name; use up to 63 letters, digits, '.', '_' and '-', e.g. llama-8b")
    return value


def _check_function(value: str) -> str:
    if not is_function(value):
        raise ValueError(f"{value!r} is not a function; write package.module:function")
    return value


def _check_variable(value: str) -> str:
    if not _VARIABLE.fullmatch(value):
        raise ValueError(f"{value!r} is not the name of an environment variable")
    return value


def _text(value: object) -> object:
    """Numbers and booleans of an environment are texts in the end, written as YAML writes them."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


Function = Annotated[str, AfterValidator(_check_function)]
Text = Annotated[str, BeforeValidator(_text)]
Variable = Annotated[str, AfterValidator(_check_variable)]


class Data(Section):
    """Where the tokens come from."""

    path: str | None = None
    sequence: TokenCount | None = None
    source: Function | None = None


class Lora(Section):
    """Low-rank adapters (arXiv:2106.09685): the base weights stay frozen."""

    rank: Size
    alpha: Annotated[float, Field(gt=0)] | None = None  # default: the rank
    targets: Literal["attention", "mlp", "all"] = "all"


class Train(Section):
    """How much is trained, and how."""

    global_batch_tokens: TokenCount | None = None
    global_batch_sequences: Count | None = None
    tokens: Count | None = None
    steps: Count | None = None
    precision: Precision = "bf16"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    seed: Whole = 0
    lora: Lora | None = None

    @model_validator(mode="after")
    def _never_both_of_a_pair(self) -> Self:
        for first, second in (("global_batch_tokens", "global_batch_sequences"), ("tokens", "steps")):
            if getattr(self, first) is not None and getattr(self, second) is not None:
                raise ConflictError(f"train: {first} and {second} are both given; keep one", (first,), (second,))
        return self


class LayoutSpec(Section):
    """A layout as written: what is left out is 1 or the usual, and fsdp (or else replicate) takes the ranks left."""

    pp: Size | None = None
    replicate: Size | None = None
    fsdp: Size | None = None
    cp: Size | None = None
    tp: Size | None = None
    ep: Size | None = None
    vpp: Size | None = None
    micro_batch: Size | None = None
    recompute: Recompute | None = None
    precision: Precision | None = None
    zero: Literal[1, 2, 3] | None = None
    schedule: Schedule | None = None
    offload: Offload | None = None

    def resolve(self, world: int, precision: Precision = "bf16") -> Layout:
        """The whole layout on `world` ranks; `precision` is the job's, used when the layout names none."""
        sizes = {"precision": precision, **self.model_dump(exclude_none=True)}
        free = "fsdp" if self.fsdp is None else "replicate" if self.replicate is None else None
        if free:
            named = Layout(**sizes).world
            if world % named:
                raise LayoutError(
                    f"layout takes a multiple of {named} ranks, but the cluster has {world} GPUs; "
                    f"{free} cannot fill the rest"
                )
            sizes[free] = world // named
        if "schedule" not in sizes and sizes.get("vpp", 1) > 1:
            sizes["schedule"] = "interleaved"
        return Layout(**sizes)


def _parse_layout(value: object, info: ValidationInfo) -> LayoutSpec | None:
    if value is None or value == "auto":
        return None
    if isinstance(value, LayoutSpec):
        return value
    if isinstance(value, dict):
        return LayoutSpec.parse(value, info)
    raise ValueError(f"{value!r} is not a layout; write auto, or a mapping such as {{fsdp: 16, tp: 8}}")


class Placement(Section):
    """How close together the nodes must be."""

    within: Literal["node", "leaf", "spine", "zone"]


class CheckpointTier(Section):
    """One place checkpoints go to."""

    to: str
    every: Seconds
    keep: Size | None = None  # newest ones kept; default: all

    @model_validator(mode="after")
    def _place_is_known(self) -> Self:
        if self.to not in ("nvme", "shared", "object") and not self.to.startswith(("s3://", "/")):
            raise ConflictError(
                f"checkpoint: {self.to!r} is not a tier; allowed: nvme, shared, object, an s3:// prefix or an "
                "absolute path",
                ("to",),
            )
        return self


def _parse_peer(value: object) -> object:
    if value in ("auto", "off"):
        return value
    try:
        return parse_seconds(value)
    except ValueError:
        raise ValueError(f"{value!r} is not allowed; write auto, off, or a duration such as 2m") from None


class Checkpoint(Section):
    """How state survives. `peer`: a copy in another node's memory, `auto` as often as costs under 2 %."""

    peer: Annotated[Literal["auto", "off"] | float, PlainValidator(_parse_peer)] = "auto"
    tiers: tuple[CheckpointTier, ...] = ()

    @model_validator(mode="after")
    def _places_differ(self) -> Self:
        places = [tier.to for tier in self.tiers]
        for index, place in enumerate(places):
            if place in places[:index]:
                first: Location = ("tiers", places.index(place), "to")
                second: Location = ("tiers", index, "to")
                raise ConflictError(f"checkpoint: tier {place!r} is given twice; keep one", first, second)
        return self


class Run(Section):
    """Where and under what the job is started; the cluster file supplies defaults."""

    on: SchedulerKind | None = None
    partition: str | None = None
    account: str | None = None
    queue: str | None = None
    time_limit: Seconds | None = None
    image: str | None = None
    env: dict[Variable, Text] = Field(default_factory=dict)
    secrets: tuple[Variable, ...] = ()  # names only; values come from the caller's environment

    @model_validator(mode="after")
    def _secrets_are_not_written_down(self) -> Self:
        for name in self.secrets:
            if name in self.env:
                raise ConflictError(
                    f"run: {name} is both a secret and in env; remove it from env", ("env", name), ("secrets",)
                )
        return self


class Job(Section):
    """One job. Paths in it are absolute, so that it means the same wherever it is read."""

    name: Annotated[str, AfterValidator(_check_name)] = "job"
    kind: Kind
    model: ModelSpec | None = None
    data: Data = Data()
    train: Train | None = None
    cluster: ClusterSpec
    layout: Annotated[LayoutSpec | None, BeforeValidator(_parse_layout)] = None  # None: auto
    placement: Placement | None = None
    checkpoint: Checkpoint = Checkpoint()
    run: Run = Run()
    track: Annotated[tuple[Tracker, ...], BeforeValidator(_one_or_many)] = ()
    command: Annotated[tuple[Text, ...], BeforeValidator(_one_or_many)] = ()  # a single text is run by the shell
    software: str = "craton"  # software profile for the prediction: a name, or the path of a profile file
    objective: Function | None = None
    reward: Function | None = None
    price: PriceNumbers | None = None

    _document: Document | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _name_from_file(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, dict) and "name" not in value and info.context:
            stem = Path(info.context["name"]).stem
            if _NAME.fullmatch(stem):
                return {**value, "name": stem}
        return value

    @model_validator(mode="after")
    def _kind_has_what_it_needs(self) -> Self:
        needed = {
            "pretrain": ("model", "train"),
            "sft": ("model", "train", "data"),
            "dpo": ("model", "train", "data"),
            "grpo": ("model", "train", "data", "reward"),
            "serve": ("model",),
            "command": ("command",),
        }[self.kind]
        missing = [key for key in needed if key not in self.model_fields_set or not getattr(self, key)]
        if missing:
            raise ConflictError(f"kind {self.kind} needs {' and '.join(f'`{key}:`' for key in missing)}", ("kind",))
        if self.reward and self.kind != "grpo":
            raise ConflictError(f"reward belongs to kind grpo, not {self.kind}", ("reward",), ("kind",))
        if self.train and self.kind not in TRAINING_KINDS:
            raise ConflictError(f"kind {self.kind} does not train; remove `train:`", ("train",), ("kind",))
        return self

    @model_validator(mode="after")
    def _batch_is_whole(self) -> Self:
        if self.train is None:
            return self
        if self.train.global_batch_tokens is None and self.train.global_batch_sequences is None:
            raise ConflictError("train: give global_batch_tokens or global_batch_sequences", ("train",))
        try:
            sequence = self.sequence
        except JobError as error:
            raise ConflictError(str(error), ("data",)) from None
        tokens = self.train.global_batch_tokens
        if tokens is not None and tokens % sequence:
            nearest = max(1, round(tokens / sequence)) * sequence
            raise ConflictError(
                f"train: global_batch_tokens {tokens:,} is not a multiple of the sequence {sequence:,}; nearest: "
                f"{nearest:,} = global_batch_sequences {nearest // sequence:,} (8M means 8 · 1024 · 1024 here)",
                ("train", "global_batch_tokens"),
            )
        return self

    @property
    def model_shape(self) -> ModelShape | None:
        """None when there is no model, or when it is a function that only its author knows."""
        return None if self.model is None else model_shape(self.model)

    @property
    def sequence(self) -> int:
        """Tokens of one sequence: as written, else what the model was made for, up to DEFAULT_SEQUENCE."""
        if self.data.sequence is not None:
            return self.data.sequence
        shape = self.model_shape
        if shape is None or not shape.max_sequence:
            raise JobError(_NO_SEQUENCE)
        return min(shape.max_sequence, DEFAULT_SEQUENCE)

    @property
    def global_batch_sequences(self) -> int:
        """Sequences of one step, over all ranks."""
        assert self.train is not None, f"kind {self.kind} has no batch"
        if self.train.global_batch_sequences is not None:
            return self.train.global_batch_sequences
        assert self.train.global_batch_tokens is not None
        return self.train.global_batch_tokens // self.sequence

    @property
    def global_batch_tokens(self) -> int:
        return self.global_batch_sequences * self.sequence

    @property
    def steps(self) -> int | None:
        """Whole steps, the last one full; None when the job does not say how long it trains."""
        if self.train is None:
            return None
        if self.train.steps is not None:
            return self.train.steps
        return None if self.train.tokens is None else math.ceil(self.train.tokens / self.global_batch_tokens)

    @property
    def total_tokens(self) -> float | None:
        """Tokens trained on, as asked for."""
        if self.train is None:
            return None
        if self.train.tokens is not None:
            return float(self.train.tokens)
        return None if self.train.steps is None else float(self.train.steps * self.global_batch_tokens)

    @property
    def precision(self) -> Precision:
        """The layout's own, else that of `train:`."""
        if self.layout and self.layout.precision:
            return self.layout.precision
        return self.train.precision if self.train else "bf16"

    def where(self, *location: str | int) -> str:
        """`job.yaml:7: `, the beginning of a message about a key; nothing for a job that was not read from a file."""
        return f"{self._document.name}:{self._document.line(location)}: " if self._document else ""

    def fixed_layout(self, world: int) -> Layout | None:
        """The layout the user wrote, on `world` ranks; None when it is `auto`."""
        return self.layout.resolve(world, self.precision) if self.layout else None


def _job(document: Document) -> Job:
    job = parse_section(Job, document)
    job._document = document
    software = document.folder / Path(job.software).expanduser()
    if "/" not in job.software and software.suffix not in (".toml", ".json"):
        return job
    if not software.is_file():
        raise ContentError([f"{job.where('software')}software: profile file {job.software!r} does not exist"])
    return job.model_copy(update={"software": str(software.resolve())})
