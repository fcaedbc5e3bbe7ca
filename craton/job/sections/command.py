"""The keys of a job of kind `command`: processes per node, the folder whose copy they run in, and how progress is read.

A command that starts its own ranks (torchrun, vLLM) is started once per node, any other once per GPU, unless
`processes:` sets the number. If a launcher is hidden in a shell string, `processes:` is required. Patterns are
converted to valid regular expressions with named groups.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, PlainValidator, ValidationInfo, model_validator

from craton.job.document import Bytes, KeyConflictError, Seconds, Section, Size, Whole, parse_seconds, whole_number
from craton.nearest import did_you_mean, nearest_name

# Names replaced per process, as `{name}`, in a command given as a list and in `run.env`.
PLACEHOLDERS = (
    "rank",
    "local_rank",
    "world_size",
    "node_rank",
    "num_nodes",
    "processes_per_node",
    "gpus_per_node",
    "master_address",
    "master_port",
    "run",
)
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "vllm", "sglang")
LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", *LAUNCHERS)
DEFAULT_LIMIT_BYTES = 200e6
# A command prints nothing while it evaluates or saves, which looks like a hang: only a much longer silence counts.
HANG_TIMES, HANG_SECONDS = 20.0, 300.0

_PLACEHOLDER = re.compile(r"(?<![${])\{([a-z][a-z_]*)\}")  # ${name} is a shell variable, {{name}} a literal {name}
_BETWEEN_WORDS = re.compile(r"[\s;&|()<>\"'`]+")
_GROUP = re.compile(r"\(\?P<")
_WHOLE = r"\d+(?:[,_]\d{3})*"
_NUMBER = (
    rf"[-+]?(?:{_WHOLE}(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|[nN]a[nN]|[iI]nf)(?:[kKMGBT](?![A-Za-z]))?"
)
_METRIC = re.compile(r"[a-z][a-z0-9_]*")

Processes = Literal["node", "gpu"] | int


def starts_own_ranks(command: Sequence[str]) -> bool:
    """Return whether the command is a launcher, which is started once per node."""
    try:
        words = shlex.split(command[0]) if len(command) == 1 else list(command)
    except ValueError:  # a shell may accept quotes that shlex does not
        return False
    while words and (words[0] in ("exec", "env") or re.match(r"[A-Za-z_]\w*=", words[0])):
        words.pop(0)
    if not words:
        return False
    program = PurePath(words[0]).name
    if program.startswith("python") and "-m" in words[1:3]:
        return _is_launcher_module(words[words.index("-m") + 1] if words[-1] != "-m" else "")
    return program in LAUNCHERS


def named_launcher(command: Sequence[str]) -> str | None:
    """Return a launcher named anywhere in the command, such as after `cd x &&`, `bash -c` or `uv run`."""
    words = [word for text in command for word in _BETWEEN_WORDS.split(text) if word]
    for before, word in zip(["", *words], words, strict=False):
        if PurePath(word).name in LAUNCHERS or (before == "-m" and _is_launcher_module(word)):
            return word
    return None


def processes_per_node(command: Sequence[str], processes: Processes | None, gpus_per_node: int) -> int:
    """Return the number of processes per node: the job's, else one for a launcher, else one per GPU."""
    wanted = processes or ("node" if starts_own_ranks(command) else "gpu")
    if isinstance(wanted, int):
        return wanted
    return 1 if wanted == "node" else gpus_per_node


def check_processes(command: Sequence[str], processes: Processes | None) -> None:
    """Refuse a command that contains the name of a launcher but may not be one, unless `processes` is given."""
    if processes is not None or starts_own_ranks(command):
        return
    if launcher := named_launcher(command):
        raise KeyConflictError(
            f"command: it is unclear whether {launcher} in it starts the ranks; write `processes: node` if it does, "
            "`processes: gpu` if it does not",
            ("command",),
        )


def check_placeholders(command: Sequence[str]) -> None:
    """Refuse a misspelt placeholder such as `{node_rnk}` in a list, and any placeholder in a shell string, where none
    is replaced. Other braces are left to the command."""
    is_text = len(command) == 1 or tuple(command[:2]) == ("/bin/sh", "-c")
    for name in (entry for word in command for entry in _PLACEHOLDER.findall(word)):
        if is_text and name in PLACEHOLDERS:
            raise KeyConflictError(
                f"command: {{{name}}} is not replaced in a shell string; write $CRATON_{name.upper()}, or give the "
                "command as a list of words",
                ("command",),
            )
        near = None if is_text or name in PLACEHOLDERS else nearest_name(name, PLACEHOLDERS)
        if near:
            raise KeyConflictError(
                f"command: {{{name}}} is not a placeholder; did you mean {{{near}}}? allowed: "
                + ", ".join(f"{{{item}}}" for item in PLACEHOLDERS),
                ("command",),
            )


def _is_launcher_module(module: str) -> bool:
    return any(module == launcher or module.startswith(f"{launcher}.") for launcher in LAUNCHER_MODULES)


def parse_processes(value: object) -> Processes | None:
    if value is None or value in ("node", "gpu"):
        return value
    try:
        return whole_number(1, 4096)(value)
    except ValueError:
        raise ValueError(
            f"{value!r} is not allowed; write node (one process per node), gpu (one per GPU) or a number per node"
            f"{did_you_mean(str(value), ('node', 'gpu'))}"
        ) from None


ProcessesSpec = Annotated[Processes | None, PlainValidator(parse_processes)]


class Workdir(Section):
    """The folder that is copied into the run; the command runs in the copy."""

    path: str | None = None  # None: the job file's folder
    limit: Bytes = DEFAULT_LIMIT_BYTES  # total size of all files


def parse_workdir(value: object, info: ValidationInfo) -> object:
    """Parse a folder, or a section; make the folder absolute."""
    if value is None or isinstance(value, Workdir):
        return value
    document: Any = {"path": value} if isinstance(value, str) else value
    if isinstance(document, dict) and isinstance(document.get("path"), str):
        start = Path((info.context or {}).get("folder", "."))
        document = {**document, "path": str((start / Path(document["path"]).expanduser()).resolve())}
    return Workdir.parse(document, info) if isinstance(document, dict) else document


WorkdirSpec = Annotated[Workdir | None, BeforeValidator(parse_workdir)]


def parse_pattern(text: object) -> str:
    """Parse a regular expression with named groups, or a template such as `step {step}/{steps}`."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError("the pattern is empty; write e.g. 'step {step}/{steps} loss {loss}'")
    expression = text if _GROUP.search(text) else _template(text)
    try:
        compiled = re.compile(expression)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    if not compiled.groupindex:
        raise ValueError(
            f"{text!r} has no named fields; write a template such as 'step {{step}} loss {{loss}}', or a regular "
            "expression with named groups such as 'step (?P<step>\\d+)'"
        )
    for name in compiled.groupindex:
        if not _METRIC.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid metric name; use lowercase letters, digits and '_'")
    return expression


def _template(text: str) -> str:
    """Convert a template to a regular expression: spaces match any whitespace, `{name}` a number."""
    parts = re.split(r"(\{[A-Za-z_]\w*\})", text.strip())
    for index, part in enumerate(parts):
        if index % 2:
            name = part[1:-1]
            parts[index] = f"(?P<{name}>{_WHOLE if name in ('step', 'steps') else _NUMBER})"
        else:
            parts[index] = r"\s+".join(re.escape(word) for word in re.split(r"\s+", part))
    return "".join(parts)


def _parse_patterns(value: object) -> object:
    """Parse one or several patterns to regular expressions."""
    many = [value] if isinstance(value, str) else value
    if not isinstance(many, list | tuple):
        return value
    patterns = []
    for index, text in enumerate(many):
        try:
            patterns.append(parse_pattern(text))
        except ValueError as error:
            raise KeyConflictError(f"progress.pattern: {error}", () if isinstance(value, str) else (index,)) from None
    return tuple(patterns)


def _parse_hang(value: object) -> str:
    """Normalize `auto`, `off`, a multiple `10x` of the usual time between two progress lines, or a duration."""
    text = str(value).strip()
    if text in ("auto", "off"):
        return text
    if times := re.fullmatch(r"(\d+(?:\.\d+)?) ?[x×]", text):
        if float(times[1]) >= 2:
            return f"{float(times[1]):g}x"
        raise ValueError(f"{value!r} would report normal steps as hangs; write 2x or more")
    try:
        return f"{parse_seconds(value):g}s"
    except ValueError:
        near = did_you_mean(text, ("auto", "off"))
        raise ValueError(
            f"{value!r} is not allowed; write auto, off, a multiple such as 10x, or a duration such as 15m{near}"
        ) from None


def _parse_address(value: object) -> str:
    parts = urlsplit(value) if isinstance(value, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{value!r} is not a metrics address; write e.g. http://127.0.0.1:8000/metrics")
    return str(value)


def _parse_names(value: object) -> object:
    for there, ours in value.items() if isinstance(value, Mapping) else ():
        if not isinstance(ours, str) or not _METRIC.fullmatch(ours):
            raise KeyConflictError(
                f"progress.prometheus.names: {ours!r} is not a valid metric name; use e.g. step, loss or "
                "tokens_per_second",
                (there,),
            )
    return value


class PrometheusSource(Section):
    """Prometheus metrics that the command serves, scraped by the agent on the node of the watched process."""

    address: Annotated[str, PlainValidator(_parse_address)]
    names: Annotated[dict[str, str], BeforeValidator(_parse_names)]  # metric there → ours
    every: Seconds = 5.0


class ProgressSection(Section):
    """How to read a command's progress from its output or metrics."""

    pattern: Annotated[tuple[str, ...], BeforeValidator(_parse_patterns)] = ()
    prometheus: PrometheusSource | None = None
    rank: Whole = 0  # the process whose output is read
    steps: Size | None = None  # total, if the output does not contain it
    hang: Annotated[str, PlainValidator(_parse_hang)] = "auto"

    @model_validator(mode="after")
    def _tells_of_steps(self) -> Self:
        if not self.pattern and self.prometheus is None:
            raise KeyConflictError("progress: give `pattern:`, `prometheus:` or both", ())
        if self.pattern and not self.has_steps:
            raise KeyConflictError(
                "progress.pattern: no field is named step, so progress is unknown; write {step} in a template, or "
                "(?P<step>\\d+) in a regular expression",
                ("pattern",),
            )
        return self

    @property
    def has_steps(self) -> bool:
        served = self.prometheus.names.values() if self.prometheus else ()
        return "step" in served or any("step" in re.compile(pattern).groupindex for pattern in self.pattern)

    def rank_problem(self, num_ranks: int) -> str:
        """Return an error if the watched rank does not exist among `num_ranks`; empty otherwise."""
        if self.rank < num_ranks:
            return ""
        return f"progress.rank: there is no rank {self.rank}; give one from 0 to {num_ranks - 1}"

    @property
    def patience(self) -> tuple[float, float]:
        """(multiple of the usual time between progress lines, minimum in seconds) that counts as a hang; 0, 0: off."""
        if self.hang == "off" or not self.has_steps:
            return 0.0, 0.0
        if self.hang == "auto":
            return HANG_TIMES, HANG_SECONDS
        return (float(self.hang[:-1]), 0.0) if self.hang.endswith("x") else (0.0, float(self.hang[:-1]))

    def to_launch(self) -> dict[str, Any]:
        """Return the settings for the agent."""
        times, seconds = self.patience
        return {
            "patterns": list(self.pattern),
            "prometheus": self.prometheus.model_dump() if self.prometheus else None,
            "rank": self.rank,
            "steps": self.steps or 0,
            "hang_times": times,
            "hang_seconds": seconds,
            "has_steps": self.has_steps,
        }
