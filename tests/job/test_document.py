"""A file that cannot be read as YAML ends in one clear line; lines are remembered for everything else."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from craton.errors import CratonError
from craton.job import parse_job
from craton.job.document import parse_document, read_document
from craton.job.errors import FileError

BAD_FILES = {
    "duplicate key": (b"kind: sft\ndata: {}\nkind: dpo\n", ":3: key 'kind' is given twice, first on line 1"),
    "duplicate in flow": (b"train: {steps: 1, steps: 2}\n", ":1: key 'steps' is given twice"),
    "tab": (b"train:\n\tsteps: 3\n", ":2: is indented with a tab; YAML allows only spaces"),
    "empty": (b"", ": is empty"),
    "comments only": (b"# nothing\n\n", ": is empty"),
    "10 MB": (b"a: " + b"x" * 10_000_000, "has 10,000,003 bytes, more than the 1,000,000 allowed"),
    "bomb": (b"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n", ":2: aliases are not allowed (*a)"),
    "merge": (b"a: &a {x: 1}\nb:\n  <<: *a\n", ":3: aliases are not allowed (*a)"),
    "not UTF-8": (b"kind: sft\nname: \xff\n", ":2: is not UTF-8 (byte 0xff)"),
    "NUL": (b"name: a\nkind: \x00\n", ":2: contains a character that YAML forbids (0x00)"),
    "list": (b"- a\n- b\n", ":1: the file is a list; it must be a mapping"),
    "scalar": (b"hello\n", "the single value 'hello'"),
    "two documents": (b"a: 1\n---\nb: 2\n", ":2: a second YAML document"),
    "tag": (b"a: !!python/object/apply:os.system [id]\n", ":1: tags are not allowed"),
    "nesting": (b"a: " + b"[" * 3000 + b"]" * 3000, ":1: values are nested deeper than 20 levels"),
    "syntax": (b"a: [1, 2\nb: 3\n", ":2: is not YAML: expected ',' or ']'"),
    "list as key": (b"? [a]\n: 3\n", ":1: a key must be a plain word"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_one_clear_line(tmp_path: Path, case: str) -> None:
    content, expected = BAD_FILES[case]
    file = tmp_path / "job.yaml"
    file.write_bytes(content)
    with pytest.raises(FileError) as caught:
        read_document(file)
    message = str(caught.value)
    assert message.startswith(str(file))
    assert expected in message
    assert "\n" not in message


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "llama.yaml").write_text("kind: sft")
    with pytest.raises(FileError, match=r"lama\.yaml: no such file; did you mean 'llama'\?"):
        read_document(tmp_path / "lama.yaml")


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is a directory"):
        read_document(tmp_path)


def test_scalars_mean_what_they_say() -> None:
    text = "run: {on: slurm}\npeer: off\nrate: 3e-4\nflag: true\nnone: ~\ntext: 'true'\ncount: 010\ntime: 1:30\n"
    assert parse_document(text).data == {
        "run": {"on": "slurm"},
        "peer": "off",
        "rate": 3e-4,
        "flag": True,
        "none": None,
        "text": "true",
        "count": 10,
        "time": "1:30",
    }


def test_lines_are_those_of_the_keys() -> None:
    document = parse_document("a: 1\n\nb:\n  c:\n    - {d: 1}\n    - d: 2\n      e: 3\n")
    assert document.line(("b", "c", 1, "e")) == 7
    assert document.line(("b", "c", 0, "d")) == 5
    assert document.line(("b", "missing")) == 3


def test_windows_line_ends_and_a_byte_order_mark_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(b"\xef\xbb\xbfkind: sft\r\nname: a\r\n")
    assert read_document(file).data == {"kind": "sft", "name": "a"}


@settings(max_examples=200)
@given(st.text(alphabet=st.sampled_from(list("abkind:{}[]&*!|>#-'\"%@`,? \n\t~0123é\x07")), max_size=60))
def test_no_text_whatever_breaks_the_reader(text: str) -> None:
    with contextlib.suppress(CratonError):
        parse_job(text)
