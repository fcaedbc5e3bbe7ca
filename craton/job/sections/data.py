"""The `data:` section: where tokens come from, and how they become sequences.

Paths are made absolute, so that a job means the same wherever it runs; special values (`stdlib`, `bpe:4096`, a Hub id,
`s3://…`) stay unchanged. Existence of a path is not checked here: a job may be planned on a laptop.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from craton.job.document import Section, SectionError, TokenCount
from craton.job.model import is_function, looks_like_path
from craton.remote import is_url

STANDARD_LIBRARY = "stdlib"  # as a data path: the Python sources of the standard library
MIN_BPE_VOCABULARY = 259  # all bytes, the end-of-document token and the two chat-turn tokens

_BPE = re.compile(r"bpe:(?P<size>.*)")


def check_function(value: str) -> str:
    """Validate a key that names a user's function."""
    if not is_function(value):
        raise ValueError(f"{value!r} is not a function; write package.module:function")
    return value


def absolute_path(text: str, info: ValidationInfo) -> str:
    """Return a path of a job file, relative to the file's folder, as an absolute one."""
    # Not resolve(): a link may point elsewhere on the machine that reads the data.
    return os.path.abspath(Path((info.context or {}).get("folder", ".")) / Path(text).expanduser())


def _parse_path(value: object, info: ValidationInfo) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a path; write a file, a folder, an s3:// prefix or {STANDARD_LIBRARY}")
    text = value.strip()
    if is_url(text) and not text.startswith("s3://"):
        raise ValueError(
            f"{text!r} is a URL, and data is read from files, folders and s3:// prefixes only; download it, and write "
            "its path"
        )
    return text if text == STANDARD_LIBRARY or is_url(text) else absolute_path(text, info)


def _parse_tokenizer(value: object, info: ValidationInfo) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a tokenizer; write a folder, a Hub id, or bpe:4096 to train one")
    text = value.strip()
    if bpe := _BPE.fullmatch(text):
        size = bpe["size"]
        if not size.isdecimal() or int(size) < MIN_BPE_VOCABULARY:
            raise ValueError(
                f"{text!r} is not a BPE tokenizer; write bpe: and the vocabulary size, at least {MIN_BPE_VOCABULARY}, "
                "e.g. bpe:4096"
            )
        return text
    if is_url(text):
        return text
    path = absolute_path(text, info)
    return path if looks_like_path(text) or Path(path).exists() else text


Function = Annotated[str, AfterValidator(check_function)]
DataPath = Annotated[str, BeforeValidator(_parse_path)]


class WeightedPath(Section):
    """One source of a mixture; weights are relative shares of the tokens."""

    path: DataPath
    weight: Annotated[float, Field(gt=0)] = 1.0


def _parse_paths(value: object, info: ValidationInfo) -> object:
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        return _parse_path(value, info)
    if not value:
        raise ValueError("the list is empty; write a path, or a list of {path, weight}")
    parts = []
    for index, part in enumerate(value):
        if isinstance(part, WeightedPath):
            parts.append(part)
            continue
        try:
            parts.append(WeightedPath.parse({"path": part} if isinstance(part, str) else part, info))
        except SectionError as error:
            raise SectionError(error.section, error.error, at=(index,)) from None
    return tuple(parts)


Paths = Annotated[str | tuple[WeightedPath, ...] | None, BeforeValidator(_parse_paths)]


class Data(Section):
    """Token shards, raw text, chats, or a function that returns samples."""

    path: Paths = None
    validation: Paths = None
    tokenizer: Annotated[str | None, BeforeValidator(lambda value, info: value and _parse_tokenizer(value, info))] = (
        None
    )
    sequence: TokenCount | None = None
    source: Function | None = None
    columns: dict[str, str] = Field(default_factory=dict)  # dpo, grpo: which columns of the rows hold prompt, chosen, …
    pack: bool = True  # pack several documents into a sequence; attention stays within each document

    @property
    def mixture(self) -> tuple[tuple[str, float], ...]:
        """(path, weight) of each source; weight 1 for a single path; empty without a path."""
        return _mixture(self.path)

    @property
    def validation_mixture(self) -> tuple[tuple[str, float], ...]:
        """(path, weight) of each source of the validation data."""
        return _mixture(self.validation)


def _mixture(paths: str | tuple[WeightedPath, ...] | None) -> tuple[tuple[str, float], ...]:
    if paths is None:
        return ()
    return ((paths, 1.0),) if isinstance(paths, str) else tuple((part.path, part.weight) for part in paths)
