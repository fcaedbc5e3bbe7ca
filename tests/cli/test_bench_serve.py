"""`craton bench serve`: the report, JSON, the page, and its mistakes, against a real server written for these tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai_like_server import Server, openai_like_server

from craton.cli import main

QUICK = ("--requests", 6, "--input", 20, "--output", 3, "--warmup", 1)


class Command:
    """Runs the command in this process, as the console script does, in a terminal of 80 columns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["craton", "bench", "serve", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        output = self.capsys.readouterr()
        return int(caught.value.code or 0), output.out, output.err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with openai_like_server() as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    running.behaviour.received.clear()
    running.behaviour.fails = {}
    running.behaviour.key = None
    return running


def test_the_report(command: Command, server: Server) -> None:
    code, output, errors = command(server.url, *QUICK, "--slo", "ttft=5s,itl=5s")
    assert (code, errors) == (0, "")
    assert f"tiny at {server.url}/v1/completions" in output
    assert "6 of 6 answered" in output
    assert "100% of all" in output
    assert "Latencies count from when a request was due" in output


def test_json_is_one_document(command: Command, server: Server) -> None:
    code, output, errors = command(server.url, *QUICK, "--rate", 200, "--burstiness", 0.5, "--seed", 7, "--json")
    assert (code, errors) == (0, "")
    assert output.count("\n") == 1
    document = json.loads(output)
    assert document["load"] == "200 requests/s, burstiness 0.5"
    assert (document["seed"], document["input"], document["output"]) == (7, "20", "3")
    assert document["summary"]["answered"] == 6
    assert document["summary"]["output_tokens"] == 18


def test_the_page(command: Command, server: Server, tmp_path: Path) -> None:
    page = tmp_path / "deep" / "report.html"
    code, output, _ = command(server.url, *QUICK, "--html", page)
    assert code == 0
    assert "wrote " in output
    assert "6 of 6 in" in page.read_text()


def test_options_reach_the_server(command: Command, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.behaviour.key = "secret"
    assert command(server.url, *QUICK, "--api-key", "secret", "--ignore-eos", "--chat", "--model", "tiny")[0] == 0
    body = server.behaviour.received[-1]
    assert body["ignore_eos"] is True
    assert "messages" in body
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert command(server.url, *QUICK, "--prefix-tokens", 10, "--prefix-groups", 2, "--vocabulary", 500)[0] == 0
    body = server.behaviour.received[-1]
    assert len(body["prompt"]) == 30
    assert max(body["prompt"]) < 500


def test_a_trace_with_times(command: Command, server: Server, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(json.dumps({"prompt": f"p{n}", "output_tokens": 2, "at": n / 50}) + "\n" for n in range(4))
    )
    code, output, _ = command(server.url, "--trace", trace, "--warmup", 0)
    assert code == 0
    assert "4 requests, at the times of the trace" in output
    code, output, _ = command(server.url, "--trace", trace, "--concurrency", 2, "--requests", 3)
    assert code == 0
    assert "3 requests, 2 at a time" in output


def test_a_sweep(command: Command, server: Server) -> None:
    code, output, _ = command(
        server.url, "--sweep", "20..40", "--duration", 0.3, "--input", 20, "--output", 1, "--warmup", 0
    )
    assert code == 0
    assert "300 ms each, sweep over 20..40 requests/s" in output
    assert "aturated" in output


def test_a_server_that_answers_nothing_is_a_failure(command: Command, server: Server) -> None:
    server.behaviour.fails = dict.fromkeys(range(1, 100), "503")
    code, output, errors = command(server.url, *QUICK)
    assert (code, errors) == (1, "")
    assert "6 × HTTP 503: overloaded" in output
    assert "0 of 6 answered" in output


def test_no_server_is_one_line(command: Command) -> None:
    code, output, errors = command("http://127.0.0.1:1", "--json")
    assert code == 2
    assert errors.startswith("error: http://127.0.0.1:1: cannot connect")
    assert errors.count("\n") == 1
    assert f"error: {json.loads(output)['error']}\n" == errors


BAD: dict[str, tuple[list[str], str]] = {
    "two loads": (["--rate", "5", "--concurrency", "3"], "alternative kinds of load"),
    "two limits": (["--requests", "5", "--duration", "3"], "both set the end of the test"),
    "burstiness of a closed load": (["--burstiness", "2"], "applies to an open load"),
    "a length": (["--input", "long"], "--input 'long' is not a length"),
    "an objective": (["--slo", "fast"], "--slo 'fast' is not a limit"),
    "a sweep": (["--sweep", "5"], "--sweep '5' is not a range"),
    "a missing trace": (["--trace", "nothing.jsonl"], "nothing.jsonl: no such file"),
    "prompts of two kinds": (["--trace", "t", "--input", "5"], "--trace already has them"),
    "a sweep of a trace": (["--trace", "t", "--sweep", "1..2"], "--sweep needs new prompts"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(command: Command, server: Server, case: str) -> None:
    arguments, words = BAD[case]
    code, _, errors = command(server.url, *arguments)
    assert code == 2
    assert words in errors
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert server.behaviour.received == []


@pytest.mark.parametrize("arguments", [[], ["--rate", "0"], ["--requests", "0"], ["--prefix-share", "2"]], ids=str)
def test_wrong_usage(command: Command, arguments: list[str]) -> None:
    assert command(*(["http://x"] if arguments else []), *arguments)[0] == 2


def test_without_its_library_it_says_what_to_install(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("craton.bench.load")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    code, _, errors = command("http://127.0.0.1:1")
    assert code == 2
    assert "needs aiohttp" in errors
