"""README and pages say what is true: commands run, links lead somewhere, examples parse, tables are the code's.

What stands between `<!-- NAME: made by tests/test_readme.py -->` and `<!-- end -->` is written by
`pytest tests/test_readme.py --update-golden`.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel
from rich.console import Console

from craton import runs
from craton.agent.processes import start_rank
from craton.cli.app import app
from craton.errors import CratonError
from craton.infrastructure import resolve_cluster
from craton.infrastructure.catalog import gpu
from craton.job import Job, check_job, load_job, parse_job
from craton.job.cluster import ClusterFile
from craton.orchestration.local import AGENTS_FILE
from craton.planning import CONSTANTS, plan
from craton.planning.calibration import load_pins, load_runs
from craton.planning.calibration.fitting import LEVELS, NOISE, SCALES
from craton.planning.calibration.profiles import software_names
from craton.planning.rates import machine
from craton.planning.report import render_plan
from craton.telemetry import MARKERS, METRICS, TWINS, RunDirectory, RunState
from craton.telemetry.files import read_lines
from craton.telemetry.rank import LEDGER_KINDS
from craton.telemetry.rundirectory import FOLDERS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [
    README,
    *(
        DOCS / name
        for name in (
            "architecture.md",
            "testing.md",
            "planning.md",
            "job-file.md",
            "training.md",
            "serving.md",
            "runs.md",
        )
    ),
]
DAY = date(2026, 11, 15)  # of the plan in the README: prices are as old as they were on that day

Generated = Callable[[Path, str, str], None]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def readme_commands() -> list[str]:
    lines = "".join(blocks(README, "sh")).splitlines()
    return [line.partition("#")[0].strip() for line in lines if line.startswith("craton ")]


def page_commands() -> list[str]:
    """Those of pages other than the README, where they may take minutes."""
    lines = "".join(text for page in PAGES[1:] for text in blocks(page, "sh")).splitlines()
    return [line.partition("#")[0].strip() for line in lines if line.startswith("craton ")]


def table_of(page: Path, section: str) -> set[str]:
    """What stands in backticks in the first column of a section's tables."""
    text = page.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return set(re.findall(r"`([^`]+)`", " ".join(cells)))


@pytest.fixture(autouse=True)
def _no_user_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CRATON_CATALOG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that a reader of the README could stand in: the examples, and the runs.json it shows."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "runs.json").write_text(blocks(README, "json")[0], encoding="utf-8")
    return folder


@pytest.fixture
def generated(request: pytest.FixtureRequest) -> Generated:
    """`generated(page, name, text)`: the page's block of that name is this text."""
    update = bool(request.config.getoption("--update-golden"))

    def compare(page: Path, name: str, text: str) -> None:
        whole = page.read_text(encoding="utf-8")
        frame = re.compile(rf"(<!-- {name}: made by tests/test_readme\.py -->\n).*?(<!-- end -->)", re.DOTALL)
        assert frame.search(whole), f"{page.name} has no block {name}"
        expected = frame.sub(lambda match: match[1] + text + match[2], whole)
        if update:
            page.write_text(expected, encoding="utf-8")
            return
        assert whole == expected, f"{page.name} is stale: `pytest --update-golden` and read the diff"

    return compare


def run_in(folder: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=os.environ)
    assert result.returncode == 0, result.stderr
    return result.stdout


SAID = {"validate": "ok: llama-8b", "catalog": "p5en.48xlarge", "plan": "FITS", "calibrate": "wrote profile.json"}


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.slow if "--gpus" in command else ())  # a search for each of 15 clusters
        for command in readme_commands()
        if command.split()[1] in SAID
    ],
)
def test_a_command_of_the_readme_runs(command: str, checkout: Path) -> None:
    """Those that train are run by `tests/cli/test_run_training.py` and by `make demo`."""
    verb, *arguments = shlex.split(command)[1:]
    assert SAID[verb] in run_in(checkout, "-m", "craton", verb, *arguments)


@pytest.mark.parametrize("command", [*page_commands(), *readme_commands()])
def test_a_command_of_a_page_has_verbs_and_options_that_exist(command: str) -> None:
    found: typing.Any = typer.main.get_command(app)
    words = shlex.split(command)[1:]
    while hasattr(found, "commands"):
        found = found.commands[words.pop(0)]
    found.make_context(command, words)  # parses, runs nothing


def test_the_plan_of_the_readme_is_there_as_json(checkout: Path) -> None:
    assert "craton plan examples/llama-8b.yaml" in README.read_text(encoding="utf-8")
    found = json.loads(run_in(checkout, "-m", "craton", "plan", "examples/llama-8b.yaml", "--json"))
    assert found["fits"]
    assert found["step_seconds"] == pytest.approx(sum(found["phases"].values()))


def test_the_readme_shows_what_the_command_prints(generated: Generated) -> None:
    console = Console(width=108, file=io.StringIO())
    render_plan(plan(load_job(ROOT / "examples" / "llama-8b.yaml"), today=DAY), console, DAY)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    paragraphs = "\n".join(lines).split("\n\n")
    shown = paragraphs[: 1 + next(i for i, text in enumerate(paragraphs) if text.startswith("Memory"))]
    generated(README, "excerpt", "```text\n" + "\n\n".join(shown) + "\n```\n")


SMALLER_JOB = """\
name: quickstart
kind: pretrain
model: {name: tiny, layers: 4, hidden: 256, ffn_hidden: 256, heads: 4, vocab: 300, tied_embeddings: true}
data: {path: text.jsonl, tokenizer: "bpe:300", sequence: 32}
train: {global_batch_sequences: 4, steps: 4, precision: fp32, learning_rate: 1e-2}
cluster: local
"""


@pytest.fixture
def smaller_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which the job of the quick start is one of four steps; no process of its runs is left."""
    monkeypatch.setenv("CRATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path / "runs"))
    folder = tmp_path / "examples"
    folder.mkdir()
    (folder / "quickstart.yaml").write_text(SMALLER_JOB, encoding="utf-8")
    text = json.dumps({"text": "the cat sat on the mat and the dog ran to the man"}) + "\n"
    (folder / "text.jsonl").write_text(text * 600, encoding="utf-8")
    yield tmp_path
    for run in runs(tmp_path / "runs"):
        run.stop(now=True)


def test_the_python_of_the_readme_runs(smaller_checkout: Path) -> None:
    (code,) = blocks(README, "python")
    assert len(code.splitlines()) <= 12
    layout, ended, why, url = run_in(smaller_checkout, "-c", code).splitlines()
    assert re.search(r"fp32 [\d.]+ s a step \([\d.]+ to [\d.]+\)$", layout)
    assert re.fullmatch(r"done \d\.\d+", ended)
    assert why.startswith("quickstart is done")
    assert url.startswith("http://127.0.0.1:")
    assert {run.name: run.state for run in runs(smaller_checkout / "runs")} == {
        "quickstart": "done",
        "serve-quickstart": "stopped",
    }


def test_make_knows_the_two_commands() -> None:
    commands = re.findall(r"^make (\w+)", "".join(blocks(README, "sh")), re.MULTILINE)
    assert commands == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in commands:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """`compute.py`, `examples/llama-8b.yaml`: by their path, or by their name inside the package or the data."""
    named = set(re.findall(r"`([\w./*-]+\.(?:py|toml|css))`", page.read_text(encoding="utf-8")))
    folders = [folder for folder in (ROOT / "craton").rglob("*") if folder.is_dir()]
    homes = [ROOT, ROOT / "data", ROOT / "tests", ROOT / "craton", *folders]
    missing = [name for name in named if not any(any(home.glob(name)) for home in homes)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_job_files_on_the_pages_are_told_right(page: Path) -> None:
    """A YAML block is a valid job, unless the errors it causes stand below it."""
    text = page.read_text(encoding="utf-8")
    for job, errors in re.findall(r"^```yaml\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", text, re.MULTILINE | re.DOTALL):
        assert told(job) == errors


def told(text: str) -> str:
    try:
        job = parse_job(text)
        check_job(job, resolve_cluster(job.cluster, job.price).num_gpus)
    except CratonError as error:
        return "".join(f"error: {problem}\n" for problem in getattr(error, "problems", [str(error)]))
    return ""


def test_every_key_of_both_files_is_explained() -> None:
    page = (ROOT / "docs" / "job-file.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"[\w-]+", " ".join(re.findall(r"`([^`\n]+)`", page))))
    assert not {f"{model.__name__}.{key}" for model, key in keys(Job, ClusterFile) if key not in explained}
    assert set(software_names()) <= explained


def keys(*models: type[BaseModel]) -> Iterator[tuple[type[BaseModel], str]]:
    """Every key that can be written anywhere under these models; what code resolves them to is left out."""
    seen, waiting = set(models), list(models)
    while waiting:
        model = waiting.pop()
        for key, field in model.model_fields.items():
            found = sections(field.annotation)
            if model.__name__ not in ("ClusterRef", "NodeCount"):
                yield model, key
            waiting += [section for section in found if section not in seen]
            seen |= found


def sections(annotation: object) -> set[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return {section for argument in typing.get_args(annotation) for section in sections(argument)}


def test_the_constants_on_the_page_are_the_planners(generated: Generated) -> None:
    table = "| constant | prior | spread | meaning |\n|---|--:|--:|---|\n"
    for constant in CONSTANTS:
        table += f"| `{constant.name}` | {constant.prior:g} | {constant.spread:g} | {constant.meaning} |\n"
    generated(ROOT / "docs" / "planning.md", "constants", table)


def test_the_levels_on_the_page_are_the_fits(generated: Generated) -> None:
    table = "| effect on constants | share of the spread | | effect on the step | σ |\n|---|--:|---|---|--:|\n"
    left = [f"{name} | {share:g}" for name, share in LEVELS.items()]
    right = [*(f"{name} | {deviation:g}" for name, deviation in SCALES.items()), f"noise | {NOISE:g}"]
    assert len(left) == len(right)
    rows = "".join(f"| {one} | | {other} |\n" for one, other in zip(left, right, strict=True))
    generated(ROOT / "docs" / "planning.md", "levels", table + rows)


def test_the_metrics_on_the_page_are_the_vocabulary(generated: Generated) -> None:
    table = "| name | unit | scope | kind | meaning |\n|---|---|---|---|---|\n"
    for name, metric in METRICS.items():
        if name.startswith("plan_") and name.removeprefix("plan_") in TWINS:
            continue
        twin = name.removeprefix("run_") in TWINS
        names = f"`{name.replace('run_', 'plan_', 1)}`, `{name}`" if twin else f"`{name}`"
        label = f" (label `{metric.label}`)" if metric.label else ""
        table += f"| {names} | {metric.unit} | {metric.scope} | {metric.kind} | {metric.help}{label} |\n"
    generated(DOCS / "runs.md", "metrics", table)


def test_the_tables_of_a_run_are_the_codes() -> None:
    runs = DOCS / "runs.md"
    assert table_of(runs, "The ledger") == set(LEDGER_KINDS)
    assert table_of(runs, "States") == {*typing.get_args(RunState), *MARKERS}
    files = {name.partition("/")[0] for name in table_of(runs, "The directory")}
    assert {*FOLDERS, *MARKERS, "job.yaml", "plan.json", "launch.json", AGENTS_FILE} <= files
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "craton").rglob("*.py"))
    events = table_of(runs, "Events")
    assert set(re.findall(r'(?:\.event|_event|\.warn)\(\s*"(\w+)"', source)) <= events
    assert all(f'"{name}"' in source for name in events)
    variables = set(re.findall(r'"([A-Z]+(?:_[A-Z]+)+|RANK)": ', inspect.getsource(start_rank)))
    assert variables - {"PYTHONUNBUFFERED"} <= table_of(runs, "Agents and ranks")


def test_the_families_on_the_page_are_the_decoders() -> None:
    huggingface = pytest.importorskip("craton.ml.models.huggingface")
    text = (DOCS / "training.md").read_text(encoding="utf-8").partition("\n### Kernels\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(huggingface.FAMILIES)


def test_the_python_of_the_page_on_runs_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.create(tmp_path, "mine")
    monkeypatch.setenv("CRATON_RUN", str(run.path))
    (code,) = blocks(DOCS / "runs.md", "python")
    run_in(tmp_path, "-c", code)
    (line,) = read_lines(run.metrics_path("node-0"))[0]
    assert (line["step"], line["run_loss"], line["run_accuracy"]) == (1, 2.5, 0.4)


def test_calibration_files_on_the_page_are_read(tmp_path: Path) -> None:
    runs, pins = blocks(ROOT / "docs" / "planning.md", "json")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "runs.json").write_text(runs, encoding="utf-8")
    (tmp_path / "pins.json").write_text(pins, encoding="utf-8")
    assert len(load_runs(tmp_path / "runs.json", "craton")) == 3
    place = machine(gpu("H200-SXM").name, 8, 8, 50e9, 3)
    found = load_pins(tmp_path / "pins.json", place)
    assert set(found) == {"step_overhead_seconds", "gemm_efficiency", "attention_efficiency", "network_slowdown"}
    assert all(0.5 < found[name] < 2.0 for name in found if name != "step_overhead_seconds")
