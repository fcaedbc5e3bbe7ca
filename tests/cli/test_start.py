"""How the command starts and ends: fast, with the right exit code, and without ugly traces."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import craton

ROOT = Path(__file__).parents[2]
HEAVY = {"numpy", "scipy", "plotly", "pydantic", "yaml", "torch"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "craton", *arguments], capture_output=True, text=True, check=False)


def processor_seconds() -> float:
    """Of all processes that this one has started and that have ended: other tests do not count, as on the clock."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_takes_under_four_tenths_of_a_second() -> None:
    seconds = []
    for _ in range(5):
        start = processor_seconds()
        result = run("--help")
        seconds.append(processor_seconds() - start)
        assert result.returncode == 0
    assert min(seconds) < 0.4
    for verb in ("plan", "run", "ps", "logs", "stop", "resume", "export", "sample", "data", "validate", "bench"):
        assert verb in result.stdout


def test_nothing_heavy_is_imported_at_the_start() -> None:
    code = "import sys, craton, craton.cli; print(*{name.partition('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(result.stdout.split())


def test_the_python_face_is_the_one_the_command_uses() -> None:
    for name in craton.__all__:
        assert getattr(craton, name) is not None
    assert set(craton.__all__) <= set(dir(craton))
    with pytest.raises(AttributeError, match="has no attribute 'plann'; it has"):
        craton.plann  # noqa: B018


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
            output, errors = process.communicate(timeout=20)
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
    assert "craton/job/presets.toml" in tables
    assert tables <= inside
