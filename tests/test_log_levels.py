"""Log levels: `-v`, `CRATON_LOG`, and a wrong value of it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from craton.log_levels import LogLevelError, configure_logging, parse_levels


@pytest.fixture(autouse=True)
def _levels_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CRATON_LOG", "")
    root = logging.getLogger("craton")
    handlers, level, propagate = list(root.handlers), root.level, root.propagate
    yield
    root.handlers[:], root.propagate = handlers, propagate
    root.setLevel(level)
    logging.getLogger("craton.orchestration.slurm").setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("", {"craton": "warning"}),
        ("DEBUG", {"craton": "debug"}),
        ("info, orchestration.slurm=debug", {"craton": "info", "craton.orchestration.slurm": "debug"}),
        ("craton.ml=error", {"craton": "warning", "craton.ml": "error"}),
        ("craton=info", {"craton": "info"}),
    ],
)
def test_levels_are_read(text: str, levels: dict[str, str]) -> None:
    assert parse_levels(text) == levels


@pytest.mark.parametrize("text", ["loud", "=debug", "info,ml=", "1"])
def test_a_wrong_level_names_what_is_allowed(text: str) -> None:
    with pytest.raises(LogLevelError, match=r"debug, info, warning, error"):
        parse_levels(text)


def test_a_package_may_log_more_than_the_others() -> None:
    os.environ["CRATON_LOG"] = "error,orchestration.slurm=debug"
    configure_logging()
    assert logging.getLogger("craton.orchestration.slurm.tools").isEnabledFor(logging.DEBUG)
    assert not logging.getLogger("craton.planning.planner").isEnabledFor(logging.WARNING)


def test_verbosity_is_inherited_by_child_processes() -> None:
    configure_logging(verbosity=2)
    assert os.environ["CRATON_LOG"] == "debug"
    configure_logging(verbosity=1)
    assert os.environ["CRATON_LOG"] == "info"


def test_an_agent_survives_a_wrong_level(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ["CRATON_LOG"] = "loud"
    configure_logging(is_strict=False)
    assert "warning: CRATON_LOG=loud" in capsys.readouterr().err
    assert logging.getLogger("craton").level == logging.WARNING


JOB = """\
kind: pretrain
model: llama-3.2-1b
data: {sequence: 4096}
train: {global_batch_sequences: 8, steps: 10}
cluster: p5.48xlarge
layout: {fsdp: 8}
"""


def craton(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    command = [sys.executable, "-m", "craton", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_command_logs_to_stderr_and_prints_the_same(tmp_path: Path) -> None:
    """`-v` after the verb is `-v` before it; the result on stdout stays as it is."""
    job = tmp_path / "job.yaml"
    job.write_text(JOB, encoding="utf-8")
    quiet = craton("plan", str(job), "--json", CRATON_LOG="")
    assert "INFO" not in quiet.stderr
    for words in (("-v", "plan", str(job), "--json"), ("plan", str(job), "--json", "-v")):
        verbose = craton(*words, CRATON_LOG="")
        assert " INFO craton.planning.planner: searched layouts on p5.48xlarge x 1 in " in verbose.stderr
        assert verbose.stdout == quiet.stdout


def test_the_command_refuses_a_wrong_level() -> None:
    wrong = craton("catalog", CRATON_LOG="loud")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "error: CRATON_LOG=loud: 'loud' is not a log level" in wrong.stderr


def test_the_version_is_that_of_the_package() -> None:
    from craton import __version__

    assert craton("--version").stdout == f"craton {__version__}\n"


def test_the_shell_completes_verbs_and_options() -> None:
    script = Path(sys.executable).parent / "craton"
    if not script.exists():
        pytest.skip("Craton is on the path and not installed: there is no command to complete")

    def completed(line: str) -> list[str]:
        request = {"_CRATON_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        answer = subprocess.run([script], env={**os.environ, **request}, capture_output=True, text=True, check=True)
        return answer.stdout.split()

    assert completed("craton va") == ["validate"]
    assert completed("craton serve --prec") == ["--precision"]
