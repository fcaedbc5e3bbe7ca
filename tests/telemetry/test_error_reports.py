"""Why a process ended, read from its exception or from the end of its log."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reported_tracebacks import ENDINGS, Ending

from craton.ml.data.errors import DataError
from craton.telemetry.error_reports import ErrorReport, read_error, report_exception

MAX_BYTES = 4096  # of a report in an event


@pytest.mark.parametrize("ending", ENDINGS, ids=[ending.name for ending in ENDINGS])
def test_the_end_of_a_log_of_an_issue(ending: Ending) -> None:
    report = read_error("step 11 loss 2.4\nstep 12 loss 2.3\n" + ending.text)
    assert report is not None
    assert (report.type, report.user_frame, report.is_echo) == (ending.type, ending.user_frame, ending.is_echo), report
    assert ending.message in report.message
    assert report.source == "log"
    assert ErrorReport.from_fields(json.loads(json.dumps(report.to_fields()))) == report


def test_there_are_many_different_issues() -> None:
    assert len({ending.source for ending in ENDINGS}) >= 25


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bash: line 1: trainit: command not found\n", "bash: line 1: trainit: command not found"),
        ("step 1\nstep 2\ndisk check failed: giving up\nstopping\n", "disk check failed: giving up"),
        ("loading\nBus error (core dumped)\n", "Bus error (core dumped)"),
        ("Epoch 3\nKilled\n", "Killed"),
        ("ready\nerror: port 8000 is in use by process 12\n", "port 8000 is in use by process 12"),
        ("only progress\n", "only progress"),
        ("\x1b[31mFATAL: no config\x1b[0m\n", "FATAL: no config"),
        (" 12%|##   | 3/25 [00:01<00:08, 2.7it/s]\nout of patience\n", "out of patience"),
    ],
)
def test_programs_that_are_not_python(text: str, message: str) -> None:
    report = read_error(text)
    assert report is not None
    assert (report.type, report.message) == ("", message)


def test_c_plus_plus_reports_what_was_thrown() -> None:
    report = read_error("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n")
    assert report is not None
    assert (report.type, report.message) == ("std::bad_alloc", "std::bad_alloc")


@pytest.mark.parametrize("text", ["", "\n\n", "   \n"])
def test_an_empty_log_gives_no_report(text: str) -> None:
    assert read_error(text) is None


PROGRAMS = {
    "worker": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def work():\n    raise ValueError('bad row')\n"
        "def main():\n    try:\n        ThreadPoolExecutor(1).submit(work).result()\n"
        "    except ValueError as error:\n        raise RuntimeError('cannot train') from error\n"
        "main()\n",
        ("ValueError", "bad row", "program.py:3 in work", "RuntimeError: cannot train"),
    ),
    "group": (
        "def main():\n    raise ExceptionGroup('two tasks', [OSError(28, 'No space left on device', '/x')])\nmain()\n",
        ("OSError", "[Errno 28] No space left on device: '/x'", "program.py:2 in main", ""),
    ),
    "syntax": ("def main(:\n    pass\n", ("SyntaxError", "invalid syntax", "program.py:1", "")),
    "crash": (
        "import faulthandler, os, signal\nfaulthandler.enable()\n"
        "def work():\n    os.kill(os.getpid(), signal.SIGABRT)\nwork()\n",
        ("Fatal Python error", "Aborted", "program.py:4 in work", ""),
    ),
    "ignored": (
        "class Odd:\n    def __del__(self):\n        raise KeyError('late')\n"
        "def main():\n    odd = Odd()\n    raise TypeError('early')\nmain()\n",
        ("TypeError", "early", "program.py:6 in main", ""),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_python_itself_prints(name: str, tmp_path: Path) -> None:
    program, (kind, message, frame, outer) = PROGRAMS[name]
    path = tmp_path / "program.py"
    path.write_text(program)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    report = read_error(done.stderr)
    assert report is not None, done.stderr
    assert (report.type, report.message.partition("\n")[0], report.outer) == (kind, message, outer), done.stderr
    assert report.user_frame == (f"{tmp_path}/{frame}" if frame else ""), done.stderr


# Text from bytes: the table of all Unicode characters takes seconds to build.
TEXTS = st.binary(max_size=200).map(lambda data: data.decode(errors="replace"))


@given(TEXTS)
def test_any_text_is_read(text: str) -> None:
    check_bounds(read_error(text))


PARTS = [line for ending in ENDINGS for line in ending.text.splitlines()]


@given(st.lists(st.one_of(st.sampled_from(PARTS), TEXTS), max_size=40), st.integers(0, 400))
def test_any_mixture_of_logs_is_read(lines: list[str], cut: int) -> None:
    check_bounds(read_error("\n".join(lines)[cut:]))


def test_a_huge_log_is_read_from_its_end() -> None:
    text = "Traceback (most recent call last):\n" + "x" * 200_000 + "\n" + '  File "a.py", line 1, in f\n' * 20_000
    check_bounds(read_error(text))
    check_bounds(read_error("\n".join([text, *["[rank0]: Traceback (most recent call last):"] * 1000])))


def check_bounds(report: ErrorReport | None) -> None:
    if report is not None:
        assert len(json.dumps(report.to_fields()).encode()) < 4 * MAX_BYTES
        assert "\n" not in report.line
        assert report.type or report.message


def test_an_exception_keeps_its_root_and_frame() -> None:
    def user() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/fsx/cache")

    try:
        try:
            user()
        except OSError as error:
            raise DataError("data.source mine:samples: sample 3 raised OSError: [Errno 28] No space left") from error
    except DataError as error:
        report = report_exception(error, phase="data", step=12)
    assert (report.type, report.errno, report.path) == ("OSError", errno.ENOSPC, "/fsx/cache")
    assert report.user_frame.endswith(" in user")
    assert report.user_frame.startswith(__file__)
    assert (report.phase, report.step, report.is_echo) == ("data", 12, False)
    assert report.outer.startswith("DataError: data.source mine:samples")


@pytest.mark.parametrize(("code", "words"), [(0, "code 0"), (None, "code 0"), (3, "code 3"), ("no data", "no data")])
def test_an_exit_is_named(code: object, words: str) -> None:
    try:
        sys.exit(code)  # type: ignore[arg-type]
    except SystemExit as error:
        report = report_exception(error)
    assert report.type == "SystemExit"
    assert words in report.message


def test_an_exception_that_cannot_be_printed() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    report = report_exception(OddError())
    assert report.type == "OddError"


@given(st.none() | st.booleans() | st.integers() | TEXTS | st.lists(TEXTS, max_size=3) | st.dictionaries(TEXTS, TEXTS))
def test_any_field_of_an_event_is_read(document: object) -> None:
    ErrorReport.from_fields(document)
    ErrorReport.from_fields({"type": document, "message": document, "errno": document, "step": document})
