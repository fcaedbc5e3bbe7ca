"""Checks of what a job needs on the machine that runs it: files, the user's functions, tracker packages.

Applied only if the ranks run on this machine: a job may be checked and planned on a laptop that has none of these. User
code is located and parsed, never imported: a check must not trigger a module's side effects.
"""

from __future__ import annotations

import ast
import os.path
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from craton.extras import MODULES, install_command, install_package_command
from craton.job.document import dotted
from craton.job.errors import ContentError, JobError, ModelError
from craton.job.jobfile import Job
from craton.job.model import check_reward_model
from craton.job.sections import STANDARD_LIBRARY
from craton.job.sections.suites import load_suite
from craton.job.suite_files import functions_of_suites
from craton.nearest import did_you_mean
from craton.remote import is_url

DATA_ADVICE = f"; give a file or a folder of text or token shards, an s3:// URL, or {STANDARD_LIBRARY}"


def check_here(job: Job, folder: Path | None = None) -> None:
    """Raise ContentError with everything that this machine lacks to run the job. `folder`: location of the user's
    functions, if not next to the job file."""
    problems = [
        *_files(job),
        *_functions(job, folder or job.folder),
        *_trackers(job),
        *_suites(job),
        *_checkpoints(job),
    ]
    problems += _strategies(job) if not problems else []
    if problems:
        raise ContentError(problems)


def check_trackers(job: Job) -> None:
    """Check only the trackers: for nodes that share this machine's environment but not its files."""
    if problems := list(_trackers(job)):
        raise ContentError(problems)


def _files(job: Job) -> Iterator[str]:
    for key, mixture in (("path", job.data.mixture), ("validation", job.data.validation_mixture)):
        for path, _ in mixture:
            if path != STANDARD_LIBRARY and not is_url(path) and not Path(path).exists():
                near = _near(path)
                advice = "" if near.endswith("?") else DATA_ADVICE
                yield f"{job.where('data', key)}data.{key}: {path} does not exist{near}{advice}"
    tokenizer = job.data.tokenizer
    if tokenizer is not None and os.path.isabs(tokenizer) and not Path(tokenizer).exists():
        yield (
            f"{job.where('data', 'tokenizer')}data.tokenizer: {tokenizer} does not exist{_near(tokenizer)}; give a "
            "folder with a tokenizer.json, a Hub id, or bpe:4096 to train one"
        )


def _suites(job: Job) -> Iterator[str]:
    """Check the files of suites, which have lines of their own."""
    for location, use in job.suites.items():
        try:
            temperature = job.eval.temperature if job.eval else None
            load_suite(use.suite).sampling.changed(samples=use.samples, temperature=temperature)
        except ContentError as error:
            yield from error.problems
        except JobError as error:
            yield f"{job.where(*location)}{'.'.join(location)}: {error}"


def _checkpoints(job: Job) -> Iterator[str]:
    """Only a run has checkpoints to choose from."""
    if job.eval is None or job.eval.checkpoints is None or job.trained_run is not None:
        return
    yield (
        f"{job.where('eval', 'checkpoints')}eval.checkpoints needs a run, and {job.evaluated_name} is none; give "
        "the name or directory of a training run, or remove checkpoints to evaluate the weights of the model"
    )


def _strategies(job: Job) -> Iterator[str]:
    """Check the strategies of an evaluation against the verifiers of its suite and the prices of its endpoint."""
    if job.eval is None:
        return
    suite = load_suite(job.eval.suite)
    for number, strategy in enumerate(suite.strategies if job.eval.strategies is None else job.eval.strategies):
        where = f"{job.where('eval', 'strategies')}eval.strategies[{number}]"
        try:
            score = suite.score_of(strategy, where)
            if score is not None and score.model is not None:
                check_reward_model(Path(score.model), None if job.eval.endpoint is not None else job.weights_folder)
        except ModelError as error:
            yield f"{where}.score: {error}"
        except JobError as error:
            yield str(error)
        if strategy.max_dollars is not None and job.eval.price is None:
            yield f"{where}.max_dollars: needs the endpoint's prices; give price (--price IN,OUT), or remove it"


def _near(path: str) -> str:
    """Suggest a similar name in the same folder."""
    parent = Path(path).parent
    try:
        return did_you_mean(Path(path).name, [item.name for item in parent.iterdir()])
    except OSError:
        return f"; the folder {parent} does not exist either" if not parent.exists() else ""


def _trackers(job: Job) -> Iterator[str]:
    for tracker in job.track:
        if find_spec(tracker) is None:  # a tracker, its module and its package have one name
            install = install_command(tracker) if tracker in MODULES else install_package_command(tracker)
            yield (
                f"{job.where('track')}track: {tracker} is not installed here; `{install}`, or remove {tracker} from "
                "`track:`"
            )


def _functions(job: Job, folder: Path) -> Iterator[str]:
    for location, function in (*job.functions.items(), *functions_of_suites(job)):
        if problem := _function_problem(function, folder):
            yield f"{job.where(*location)}{dotted(location)}: {problem}"


def _function_problem(function: str, folder: Path) -> str:
    """Return why `package.module:function` cannot be found; empty if it is found, or if only an import could decide."""
    module, _, name = function.partition(":")
    try:
        spec = _spec_of(module, folder)
    except (ImportError, ValueError, OSError) as error:
        return f"cannot search for module {module}: {error}"
    if spec is None:
        beside = [item.stem for item in folder.glob("*.py")] if folder.is_dir() else []
        file = f"{module.replace('.', '/')}.py"
        advice = did_you_mean(module, beside) or f"; write {file} next to the job file, or install the package"
        return f"module {module!r} is neither in {folder.absolute()} nor installed{advice}"
    names = _top_names(spec)
    if names is None or name in names:
        return ""
    return f"{spec.origin} defines no {name!r} at the top level{did_you_mean(name, names)}"


def _spec_of(module: str, folder: Path) -> ModuleSpec | None:
    """Find a module as ranks do, in the job's folder first, without importing parent packages."""
    first, *others = module.split(".")
    spec = PathFinder.find_spec(first, [str(folder.absolute())]) or find_spec(first)
    for number, part in enumerate(others):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(".".join([first, *others[:number], part]), spec.submodule_search_locations)
    return spec


def _top_names(spec: ModuleSpec) -> set[str] | None:
    """Return the names a module defines at the top level; None if parsing cannot determine them."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # the import reports it better
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.ImportFrom(names=imported) | ast.Import(names=imported):
                names |= {(item.asname or item.name).partition(".")[0] for item in imported}
    return None if names & {"*", "__getattr__"} else names
