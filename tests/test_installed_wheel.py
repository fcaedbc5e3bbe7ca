"""The wheel as a user gets it: in an environment with nothing but its required packages.

The environment is a real one with the real wheel. Its required packages are linked from the environment of the tests
instead of being downloaded, so that no network is needed; packages of extras are not there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SITE = Path(sysconfig.get_paths()["purelib"])
JOB = "examples/quickstart.yaml"
CLIENT = '''\
"""What a user's own program does with Craton; it is checked with mypy --strict."""

import craton
from craton import CratonError, Job, Plan, Run

job: Job = craton.load_job("job.yaml")
plan: Plan = craton.plan(job)
seconds: float = plan.step_seconds
run: Run = craton.run(job, name="mine")
state: str = run.wait().state
names: list[str] = [run.name for run in craton.runs()]
with craton.serve("mine", precision="fp32") as server:
    url: str = server.url
try:
    run.resize(2)
except CratonError as error:
    print(error, craton.__version__)
'''


def required(name: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """A distribution and all that it requires, without what only extras ask for."""
    names: set[str] = set()
    pending = [(name, extras)]
    while pending:
        current, asked = pending.pop()
        for line in distribution(current).requires or []:
            requirement = Requirement(line)
            contexts = [{"extra": extra} for extra in asked] or [{"extra": ""}]
            if requirement.marker is not None and not any(requirement.marker.evaluate(each) for each in contexts):
                continue
            if requirement.name not in names:
                try:
                    distribution(requirement.name)
                except PackageNotFoundError:
                    continue
                names.add(requirement.name)
                pending.append((requirement.name, frozenset(requirement.extras)))
    return names


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and its required packages."""
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in required("craton"):
        for file in distribution(name).files or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(SITE / top)
    python = folder / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)],
        check=True,
    )
    return python


def craton(python: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CRATON_"))}
    environment |= {"HOME": str(folder), "COLUMNS": "200"}
    command = [str(python.parent / "craton"), *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture
def user_folder(tmp_path: Path) -> Path:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


# Verb → the module that is missing, or the exit code: 0 works, 2 refuses for a reason of its own (no run of that name).
QUICK: dict[tuple[str, ...], str | int] = {
    ("run", JOB): "torch",
    ("serve", "qwen3-0.6b", "--random-weights"): "torch",
    ("ui", "--no-open"): "starlette",
    ("validate", JOB): 0,
}
OTHERS: dict[tuple[str, ...], str | int] = {
    ("plan", JOB): 0,
    ("plan", JOB, "--trace"): "torch",
    ("run", JOB, "--dry-run"): 0,
    ("ps",): 0,
    ("logs", "mine"): 2,
    ("why", "mine"): 2,
    ("top", "mine"): 2,
    ("stop", "mine"): 2,
    ("rm", "mine"): 2,
    ("resume", "mine"): 2,
    ("resize", "mine", "2"): 2,
    ("chaos", "mine", "--kill", "rank=0@step=1"): 2,
    ("export", "examples", "out"): 2,
    ("sample", "examples", "--prompt", "x"): 2,
    ("doctor",): 0,
    ("heal", "mine"): 2,
    ("catalog",): 0,
    ("calibrate", "runs.json"): 2,
    ("data", "tokenize", "stdlib", "--to", "out", "--train-bpe", "300"): "tokenizers",
    ("cluster", "discover", "--from", "kubernetes"): "kr8s",
    ("cluster", "discover", "--from", "ec2"): "boto3",
    ("observe", "node", "--once"): 0,
    ("observe", "render", "--out", "rendered"): 0,
    ("bench", "recover"): "torch",
    ("bench", "serve", "http://127.0.0.1:9"): "aiohttp",
    ("--version",): 0,
}


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        *QUICK.items(),
        *(pytest.param(words, outcome, marks=pytest.mark.slow) for words, outcome in OTHERS.items()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_verb_works_or_names_what_it_needs(
    words: tuple[str, ...], outcome: str | int, clean: Path, user_folder: Path
) -> None:
    ended = craton(clean, user_folder, *words)
    assert "Traceback" not in ended.stderr
    assert "ModuleNotFoundError" not in ended.stderr + ended.stdout
    if isinstance(outcome, int):
        assert ended.returncode == outcome, ended.stderr
        assert "which is not installed" not in ended.stderr
        return
    assert ended.returncode == 2
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("error: "))
    assert outcome in line
    assert "install" in line
    assert not list(user_folder.glob("runs/*")), "something was started"


def test_a_wheel_has_its_data_types_and_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "craton/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.startswith("craton/data/") for name in names)
    (metadata,) = (name for name in names if name.endswith("/METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text


@pytest.mark.slow
def test_a_client_is_checked_strictly_against_the_wheel(clean: Path, tmp_path: Path) -> None:
    """mypy sees the types of the installed package, and a wrong use of it."""
    client = tmp_path / "client.py"
    client.write_text(CLIENT, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(clean), "client.py"]
    good = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stdout
    client.write_text(CLIENT.replace("seconds: float = plan", "seconds: str = plan"), encoding="utf-8")
    bad = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Incompatible types in assignment" in bad.stdout
