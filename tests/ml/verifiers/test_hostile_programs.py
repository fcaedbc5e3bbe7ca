"""Hostile programs under the verifier `code`: each costs its own sample at most, and nothing is left behind."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hostile_programs import HOSTILE
from verifier_pools import (
    ISOLATIONS,
    choose_isolation,
    needs_isolation,
    open_pool,
    processes_below,
    processes_with,
    sample,
)
from waiting import wait_until

import craton
from craton.ml.verifiers import IsolationError, Verdict, VerifierSample
from craton.ml.verifiers.sandbox import Isolation, IsolationReport, isolation_of

MEMORY = "256MiB"
PACKAGE = Path(craton.__path__[0])


def is_alone(pid: int) -> bool:
    return not processes_below(pid)


def placed(source: str, mark: str, file: Path, port: int) -> VerifierSample:
    words = {"MARK": mark, "FILE": str(file), "PORT": str(port), "SOCKET": mark}
    for word, value in words.items():
        source = source.replace(word, value)
    return sample(source, answer="assert f() == 1")


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_hostile_program_costs_its_own_sample(
    isolation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_isolation(isolation, monkeypatch)
    monkeypatch.setenv("OWN_KEY", "SECRET")
    mark = f"mark-{isolation}-{tmp_path.name}-{id(tmp_path)}"
    outside = tmp_path / "written"
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as named:
        listener.setblocking(False)
        named.bind(f"\0{mark}")
        named.listen()
        named.setblocking(False)
        port = listener.getsockname()[1]
        verdicts: dict[str, Verdict] = {}
        # A short limit for those that may need all of it; a long one where a slow machine must not change the verdict.
        for limit in (1, 60):
            samples = {
                name: placed(source, mark, outside, port)
                for name, (source, allowed) in HOSTILE.items()
                if (None in allowed) == (limit == 1)
            }
            with open_pool({"verifier": "code"}, limit=limit, memory=MEMORY, workers=8) as pool:
                verdicts.update(zip(samples, pool.verify(list(samples.values())), strict=True))
                wait_until(partial(is_alone, pool.supervisor_pid), "processes were left behind")
        for server in (listener, named):
            with pytest.raises(BlockingIOError):
                server.accept()
    wrong = {name: verdicts[name] for name, (_, allowed) in HOSTILE.items() if verdicts[name].reward not in allowed}
    assert not wrong
    assert all(verdict.error for verdict in verdicts.values() if verdict.reward is None)
    assert not processes_with(mark)
    assert not outside.exists()


@needs_isolation
@pytest.mark.parametrize("isolation", ["first found", pytest.param("namespaces", marks=pytest.mark.slow)])
def test_programs_read_input_and_print(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_isolation(isolation, monkeypatch)
    pairs = [{"input": "1 2\n", "output": "3"}, {"input": "x" * 200_000, "output": "long"}]
    adds = "text = input()\nprint('long' if len(text) > 100 else sum(map(int, text.split())))"
    endless = "while True: print('x' * 100000)"
    with open_pool({"verifier": "code", "field": "tests"}) as pool:
        verdicts = pool.verify(
            [sample(f"```python\n{text}\n```", tests=pairs) for text in (adds, "print(3)", endless, "1/0")]
        )
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 0.0, 0.0]


@needs_isolation
@pytest.mark.parametrize("isolation", ["first found", pytest.param("namespaces", marks=pytest.mark.slow)])
def test_programs_may_use_what_is_installed(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_isolation(isolation, monkeypatch)
    uses = [
        "import numpy; f = lambda: int(numpy.ones(3).sum() - 2)",
        "import tempfile\ndef f():\n    with tempfile.TemporaryFile() as file: return file.write(b'x')",
        "from multiprocessing import Lock, Process\nl = Lock()\ndef g(): pass\n"
        "p = Process(target=g); p.start(); p.join(); f = lambda: 1",
        "import subprocess, sys\ndef f(): return int(subprocess.check_output([sys.executable, '-c', 'print(1)']))",
    ]
    with open_pool({"verifier": "code"}) as pool:
        verdicts = pool.verify([sample(text, answer="assert f() == 1") for text in uses])
    assert [(verdict.reward, verdict.error) for verdict in verdicts] == [(1.0, "")] * len(uses)


def test_without_isolation_processes_and_folders_are_still_removed(tmp_path: Path) -> None:
    mark = f"mark-off-{id(tmp_path)}"
    names = ("sleeps", "traps signals", "leaves a daemon", "forks twice", "eats memory", "exits early")
    samples = [placed(HOSTILE[name][0], mark, tmp_path / "x", 1) for name in names]
    writes = sample(
        "import os\nopen('x', 'w').close(); os.mkdir('d'); os.chmod('d', 0)\ndef f(): return 1",
        answer="assert f() == 1",
    )
    before = set(Path(tempfile.gettempdir()).glob("craton-verify-*"))
    with open_pool({"verifier": "code"}, limit=2, memory=MEMORY, workers=4, sandbox="off") as pool:
        verdicts = pool.verify([*samples, writes])
    assert all(verdict.reward in HOSTILE[name][1] for name, verdict in zip(names, verdicts, strict=False))
    assert verdicts[-1].reward == 1.0
    assert not processes_with(mark)
    assert not set(Path(tempfile.gettempdir()).glob("craton-verify-*")) - before


@needs_isolation
@pytest.mark.parametrize("isolation", ["namespaces", pytest.param("first found", marks=pytest.mark.slow)])
def test_answers_are_verified_by_a_package_that_is_not_installed(
    isolation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose PYTHONPATH names the sources and a folder that pip has installed into."""
    choose_isolation(isolation, monkeypatch)
    shutil.copytree(PACKAGE, tmp_path / "sources" / "craton", ignore=shutil.ignore_patterns("__pycache__"))
    program = (
        f"import sys; sys.path[:0] = [{str(tmp_path / 'sources')!r}, {str(Path(__file__).parent)!r}, "
        f"{str(Path(__file__).parents[2])!r}]\n"
        "import craton\n"
        "from verifier_pools import open_pool, sample\n"
        "with open_pool({'verifier': 'exact'}, {'verifier': 'math'}) as pool:\n"
        "    print(craton.__path__[0], pool.verify([sample('4', answer='4')])[0].reward)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stdout == f"{tmp_path / 'sources' / 'craton'} 2.0\n", result.stderr


@needs_isolation
def test_tests_that_are_not_python_are_no_fault_of_the_program() -> None:
    with open_pool({"verifier": "code"}) as pool:
        broken, torn, deep, fine = pool.verify(
            [sample("def f(): return 1", answer=text) for text in ("assert f( == 1", '["assert', "[" * 100_000)]
            + [sample("def f(): return 1", answer="assert f() == 1")]
        )
    assert [verdict.reward for verdict in (broken, torn, deep, fine)] == [None, None, None, 1.0]
    assert "is not Python" in broken.error


@needs_isolation
def test_regex_and_schemas_of_the_data_cannot_hang_the_pool() -> None:
    terms = ({"verifier": "regex", "field": "pattern"},)
    slow = sample("a" * 50 + "!", pattern="(a+)+$")
    fine = sample("a", pattern="a")
    with open_pool(*terms, limit=1) as pool:
        verdicts = pool.verify([slow, fine, slow, fine, fine])
    assert [verdict.reward for verdict in verdicts] == [None, 1.0, None, 1.0, 1.0]


def test_no_isolation_is_refused_with_what_to_do() -> None:
    report = IsolationReport(None, {Isolation.BUBBLEWRAP: "not installed", Isolation.NAMESPACES: "unshare: denied"}, 0)
    with pytest.raises(
        IsolationError, match=r"bubblewrap: not installed; namespaces: unshare: denied.*apt-get install"
    ):
        isolation_of(report)
