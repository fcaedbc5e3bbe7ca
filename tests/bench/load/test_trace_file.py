"""Traces: what is read, and how a bad line is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from craton.bench.load import load_trace
from craton.bench.load.errors import WorkloadError
from craton.bench.load.lengths import Lengths
from craton.bench.load.requests import Request


def load(tmp_path: Path, *lines: Any) -> list[Request]:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return load_trace(path, Lengths("fixed", 7), seed=0)


def test_texts_ids_and_times_in_order(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        {"prompt": "later", "output_tokens": 3, "at": 1.5},
        "",
        {"prompt": [1, 2, 3], "at": 0},
    )
    assert found == [Request([1, 2, 3], 7, 0), Request("later", 3, 1.5)]


def test_without_times_the_order_is_that_of_the_lines(tmp_path: Path) -> None:
    assert [request.prompt for request in load(tmp_path, {"prompt": "b"}, {"prompt": "a"})] == ["b", "a"]


BAD: dict[str, tuple[Any, str]] = {
    "not JSON": ("{", "not JSON"),
    "not an object": ([1], "not an object"),
    "no prompt": ({"output_tokens": 3}, "`prompt` must be"),
    "empty prompt": ({"prompt": ""}, "`prompt` must be"),
    "negative id": ({"prompt": [-1]}, "`prompt` must be"),
    "unknown key": ({"prompt": "a", "max_tokens": 3}, "unknown key 'max_tokens'; allowed: prompt"),
    "no tokens": ({"prompt": "a", "output_tokens": 0}, "`output_tokens` is 0; it must be"),
    "bool tokens": ({"prompt": "a", "output_tokens": True}, "`output_tokens` is True; it must be"),
    "time before the start": ({"prompt": "a", "at": -1}, "`at` is -1; it must be"),
    "endless time": ('{"prompt": "a", "at": Infinity}', "`at` is inf; it must be"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_named(tmp_path: Path, case: str) -> None:
    line, words = BAD[case]
    with pytest.raises(WorkloadError) as caught:
        load(tmp_path, {"prompt": "fine"}, line)
    assert f"trace.jsonl:2: {words}" in str(caught.value)


def test_all_bad_lines_are_told_at_once_but_not_hundreds(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError) as caught:
        load(tmp_path, *["{"] * 100)
    assert "trace.jsonl:5:" in str(caught.value)
    assert str(caught.value).endswith("; and 95 more")


def test_times_in_some_lines_only(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="1 of 2 lines have `at`"):
        load(tmp_path, {"prompt": "a", "at": 1}, {"prompt": "b"})


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="no requests; a trace"):
        load(tmp_path, "")
    with pytest.raises(WorkloadError, match="no such file"):
        load_trace(tmp_path / "nothing.jsonl", Lengths("fixed", 1), 0)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(WorkloadError, match="not a UTF-8 text file"):
        load_trace(tmp_path / "binary", Lengths("fixed", 1), 0)
