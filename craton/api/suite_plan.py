"""What is known of a suite for a plan of strategies: its own prompts, and the newest evaluation of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from craton.errors import CratonError
from craton.job import Job
from craton.job.model import weights_folder
from craton.job.sections.suites import BUILT_IN_SUITES, load_suite
from craton.ml.evaluation import EVALUATION_FILE, SuiteProblem, open_problems
from craton.ml.serving import ServingError
from craton.ml.serving.text import Vocabulary, load_template
from craton.planning.strategies import (
    SampleRecord,
    SuitePrompts,
    estimated_tokens,
    parse_accuracy,
    read_record,
    record_of_suite,
    shape_of,
)
from craton.telemetry import RunDirectory, list_runs

_KEYS_OF_SUITES = {"data", "reward"}


def is_suite(name: str) -> bool:
    """Return whether this names a suite: a built-in one, or a YAML file that has one."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        return bool(_KEYS_OF_SUITES & set(_mapping(path)))
    return name in BUILT_IN_SUITES


def suite_record(suite: str, job: Job | None = None, accuracy: str = "") -> SampleRecord:
    """Return what is known of a suite. `job`: the server that answers it, whose tokenizer counts the prompts if it is
    on this machine. Accuracies are those given, else those of the newest evaluation, of the job's model if it has one.
    """
    loaded = load_suite(suite)
    problems = open_problems(loaded)
    tokens, tokenizer = _prompt_tokens(problems, job)
    wanted = tuple(shape_of(strategy, "strategies") for strategy in loaded.strategies)
    prompts = SuitePrompts(loaded.name, tokens, tokenizer, loaded.sampling.max_tokens, wanted)
    if accuracy:
        return record_of_suite(prompts, parse_accuracy(accuracy, max(2, len(problems))))
    for run in _evaluations(suite, job):
        try:
            return record_of_suite(prompts, read_record(run.path), run.name)
        except CratonError:  # it has no results yet, or no plain samples
            continue
    return record_of_suite(prompts)


def _prompt_tokens(problems: list[SuiteProblem], job: Job | None) -> tuple[tuple[int, ...], str]:
    """Return the tokens of every prompt, and what counted them."""
    folder = weights_folder(job.model) if job is not None and isinstance(job.model, str) else None
    if job is not None and folder is not None and (folder / "tokenizer.json").is_file():
        vocabulary, template = Vocabulary(folder), load_template(folder)

        def length(problem: SuiteProblem) -> int:
            content = problem.content
            if isinstance(content, str):
                return len(vocabulary.encode(content, with_special_tokens=True))
            if template is None:
                raise ServingError(f"{folder} has no chat template, and the suite asks chats; give --tokens")
            return len(vocabulary.encode(template.render(content), with_special_tokens=False))

        return tuple(map(length, problems)), job.served_name
    return tuple(estimated_tokens(_text(problem.content)) for problem in problems), ""


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(str(message.get("content", "")) for message in content)


def _evaluations(suite: str, job: Job | None) -> list[RunDirectory]:
    """Return the evaluations of this suite, those of the job's model first, then by age."""
    path = suite if suite in BUILT_IN_SUITES else str(Path(suite).expanduser().absolute())
    found = []
    for run in list_runs():
        if not (run.path / EVALUATION_FILE).is_file():
            continue
        document = _mapping(run.job_path)
        section = document.get("eval")
        if isinstance(section, dict) and section.get("suite") == path:
            found.append((job is None or document.get("model") != job.model, run))
    return [run for _, run in sorted(found, key=lambda pair: pair[0])]


def _mapping(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return document if isinstance(document, dict) else {}
