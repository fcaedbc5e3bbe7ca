"""README and pages say what is true: commands run, links lead somewhere, options, variables and files exist, examples
parse, tables are the code's.

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
from craton.job.sections import PLACEHOLDERS
from craton.orchestration.local import AGENTS_FILE
from craton.planning import CONSTANTS, plan
from craton.planning.calibration import load_pins, load_runs
from craton.planning.calibration.profiles import software_names
from craton.planning.fitting import LEVELS, NOISE, SCALES
from craton.planning.rates import machine
from craton.planning.report import render_plan
from craton.planning.serving.engine_fitting import is_server_file, load_server_measurements
from craton.telemetry import MARKERS, METRICS, TWINS, RunDirectory, RunState
from craton.telemetry.files import read_lines
from craton.telemetry.rank import LEDGER_KINDS
from craton.telemetry.rundirectory import FOLDERS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PLANNING = DOCS / "planning.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
DAY = date(2026, 11, 15)  # of the plan in docs/planning.md: prices are as old as they were on that day

Generated = Callable[[Path, str, str], None]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def page_commands(*pages: Path) -> list[str]:
    """The commands of pages, each once."""
    text = "".join(text for page in pages for text in blocks(page, "sh")).replace("\\\n", " ")
    lines = [line.partition(" #")[0].strip() for line in text.splitlines() if line.startswith("craton ")]
    return list(dict.fromkeys(lines))


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
    """A folder that a reader could stand in: the examples, and the runs.json and known.yaml of docs/planning.md."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "runs.json").write_text(blocks(PLANNING, "json")[0], encoding="utf-8")
    (known,) = (block for block in blocks(PLANNING, "yaml") if block.startswith("pass_at"))
    (folder / "known.yaml").write_text(known, encoding="utf-8")
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
        for command in page_commands(README, PLANNING)
        if command.split()[1] in SAID and "--json" not in command
    ],
)
def test_a_command_of_readme_and_planning_runs(command: str, checkout: Path) -> None:
    """Those that train are run by `tests/cli/test_run_training.py` and by `make demo`."""
    verb, *arguments = shlex.split(command)[1:]
    said = "best of n" if {"--eval", "--accuracy"} & set(arguments) else SAID[verb]
    said = "HOLDS" if "examples/serve-llama-8b-load.yaml" in arguments else said
    assert said in run_in(checkout, "-m", "craton", verb, *arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_have_verbs_and_options_that_exist(page: Path) -> None:
    for command in page_commands(page):
        found: typing.Any = typer.main.get_command(app)
        words = [word for word in shlex.split(command)[1:] if word not in ("-v", "-vv")]
        while hasattr(found, "commands") and not words[0].startswith("-"):
            found = found.commands[words.pop(0)]
        if not hasattr(found, "commands"):
            found.make_context(command, words)  # parses, runs nothing


def craton_options() -> set[str]:
    """Every option of every verb."""
    options, pending = {"--help", "-h"}, [typing.cast(typing.Any, typer.main.get_command(app))]
    while pending:
        command = pending.pop()
        options |= {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
        pending += getattr(command, "commands", {}).values()
    return options


def test_options_of_verbs_on_the_pages_exist() -> None:
    """`craton serve --admin` in a sentence: the option is one of that verb."""
    root: typing.Any = typer.main.get_command(app)
    missing = []
    for page in PAGES:
        for text in re.findall(r"`craton ([^`\n]+)`", page.read_text(encoding="utf-8")):
            found, words = root, text.split()
            while hasattr(found, "commands") and words and words[0] in found.commands:
                found = found.commands[words.pop(0)]
            known = {option for param in found.params for option in (*param.opts, *param.secondary_opts)} | {
                "-h",
                "--help",
                "-v",
                "-vv",
                "--version",
                "--json",
                "--install-completion",
            }
            if text.split()[0] not in root.commands and re.fullmatch(r"[a-z]+", text.split()[0]):
                missing.append(f"{page.name}: craton {text}")
            missing += [
                f"{page.name}: craton {text}: {word}"
                for word in re.findall(r"(?<!\S)--[a-z][\w-]*", " ".join(words))
                if word not in known
            ]
    assert not missing


def test_options_on_the_pages_exist() -> None:
    """An option in backticks that begins a span is one of ours, or one of a tool that the page is about."""
    known = craton_options() | set(OTHER_TOOLS.split())
    named = {
        (page.name, option)
        for page in PAGES
        for option in re.findall(r"`(--[a-z][\w-]*)", page.read_text(encoding="utf-8"))
    }
    assert not sorted((page, option) for page, option in named if option not in known)


# Options of sbatch, srun, pytest, pip, torchrun, vllm, docker, Prometheus and of our own programs that are not verbs.
OTHER_TOOLS = """
--array --auto-resume --cpus-per-task --exclusive --gres --no-kill --nodes --segment --signal --switches --time
--durations --update-golden --force-conflicts --headless --kubernetes-enable-pod-labels --max-restarts --cases --fault
--cap-add --logprobs-mode
"""


def test_environment_variables_are_documented_and_exist() -> None:
    sources = [path for path in (ROOT / "craton").rglob("*") if path.suffix in (".py", ".toml", ".html", ".js")]
    used = {name for path in sources for name in VARIABLE.findall(path.read_text(encoding="utf-8"))}
    table = set(VARIABLE.findall((DOCS / "environment.md").read_text(encoding="utf-8")))
    assert used - table == set()
    named = {name for page in PAGES for name in VARIABLE.findall(page.read_text(encoding="utf-8"))}
    tests = (ROOT / "tests" / "orchestration").glob("*.py")
    in_tests = {name for path in tests for name in VARIABLE.findall(path.read_text(encoding="utf-8"))}
    placeholders = {f"CRATON_{name.upper()}" for name in PLACEHOLDERS}
    assert named <= used | in_tests | placeholders


VARIABLE = re.compile(r"(?<![A-Z_])CRATON_[A-Z_]*[A-Z](?![A-Z_])")


def test_the_page_of_the_command_line_is_its_help() -> None:
    """`python docs/cli_reference.py` writes it."""
    expected = run_in(
        ROOT,
        "-c",
        "import sys; sys.path.insert(0, 'docs'); import cli_reference; print(cli_reference.page_text(), end='')",
    )
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == expected


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120


def test_the_plan_of_the_readme_can_be_json(checkout: Path) -> None:
    assert "craton plan examples/llama-8b.yaml" in README.read_text(encoding="utf-8")
    found = json.loads(run_in(checkout, "-m", "craton", "plan", "examples/llama-8b.yaml", "--json"))
    assert found["fits"]
    assert found["step_seconds"] == pytest.approx(sum(found["phases"].values()))


def test_the_page_on_planning_shows_what_the_command_prints(generated: Generated) -> None:
    console = Console(width=108, file=io.StringIO())
    render_plan(plan(load_job(ROOT / "examples" / "llama-8b.yaml"), today=DAY), console, DAY)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    paragraphs = "\n".join(lines).split("\n\n")
    shown = paragraphs[: 1 + next(i for i, text in enumerate(paragraphs) if text.startswith("Memory"))]
    generated(PLANNING, "excerpt", "```text\n" + "\n\n".join(shown) + "\n```\n")


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


def test_make_knows_every_target_of_the_pages() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    named = {
        target
        for page in PAGES
        for target in re.findall(r"(?:`|^)make ([a-z][\w-]*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert named <= targets
    assert named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
    missing = [link for link, _ in links if not (page.parent / link).exists()]
    missing += [
        f"{link}#{anchor}"
        for link, anchor in links
        if anchor and anchor not in anchors(page.parent / link if link else page)
    ]
    assert not missing


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    """`compute.py`, `examples/llama-8b.yaml`: by their path, or by their name inside the package or the data."""
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./*-]+\.(?:py|toml|css))`", text)) - set(USERS_FILES.split())
    named |= set(re.findall(r"(?<![\w/.])((?:examples|benchmarks|tests|docs|data)/[\w./-]+\.\w+)", text))
    folders = [folder for folder in (ROOT / "craton").rglob("*") if folder.is_dir()]
    folders += [folder for folder in (ROOT / "tests").rglob("*") if folder.is_dir()]
    homes = [ROOT, ROOT / "data", ROOT / "tests", ROOT / "craton", *folders]
    missing = [name for name in named if not any(any(home.glob(name)) for home in homes)]
    assert not missing


USERS_FILES = "pretrain_gpt.py"  # files on the pages that a user has and Craton does not

EXPORTED = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
KIND = re.compile(r"^kind: (pretrain|sft|dpo|grpo|serve|command)$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_job_files_on_the_pages_are_valid(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A YAML block with a kind is a valid job, unless the errors it causes stand below it. It lies in a clone, beside a
    model that was exported."""
    for entry in ROOT.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    if not (tmp_path / "model").exists():
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(json.dumps(EXPORTED), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    for job, errors in re.findall(r"^```yaml\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", text, re.MULTILINE | re.DOTALL):
        if KIND.search(job) or errors.startswith("error: "):
            assert problems_of(job) == (errors if errors.startswith("error: ") else "")


def problems_of(text: str) -> str:
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
    runs, pins, servers = blocks(ROOT / "docs" / "planning.md", "json")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "runs.json").write_text(runs, encoding="utf-8")
    (tmp_path / "pins.json").write_text(pins, encoding="utf-8")
    assert len(load_runs(tmp_path / "runs.json", "craton")) == 3
    place = machine(gpu("H200-SXM").name, 8, 8, 50e9, 3)
    found = load_pins(tmp_path / "pins.json", place)
    assert set(found) == {"step_overhead_seconds", "gemm_efficiency", "attention_efficiency", "network_slowdown"}
    assert all(0.5 < found[name] < 2.0 for name in found if name != "step_overhead_seconds")
    (tmp_path / "servers.json").write_text(servers, encoding="utf-8")
    (tmp_path / "serve.yaml").symlink_to(ROOT / "examples" / "serve-llama-8b.yaml")
    latencies = {"mean": 0.1}
    summary = {
        "requests": 20,
        "answered": 20,
        "prompt_tokens": 20000,
        "output_tokens": 4000,
        "output_tokens_per_second": 900.0,
        "ttft_seconds": latencies,
        "tpot_seconds": latencies,
    }
    level = {"load": "closed", "concurrency": 8, "requests_per_second": None, "trouble": "", "summary": summary}
    for entry in json.loads(servers):
        (tmp_path / entry["bench"]).write_text(json.dumps({"levels": [level]}), encoding="utf-8")
    assert is_server_file(tmp_path / "servers.json")
    assert len(load_server_measurements(tmp_path / "servers.json", "vllm")) == 9
