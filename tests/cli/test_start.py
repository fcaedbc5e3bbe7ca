"""How the command starts and ends: fast, with the right exit code, and without ugly traces."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner
from waiting import PATIENCE_SECONDS

import craton.cli
from craton.agent.processes import free_port
from craton.api import server, start_steps
from craton.api import start as start_module
from craton.cli.app import app, with_verb_only
from craton.orchestration import StartError
from craton.orchestration.start import RunStart, path

ROOT = Path(__file__).parents[2]
STEPS = ["draft_start", "check_start", "submit_start"]  # of the one path from a job to a started run
HEAVY = {"numpy", "scipy", "plotly", "pydantic", "yaml", "torch"}
LIBRARY = ("-c", "import typer, typer.rich_utils")  # what any command line of this kind has to import


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "craton", *arguments], capture_output=True, text=True, check=False)


def imported(*arguments: str) -> tuple[set[str], str]:
    """The modules that a Python with these arguments has imported by its end, and what it wrote."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}, done.stdout


def packages(modules: set[str]) -> set[str]:
    """Of these modules, without those of Python itself."""
    return {name.partition(".")[0] for name in modules} - sys.stdlib_module_names


def test_help_names_the_verbs_and_imports_little_beside_its_library() -> None:
    """No package, and 1.2 times as many modules. How long both take: `benchmarks/plan_speed.py`."""
    modules, text = imported("-m", "craton", "--help")
    library, _ = imported(*LIBRARY)
    assert packages(modules) - packages(library) == {"craton"}
    assert len(modules) < 1.3 * len(library), sorted(modules - library)
    for verb in ("plan", "run", "ps", "logs", "stop", "resume", "export", "sample", "data", "validate", "bench"):
        assert verb in text


def test_what_stands_in_brackets_is_in_the_help_of_every_verb() -> None:
    """rich takes `[default: cost]` for a style, and shows nothing of it, unless its bracket is escaped."""
    seen = 0
    for name, command in commands(typer.main.get_command(app)):
        for parameter in command.params:
            text = getattr(parameter, "help", None) or ""
            assert Text.from_markup(text).plain == text.replace("\\[", "["), f"{name}: {text}"
            seen += "\\[default: " in text
    assert seen >= 20


def commands(command: Any, name: str = "craton") -> Iterator[tuple[str, Any]]:
    yield name, command
    for verb, each in getattr(command, "commands", {}).items():
        yield from commands(each, f"{name} {verb}")


def test_a_verb_is_built_alone_and_is_the_same() -> None:
    whole = typer.main.get_command(app)
    for name, command in cast(Any, whole).commands.items():
        alone = cast(Any, typer.main.get_command(with_verb_only(["-v", name, "--help"])))
        assert name in alone.commands
        assert [each.name for each in alone.commands[name].params] == [each.name for each in command.params]
    assert set(cast(Any, typer.main.get_command(with_verb_only(["plan", "run"]))).commands) == {"plan"}
    for arguments in ([], ["--help"], ["plann"], ["data", "plan"]):
        assert with_verb_only(arguments) is app


def test_garbage_is_collected_again_after_a_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["craton", "plan", "missing.yaml"])
    with pytest.raises(SystemExit):
        craton.cli.main()
    assert gc.isenabled()


def test_nothing_heavy_is_imported_at_the_start() -> None:
    code = "import sys, craton, craton.cli; print(*{name.partition('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(result.stdout.split())


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, RunStart]]:
    """The steps from a job to a started run as they are taken, with the start they worked on; the last one refuses."""
    taken: list[tuple[str, RunStart]] = []
    draft, check = path.draft_start, path.check_start

    def draft_start(*arguments: Any, **options: Any) -> RunStart:
        taken.append(("draft_start", draft(*arguments, **options)))
        return taken[-1][1]

    def check_start(start: RunStart) -> None:
        taken.append(("check_start", start))
        check(start)

    def submit_start(start: RunStart) -> None:
        taken.append(("submit_start", start))
        raise StartError("not today")

    for step in (draft_start, check_start, submit_start):
        for module in (path, start_module, start_steps, server):
            if hasattr(module, step.__name__):
                monkeypatch.setattr(module, step.__name__, step)
    return taken


@pytest.mark.parametrize("verb", ["run", "serve"])
def test_the_python_face_is_the_one_the_command_uses(
    verb: str, steps: list[tuple[str, RunStart]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "runs"))
    job = tmp_path / "job.yaml"
    job.write_text("name: mine\nkind: command\ncommand: ['true']\ncluster: local\n", encoding="utf-8")
    port = free_port()
    if verb == "run":
        words = ["run", str(job), "--name", "other"]
        start = partial(craton.run, job, "other")
    else:
        words = ["serve", "qwen3-0.6b", "--random-weights", "--port", str(port), "--max-length", "64"]
        start = partial(craton.serve, "qwen3-0.6b", port=port, initialize="random", max_length=64)
    assert "not today" in str(CliRunner().invoke(app, [*words, "--yes"]).exception)
    by_command = list(steps)
    steps.clear()
    with pytest.raises(StartError, match="not today"):
        start()
    assert [name for name, _ in steps] == [name for name, _ in by_command] == STEPS
    ours, theirs = steps[-1][1], by_command[-1][1]
    assert (ours.draft.job, ours.root) == (theirs.draft.job, theirs.root)
    assert replace(ours.draft.launch, master_port=1) == replace(theirs.draft.launch, master_port=1)


@pytest.mark.parametrize(
    "arguments", [["--nonsense"], ["nonsense"], ["validate"], ["validate", "--nonsense", "job.yaml"]]
)
def test_a_wrong_command_line_is_bad_input(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_an_error_is_one_line_and_the_same_in_json() -> None:
    result = run("validate", "no-such-job.yaml", "--json")
    assert result.returncode == 2
    assert result.stderr == "error: no-such-job.yaml: no such file\n"
    assert json.loads(result.stdout)["error"] == "no-such-job.yaml: no such file"


def test_interrupting_prints_nothing_ugly(tmp_path: Path) -> None:
    pipe = tmp_path / "job.yaml"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "craton", "validate", str(pipe)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        writer = os.open(pipe, os.O_WRONLY)  # returns when the command has opened the file, and so is at work
        try:
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            os.close(writer)
    assert (process.returncode, output, errors) == (130, "", "")


def test_the_wheel_carries_its_tables(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = [file for file in (ROOT / "craton").rglob("*.*") if file.suffix not in (".py", ".pyc")]
    tables = {str(file.relative_to(ROOT)) for file in files}
    assert "craton/job/model/presets.toml" in tables
    assert tables <= inside
