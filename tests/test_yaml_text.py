from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import craton
from craton.yaml_text import to_yaml

SHARED = ["a", "b"]


def test_yaml_is_written_as_people_would_write_it():
    document = {"script": "echo 1\necho 2\n", "first": SHARED, "again": SHARED, "dash": "–"}
    assert to_yaml(document) == (
        'script: |\n  echo 1\n  echo 2\nfirst:\n  - a\n  - b\nagain:\n  - a\n  - b\ndash: "\\u2013"\n'
    )
    assert to_yaml({"a": SHARED, "dash": "–"}, indent_lists=False, allow_unicode=True) == "a:\n- a\n- b\ndash: –\n"
    assert to_yaml({"a": 1}, {"b": 2}) == "a: 1\n---\nb: 2\n"


@pytest.mark.parametrize("text", ["a \nb", "a\tb\n", "a\u2028b\n", "a\x00\n", " a\n", "a\n\n", "1e3", "yes", "a\nb "])
def test_a_text_that_cannot_be_a_block_comes_back_the_same(text):
    assert yaml.safe_load(to_yaml({"text": text})) == {"text": text}


def test_product_code_has_one_yaml_writer():
    folder = Path(craton.__file__).parent
    own = [
        path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if re.search("Dumper", path.read_text())
    ]
    assert own == ["yaml_text.py"]
