"""The job: the sections of a job file, checked against each other.

A `Job` is frozen; its model is found, its batch is a whole number of sequences and its keys are all known.
craton.infrastructure checks that the cluster exists, and `check_layout` that the layout fits it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, PrivateAttr, ValidationInfo, model_validator

from craton.job.cluster import ClusterSpec, PriceNumbers
from craton.job.document import (
    Document,
    KeyConflictError,
    Name,
    Section,
    dotted,
    is_name,
)
from craton.job.errors import ContentError, JobError
from craton.job.evaluations import NOT_OF_AN_EVALUATION, SuiteUse, check_evaluation, check_training_evaluation
from craton.job.layout import Layout, LayoutSpec, Precision, parse_layout
from craton.job.model import (
    Int4Format,
    ModelNumbers,
    ModelShape,
    ModelSpec,
    is_function,
    model_shape,
    run_folder,
    weights_folder,
)
from craton.job.rollouts import check_rollouts
from craton.job.run_section import Placement, RunSection, Text
from craton.job.sections import (
    MIN_BPE_VOCABULARY,
    ChaosSpec,
    Checkpoint,
    Data,
    Float8Recipe,
    Function,
    ProcessesSpec,
    ProgressSection,
    RecoverSection,
    SweepSection,
    Train,
    WorkdirSpec,
    check_placeholders,
    check_processes,
)
from craton.job.sections.posttraining import ApiEndpoint, Policy, Preference, RewardSpec, Rollout, VerifySection
from craton.job.sections.serving import DEFAULT_LENGTH, Serve
from craton.job.sections.suites import Evaluation
from craton.job.serving import check_served_model, check_server_keys, check_stored_precision, is_planned_only
from craton.job.sharing import sharing_problem
from craton.remote import is_url

Kind = Literal["pretrain", "sft", "dpo", "grpo", "serve", "eval", "command"]
Tracker = Literal["tensorboard", "wandb", "mlflow"]
TRAINING_KINDS = ("pretrain", "sft", "dpo", "grpo")
TUNING_KINDS = ("sft", "dpo", "grpo")  # start from trained weights
DEFAULT_SEQUENCE = 8192  # also for models with a longer context: users request long contexts explicitly
DEFAULT_LEARNING_RATES: dict[str, float] = {"pretrain": 3e-4, "sft": 2e-5, "dpo": 1e-6, "grpo": 1e-6}
FINAL_LEARNING_RATE_SHARE = 0.1
MAX_WARMUP_STEPS = 2000

SECTIONS_OF_KINDS = {"serve": ("serve",), "dpo": ("preference",), "grpo": ("policy", "rollout", "verify")}

OF_ONE_KIND = {
    "preference": "dpo",
    "policy": "grpo",
    "rollout": "grpo",
    "verify": "grpo",
    "reward": "grpo",
    "eval": "eval",
}

NOT_OF_A_COMMAND = {
    "model": "the command has its own model",
    "data": "the command reads its own data",
    "layout": "the command places its own ranks",
    "checkpoint": "the command saves its own checkpoints, also at a stop",
    "objective": "the command has its own loss",
}

_NO_SEQUENCE = "data.sequence is missing, and the model has no maximum sequence length; set data.sequence"


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


class Job(Section):
    """A job. Its paths are absolute, so that it means the same on every machine and in every folder."""

    name: Name = "job"
    kind: Kind
    model: ModelSpec | None = None
    data: Data = Data()
    train: Train | None = None
    serve: Serve | None = None  # always set for kind serve, never for others
    eval: Evaluation | None = None  # likewise for kind eval
    cluster: ClusterSpec
    layout: Annotated[LayoutSpec | None, BeforeValidator(parse_layout)] = None  # None: auto
    placement: Placement | None = None
    checkpoint: Checkpoint = Checkpoint()
    recover: RecoverSection = RecoverSection()
    chaos: ChaosSpec = ()
    run: RunSection = RunSection()
    track: Annotated[tuple[Tracker, ...], BeforeValidator(_one_or_many)] = ()
    sweep: SweepSection | None = None  # run the job several times, with other values of some keys
    command: Annotated[tuple[Text, ...], BeforeValidator(_one_or_many)] = ()  # a single string is run by the shell
    processes: ProcessesSpec = None  # of a command, per node; None: chosen by the command
    workdir: WorkdirSpec = None  # a command runs in a copy of this folder; None: the job file's folder
    progress: ProgressSection | None = None  # of a command: how to read its progress
    software: str = "craton"  # software profile for the prediction: a name, or the path of a profile file
    objective: Function | None = None
    preference: Preference | None = None  # always set for kind dpo, never for others
    policy: Policy | None = None  # always set for kind grpo, never for others; so are rollout and verify
    rollout: Rollout | None = None
    verify: VerifySection | None = None
    reward: RewardSpec = ()
    price: PriceNumbers | None = None

    _document: Document | None = PrivateAttr(default=None)
    _weights_job: Job | None = PrivateAttr(default=None)
    _weights_run: Path | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _name_from_file(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, dict) and "name" not in value and info.context:
            stem = Path(info.context["name"]).stem
            if is_name(stem):
                return {**value, "name": stem}
        return value

    @model_validator(mode="before")
    @classmethod
    def _kind_has_its_sections(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        names = SECTIONS_OF_KINDS.get(value.get("kind", ""), ())
        return {**value, **{name: {} for name in names if value.get(name) is None}}

    @model_validator(mode="after")
    def _kind_has_what_it_needs(self) -> Self:
        needed = {
            "pretrain": ("model", "train"),
            "sft": ("model", "train", "data"),
            "dpo": ("model", "train", "data"),
            "grpo": ("model", "train", "data"),
            "serve": ("model",),
            "eval": ("eval",),
            "command": ("command",),
        }[self.kind]
        missing = [key for key in needed if key not in self.model_fields_set or not getattr(self, key)]
        if missing:
            raise KeyConflictError(f"kind {self.kind} needs {' and '.join(f'`{key}:`' for key in missing)}", ("kind",))
        for key, kind in OF_ONE_KIND.items():
            if getattr(self, key) and self.kind != kind:
                raise KeyConflictError(f"{key} applies to kind {kind}, not {self.kind}", (key,), ("kind",))
        if self.train and self.kind not in TRAINING_KINDS:
            raise KeyConflictError(f"kind {self.kind} does not train; remove `train:`", ("train",), ("kind",))
        return self

    @model_validator(mode="after")
    def _sweep_goes_together(self) -> Self:
        if self.sweep is None:
            return self
        if self.kind not in TRAINING_KINDS:
            raise KeyConflictError(
                f"sweep applies to the kinds {', '.join(TRAINING_KINDS)}, not {self.kind}", ("sweep",), ("kind",)
            )
        if self.run.copies > 1:
            raise KeyConflictError(
                "sweep: does not go with run.copies; remove one of them", ("sweep",), ("run", "copies")
            )
        return self

    @model_validator(mode="after")
    def _command_goes_together(self) -> Self:
        for key in ("processes", "workdir", "progress"):
            if getattr(self, key) is not None and self.kind != "command":
                raise KeyConflictError(f"{key} applies to kind command, not {self.kind}", (key,), ("kind",))
        for key, why in NOT_OF_A_COMMAND.items() if self.kind == "command" else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                raise KeyConflictError(
                    f"{key} does not apply to kind command: {why}; remove `{key}:`", (key,), ("kind",)
                )
        check_placeholders(self.command)
        check_processes(self.command, self.processes)
        return self

    @model_validator(mode="after")
    def _rollouts_go_together(self) -> Self:
        if self.rollout is not None and self.policy is not None and self.train is not None:
            check_rollouts(self.policy, self.rollout, self.train, self.reward)
            try:
                sequence = self.sequence
            except JobError as error:
                raise KeyConflictError(str(error), ("data",)) from None
            if self.max_completion_tokens >= sequence:
                raise KeyConflictError(
                    f"rollout: max_tokens {self.max_completion_tokens:,} leaves no room for a prompt in data.sequence "
                    f"{sequence:,}; lower it, or raise data.sequence",
                    ("rollout", "max_tokens"),
                )
        for place, endpoint in self.endpoints.items():
            if endpoint.key is not None and endpoint.key not in self.run.secrets:
                raise KeyConflictError(
                    f"{dotted(place)}: the ranks get {endpoint.key} only as a secret; write run: "
                    f"{{secrets: [{endpoint.key}]}}",
                    (*place, "key"),
                )
        return self

    @model_validator(mode="after")
    def _columns_are_read(self) -> Self:
        if self.data.columns and self.kind not in ("dpo", "grpo"):
            raise KeyConflictError(
                f"data: columns applies to the kinds dpo and grpo, not {self.kind}", ("data", "columns"), ("kind",)
            )
        return self

    @model_validator(mode="after")
    def _batch_is_whole(self) -> Self:
        if self.train is None or self.rollout is not None:
            return self
        if self.train.global_batch_tokens is None and self.train.global_batch_sequences is None:
            raise KeyConflictError("train: give global_batch_tokens or global_batch_sequences", ("train",))
        try:
            sequence = self.sequence
        except JobError as error:
            raise KeyConflictError(str(error), ("data",)) from None
        tokens = self.train.global_batch_tokens
        if tokens is not None and tokens % sequence:
            nearest = max(1, round(tokens / sequence)) * sequence
            raise KeyConflictError(
                f"train: global_batch_tokens {tokens:,} is not a multiple of the sequence {sequence:,}; nearest: "
                f"{nearest:,} = global_batch_sequences {nearest // sequence:,} (8M means 8 · 1024 · 1024 here)",
                ("train", "global_batch_tokens"),
            )
        return self

    @model_validator(mode="after")
    def _vocabulary_holds_the_tokenizer(self) -> Self:
        tokenizer, shape = self.data.tokenizer or "", self.model_shape
        size = int(tokenizer.removeprefix("bpe:")) if tokenizer.startswith("bpe:") else 0
        if shape is not None and size > shape.vocab:
            raise KeyConflictError(
                f"data: a tokenizer of {size:,} tokens (bpe:{size}) does not fit a model with vocab {shape.vocab:,}; "
                f"write {f'bpe:{shape.vocab}, or ' if shape.vocab >= MIN_BPE_VOCABULARY else ''}vocab: {size}",
                ("data", "tokenizer"),
                ("model",),
            )
        return self

    @model_validator(mode="after")
    def _training_goes_together(self) -> Self:
        train = self.train
        if train is None:
            return self
        if train.fp8 is not None and self.precision != "fp8":
            raise KeyConflictError(
                f"train: fp8 {train.fp8} needs precision fp8, not {self.precision}",
                ("train", "fp8"),
                ("train", "precision"),
            )
        if train.weights == "bf16" and self.precision in ("fp32", "fp16"):
            raise KeyConflictError(
                f"train: weights bf16 cannot be used with precision {self.precision}; use precision bf16 or fp8, or "
                "weights fp32",
                ("train", "weights"),
                ("train", "precision"),
            )
        if train.evaluate is not None:
            check_training_evaluation(train.evaluate.suite, self.validates, self.model, self.preference)
        steps = self.steps
        if steps is not None and train.warmup_steps is not None and train.warmup_steps > steps:
            raise KeyConflictError(
                f"train: warmup_steps {train.warmup_steps:,} exceeds the {steps:,} steps of the job",
                ("train", "warmup_steps"),
            )
        return self

    @model_validator(mode="after")
    def _serving_goes_together(self, info: ValidationInfo) -> Self:
        if self.kind != "serve":
            if self.serve:
                raise KeyConflictError(f"serve applies to kind serve, not {self.kind}", ("serve",), ("kind",))
            if self.kind in TRAINING_KINDS and self.trained_run is not None:
                raise KeyConflictError(
                    f"model: {self.model} is a run, which can only be served; to continue training from it, export it "
                    "with `craton export` and give the folder",
                    ("model",),
                )
            return self
        assert self.serve is not None
        folder = Path((info.context or {}).get("folder", "."))
        check_server_keys(self.model, self.data, self.layout, self.recover, self.serve, self.software, folder)
        check_stored_precision(self.serve, self.served_name, self.stored_int4)
        check_served_model(self.serve, self.served_name, self.served_length, self.model_shape, self.draft_shape)
        return self

    @model_validator(mode="after")
    def _evaluation_goes_together(self) -> Self:
        if self.eval is None:
            return self
        check_evaluation(self.eval, self.model, self.cluster.num_nodes)
        for key, why in NOT_OF_AN_EVALUATION.items():
            if getattr(self, key) != type(self).model_fields[key].default:
                raise KeyConflictError(f"{key} does not apply to kind eval: {why}; remove `{key}:`", (key,), ("kind",))
        return self

    @model_validator(mode="after")
    def _sharing_goes_together(self) -> Self:
        problem = sharing_problem(self.kind, self.cluster, self.run.on) if self.run.share_gpus else ""
        if problem:
            raise KeyConflictError(f"run: {problem}", ("run", "share_gpus"))
        return self

    def __eq__(self, other: object) -> bool:
        """Jobs with the same content are equal, whichever file they were read from."""
        return (
            isinstance(other, Job)
            and self.__dict__ == other.__dict__
            and (self._weights_job, self._weights_run) == (other._weights_job, other._weights_run)
        )

    @property
    def model_shape(self) -> ModelShape | None:
        """The model's shape; None without a model, or for a function, whose shape is unknown."""
        return None if self.model is None else model_shape(self.model)

    @property
    def draft_shape(self) -> ModelShape | None:
        """The shape of the draft model of a server; None without one."""
        draft = self.serve.draft_model if self.serve else None
        return None if draft is None else model_shape(draft)

    @property
    def stored_int4(self) -> Int4Format | None:
        """The format of the weights that a server loads, if they are stored in 4 bits."""
        shape = self.model_shape
        if self.serve is None or self.serve.initialize == "random" or shape is None:
            return None
        return None if self.weights_job is not None or self.trained_run is not None else shape.int4

    @property
    def has_own_precision(self) -> bool:
        """Whether a server has the precisions of Craton's engine. Its int4 leaves routed experts in bf16, others' does
        not."""
        assert self.serve is not None, f"kind {self.kind} does not serve"
        return self.serve.has_own_precision and not (self.serve.precision == "int4" and is_planned_only(self.software))

    @property
    def draft_precision(self) -> str:
        """The precision of a draft model's weights: that of the server, or int4 if they are stored so."""
        assert self.serve is not None, f"kind {self.kind} does not serve"
        draft = self.draft_shape
        is_stored = draft is not None and draft.int4 is not None and self.serve.initialize != "random"
        return "int4" if is_stored else self.serve.precision

    @property
    def sequence(self) -> int:
        """Sequence length in tokens: as written, else the model's maximum, up to DEFAULT_SEQUENCE."""
        if self.data.sequence is not None:
            return self.data.sequence
        shape = self.model_shape
        if shape is None or not shape.max_sequence:
            raise JobError(_NO_SEQUENCE)
        return min(shape.max_sequence, DEFAULT_SEQUENCE)

    @property
    def global_batch_sequences(self) -> int:
        """Sequences per step, over all ranks. Those of rollouts are packed into fewer rows."""
        assert self.train is not None, f"kind {self.kind} has no batch"
        if self.rollout is not None:
            return self.rollout.samples
        if self.train.global_batch_sequences is not None:
            return self.train.global_batch_sequences
        assert self.train.global_batch_tokens is not None
        return self.train.global_batch_tokens // self.sequence

    @property
    def global_batch_tokens(self) -> int:
        return self.global_batch_sequences * self.sequence

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates in a step."""
        return 1 if self.policy is None else self.policy.updates

    @property
    def max_completion_tokens(self) -> int:
        """Maximum tokens of a rollout's completion."""
        assert self.rollout is not None, f"kind {self.kind} has no rollouts"
        return self.rollout.max_tokens or self.sequence // 2

    @property
    def fault_parts(self) -> frozenset[str]:
        """The parts of post-training that faults may name."""
        if self.rollout is None:
            return frozenset({"weights"} if self.serve is not None else ())
        has_servers = self.rollout.mode == "separate" and self.rollout.endpoint is None
        parts = {
            "verifier": bool(self.reward) or self.rollout.environment is not None,
            "journal": self.rollout.mode != "sync",
            "weights": has_servers,
        }
        return frozenset(name for name, is_there in parts.items() if is_there)

    @property
    def endpoints(self) -> dict[tuple[str | int, ...], ApiEndpoint]:
        """The servers that the job asks, by the place of their keys."""
        places: dict[tuple[str | int, ...], ApiEndpoint | None] = {
            ("rollout", "endpoint"): self.rollout.endpoint if self.rollout else None,
            ("eval", "endpoint"): self.eval.endpoint if self.eval else None,
            **{("reward", index, "endpoint"): term.endpoint for index, term in enumerate(self.reward)},
        }
        if self.policy is not None and isinstance(self.policy.teacher, ApiEndpoint):
            places["policy", "teacher"] = self.policy.teacher
        return {place: endpoint for place, endpoint in places.items() if endpoint is not None}

    @property
    def functions(self) -> dict[tuple[str | int, ...], str]:
        """The user's functions that the job names, by the place of their keys."""
        named: dict[tuple[str | int, ...], str | None] = {
            ("model",): self.model if isinstance(self.model, str) and is_function(self.model) else None,
            ("data", "source"): self.data.source,
            ("objective",): self.objective,
            ("rollout", "environment"): self.rollout.environment if self.rollout else None,
            **{("reward", index, "python"): term.python for index, term in enumerate(self.reward)},
        }
        return {place: function for place, function in named.items() if function is not None}

    @property
    def validates(self) -> bool:
        """Whether training evaluates `data.validation`. The user's own source has validation data of its own, which is
        evaluated unless a suite is."""
        evaluate = self.train.evaluate if self.train else None
        if evaluate is None:
            return False
        return bool(self.data.validation) or (self.data.source is not None and evaluate.suite is None)

    @property
    def suites(self) -> dict[tuple[str, ...], SuiteUse]:
        """The suites that the job evaluates, by the place of their keys."""
        sections = {("eval", "suite"): self.eval, ("train", "evaluate", "suite"): self.train and self.train.evaluate}
        return {
            place: SuiteUse(section.suite, section.problems, section.samples)
            for place, section in sections.items()
            if section and section.suite is not None
        }

    @property
    def steps(self) -> int | None:
        """Number of steps, rounded up; None if the job sets neither steps nor tokens."""
        if self.train is None:
            return None
        if self.train.steps is not None:
            return self.train.steps
        return None if self.train.tokens is None else math.ceil(self.train.tokens / self.global_batch_tokens)

    @property
    def total_tokens(self) -> float | None:
        """Number of tokens to train on, as requested."""
        if self.train is None:
            return None
        if self.train.tokens is not None:
            return float(self.train.tokens)
        return None if self.train.steps is None else float(self.train.steps * self.global_batch_tokens)

    @property
    def precision(self) -> Precision:
        """The precision of the layout, else of `train:`, or that of a server's shards."""
        if self.layout and self.layout.precision:
            return self.layout.precision
        if self.serve is not None:
            return self.serve.shard_precision
        return self.train.precision if self.train else "bf16"

    @property
    def learning_rate(self) -> float:
        """The peak learning rate of the schedule."""
        assert self.train is not None, f"kind {self.kind} does not train"
        return self.train.learning_rate or DEFAULT_LEARNING_RATES[self.kind]

    @property
    def warmup_steps(self) -> int:
        """As written, else a tenth of the steps, at most MAX_WARMUP_STEPS; 0 for a job without an end."""
        assert self.train is not None, f"kind {self.kind} does not train"
        if self.train.warmup_steps is not None:
            return self.train.warmup_steps
        return min((self.steps or 0) // 10, MAX_WARMUP_STEPS)

    @property
    def final_learning_rate(self) -> float:
        """The learning rate at the end of the schedule."""
        assert self.train is not None, f"kind {self.kind} does not train"
        if self.train.final_learning_rate is not None:
            return self.train.final_learning_rate
        return self.learning_rate * (1.0 if self.train.schedule == "constant" else FINAL_LEARNING_RATE_SHARE)

    @property
    def spares(self) -> int:
        """Number of spare nodes: as written, else the cluster file's."""
        if self.recover.spares is not None:
            return self.recover.spares
        return self.cluster.file.spares if self.cluster.file else 0

    @property
    def fp8(self) -> Float8Recipe | None:
        """The scaling recipe of fp8 matmuls in training; None in any other precision."""
        return (self.train and self.train.fp8) or "tensorwise" if self.precision == "fp8" else None

    @property
    def folder(self) -> Path:
        """Base folder of relative paths, and the first place where the user's functions are searched."""
        return self._document.folder if self._document else Path()

    @property
    def weights_folder(self) -> Path | None:
        """The folder with the weights to start from or to serve; None if they are random or a run's.

        JobError if weights are required and missing; tuning and serve require them unless `initialize` is random.
        """
        section = self.train or self.serve
        initialize = section.initialize if section else "auto"
        if self.weights_job is not None:
            return None
        folder = weights_folder(self.model) if isinstance(self.model, str) and initialize != "random" else None
        if folder is None and initialize == "weights":
            raise JobError(
                f"{self.where('train', 'initialize')}train.initialize is weights, but no weights of the model were "
                "found here; give a folder or a Hub id in the local cache with *.safetensors, or initialize: random"
            )
        if folder is None and self.kind in TUNING_KINDS and initialize != "random" and self.model_shape is not None:
            raise JobError(
                f"{self.where('model')}kind {self.kind} starts from a trained model, but {self.model_shape.name} has "
                "no weights here; give a folder or a Hub id that is in the local cache, or train.initialize: random"
            )
        if folder is None and self.kind == "serve" and initialize != "random" and self.trained_run is None:
            raise JobError(
                f"{self.where('model')}kind serve requires trained weights, but {self.served_name} has none here; "
                "give a folder, a Hub id that is in the local cache, or a run; or serve.initialize: random to benchmark"
            )
        return folder

    @property
    def reference_folders(self) -> dict[tuple[str, ...], str]:
        """The folders of models beside the main one, references, teachers and draft models, by their keys in the job
        file."""
        has_draft = self.serve is not None and self.serve.initialize != "random"
        named: dict[tuple[str, ...], object] = {
            ("serve", "speculate", "model"): self.serve.draft_model if self.serve and has_draft else None,
            ("preference", "reference"): self.preference.reference_model if self.preference else None,
            ("policy", "reference"): self.policy.reference if self.policy else None,
            ("policy", "teacher"): self.policy.teacher if self.policy else None,
        }
        return {key: folder for key, folder in named.items() if isinstance(folder, str) and folder != "start"}

    @property
    def reward_model_folders(self) -> dict[tuple[str, ...], str]:
        """The folders of reward models, by their keys in the job file."""
        verifiers = self.serve.verifiers if self.serve is not None else {}
        named: dict[tuple[str, ...], str | None] = {
            **{("reward", str(number), "model"): term.model for number, term in enumerate(self.reward)},
            **{("serve", "verifiers", name, "model"): term.model for name, term in verifiers.items()},
        }
        return {key: folder for key, folder in named.items() if folder is not None}

    @property
    def weights_job(self) -> Job | None:
        """The job of `model: {job: FILE}`, whose weights this job starts from or serves."""
        return self._weights_job

    @property
    def trained_run(self) -> Path | None:
        """The directory of the run whose weights the job starts from or serves; None if there is no such run, or if it
        is not known yet where the job of `model: {job: FILE}` runs."""
        if self.weights_job is not None:
            return self._weights_run
        return run_folder(self.model) if isinstance(self.model, str) else None

    @property
    def served_length(self) -> int:
        """Maximum context length of a request, prompt plus output: as written, else the model's. If not written, the
        engine may reduce it to fit its memory."""
        assert self.serve is not None, f"kind {self.kind} does not serve"
        shape = self.model_shape
        return self.serve.max_length or (shape.max_sequence if shape else 0) or DEFAULT_LENGTH

    @property
    def served_name(self) -> str:
        """Model name in the API: as written, else the preset, the Hub id, or the name of the folder or run."""
        assert self.serve is not None, f"kind {self.kind} does not serve"
        if self.serve.served_name is not None:
            return self.serve.served_name
        return self._model_name

    @property
    def evaluated_name(self) -> str:
        """What an evaluation calls its model: a preset, a Hub id, the name of a folder or run, or a URL."""
        assert self.eval is not None, f"kind {self.kind} does not evaluate"
        if self.eval.endpoint is not None:
            return self.eval.endpoint.model or self.eval.endpoint.url
        return self._model_name

    @property
    def _model_name(self) -> str:
        """A preset, a Hub id, or the name of the model, the folder or the run."""
        if isinstance(self.model, ModelNumbers):
            return self.model.name
        assert self.model is not None
        return Path(self.model).name if self.model.startswith("/") or is_url(self.model) else self.model

    @property
    def document(self) -> Document | None:
        """The file that the job was read from."""
        return self._document

    def where(self, *location: str | int) -> str:
        """Return `job.yaml:7: `, the prefix of a message about a key; empty for a job without a file."""
        return f"{self._document.name}:{self._document.line(location)}: " if self._document else ""

    def with_shared_gpus(self, on: str | None = None) -> Self:
        """Return the job with `run: {share_gpus: true}`; ContentError if its ranks cannot share GPUs on the backend
        `on`, default: the job's."""
        if problem := sharing_problem(self.kind, self.cluster, on or self.run.on):
            raise ContentError([f"--share-gpus: {problem}"])
        return self.model_copy(update={"run": self.run.model_copy(update={"share_gpus": True})})

    def with_weights_of(self, job: Job, run: Path | None = None) -> Self:
        """Return this job with the weights of another one, and the run that trains them, if that is known."""
        copy = self.model_copy()
        copy._weights_job, copy._weights_run = job, run
        return copy

    def with_model(self, folder: str) -> Self:
        """Return this job with the model of a folder and its weights: a reference, a teacher or a reward model."""
        copy = self.model_copy(update={"model": folder})
        copy._weights_job = copy._weights_run = None
        return copy

    def with_stored_precision(self) -> Self:
        """Return this job with serve.precision int4 if the weights to serve are stored so."""
        if self.serve is None or self.stored_int4 is None:
            return self
        return self.model_copy(update={"serve": self.serve.model_copy(update={"precision": "int4"})})

    def with_document(self, document: Document) -> Self:
        """Return this job with the file that it was read from."""
        copy = self.model_copy()
        copy._document = document
        return copy

    @property
    def served_layout(self) -> Layout:
        """The sizes of a server that Craton runs, as written, else 1: `tp`, and `ep` over the same ranks. Engines that
        are only planned split experts by rules of their own."""
        written = self.layout or LayoutSpec()
        ep = 1 if is_planned_only(self.software) else written.ep or 1
        return Layout(tp=written.tp or 1, ep=ep, precision=self.precision)

    def fixed_layout(self, world: int) -> Layout | None:
        """Return the user's layout on `world` ranks; None for `auto`."""
        return self.layout.resolve(world, self.precision) if self.layout else None
