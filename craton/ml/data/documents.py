"""Raw text as documents: files and folders of text, JSONL and Parquet, plain or compressed.

Input is split into pieces of about a megabyte, always at the same places, so any number of workers gets the same
documents. A text file is one document; so is a line of JSONL or a row of Parquet. A text file that is not UTF-8 is
skipped and reported; a bad line is an error with its number.
"""

from __future__ import annotations

import gzip
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, cast

from craton.extras import require_extra
from craton.ml.data.errors import DataError, first_problems

STANDARD_LIBRARY = "stdlib"  # as an input: the Python sources of the running interpreter
LEFT_OUT = ("site-packages", "dist-packages", "encodings")  # excluded: third-party packages and tables
PIECE_BYTES = 1 << 20
LOOK_BYTES = 64 << 10  # read from a file to check its content
LOOK_FILES = 8  # files of a folder to check
LOOK_NAMES = 10_000  # directory entries to search for those files
OTHER_FIELD = "`craton data tokenize --field NAME` reads another"
EXPECTED = (
    f"UTF-8 text files (.txt .md .py …), .jsonl or .parquet with a field `text`, the first two also as .gz or .zst, "
    f"folders of them, or `{STANDARD_LIBRARY}`"
)

# fmt: off
_TEXT = frozenset((
    ".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".csv", ".tsv", ".log", ".json", ".yaml", ".yml",
    ".toml", ".ini", ".cfg", ".py", ".pyi", ".ipynb", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".java", ".kt",
    ".scala", ".js", ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".pl", ".lua", ".jl", ".r", ".m", ".swift",
    ".cs", ".hs", ".ml", ".clj", ".ex", ".erl", ".sh", ".bash", ".sql", ".css",
))
# fmt: on
_LINES = (".jsonl", ".ndjson")
_COMPRESSED = (".gz", ".zst")

PieceKind = Literal["text", "jsonl", "parquet"]


@dataclass(frozen=True)
class InputFile:
    """One file to read."""

    path: Path
    kind: PieceKind
    size: int  # bytes


@dataclass(frozen=True)
class DocumentChunk:
    """A part of one file. Only text files continue over several pieces: `first` begins the document, `last` ends it."""

    kind: PieceKind
    name: str
    took: int  # bytes of the file, for progress
    data: bytes = b""
    number: int = 0  # of the first line (JSONL, from 1) or of the row group (Parquet, from 0)
    first: bool = True
    last: bool = True


def find_files(inputs: Sequence[str | Path]) -> list[InputFile]:
    """Return every file of the inputs, in an order that depends only on names; an empty input is an error."""
    input_files: list[InputFile] = []
    for source in inputs:
        if "://" in str(source):
            raise DataError(f"{source}: text is read from local files; copy it to this machine first")
        files = _standard_library() if str(source) == STANDARD_LIBRARY else _files_of(Path(source).expanduser())
        if not any(file.size for file in files):
            raise DataError(f"{source}: contains no text; allowed: {EXPECTED}")
        input_files += files
    return input_files


def check_text(path: Path, has_rows: bool = False) -> None:
    """Raise DataError if the data does not start with text (or rows, such as chats): checks a file's first LOOK_BYTES,
    or a folder's first LOOK_FILES. One text file in a folder is enough, because files that are not UTF-8 are
    skipped."""
    files = list(islice(_some_files(path), LOOK_FILES)) if path.is_dir() else _files_of(path)
    problems = [problem for file in files if (problem := _problem_of(file, has_rows))]
    if not any(file.size for file in files):
        problems = [f"{path}: contains no text"]
    if problems and len(problems) >= len(files):
        raise DataError(f"{problems[0]}; allowed: {EXPECTED}")


def pieces_of(files: Iterable[InputFile], field: str = "") -> Iterator[DocumentChunk]:
    """Split the files into pieces. `field` is the column of Parquet that must exist; "": any."""
    for file in files:
        if file.kind == "parquet":
            yield from _row_groups(file, field)
        else:
            yield from _blocks(file)


def tasks_of(pieces: Iterable[DocumentChunk]) -> Iterator[list[DocumentChunk]]:
    """Group pieces into batches large enough to send to another process."""
    heap: list[DocumentChunk] = []
    size = 0
    for piece in pieces:
        heap.append(piece)
        size += max(len(piece.data), piece.took)
        if size >= PIECE_BYTES:
            yield heap
            heap, size = [], 0
    if heap:
        yield heap


def records(piece: DocumentChunk) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line`, object) for each line of a JSONL piece or row of a Parquet piece, numbered from 1. Reads all
    lines before it reports the bad ones."""
    if piece.kind == "parquet":
        yield from _rows(piece)
        return
    problems: list[str] = []
    for number, line in enumerate(piece.data.split(b"\n"), piece.number):
        if not line.strip():
            continue
        where = f"{piece.name}:{number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            problems.append(f"{where}: is not JSON: {error}; write one JSON object per line")
            continue
        except RecursionError:
            problems.append(f"{where}: is nested too deeply; write one JSON object per line")
            continue
        if isinstance(value, dict):
            yield where, value
        else:
            problems.append(f"{where}: is {_json_name(value)}, not a JSON object")
    if problems:
        raise first_problems(problems, piece.name)


def rows_of(files: Iterable[InputFile]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line`, row) of every row; DataError for text."""
    for piece in pieces_of(files):
        if piece.kind == "text":
            raise DataError(f"{piece.name}: prompts are rows of JSONL (.jsonl) or Parquet (.parquet), not text")
        yield from records(piece)


def texts_of(piece: DocumentChunk, field: str) -> list[str]:
    """Return the documents of a piece; none for a text file that is not UTF-8."""
    if piece.kind == "text":
        try:
            return [piece.data.decode("utf-8")]
        except UnicodeDecodeError as error:
            if piece.first and piece.last:
                return []
            raise DataError(f"{piece.name}: is not UTF-8 ({error.reason}); convert or remove it") from None
    if piece.kind == "parquet":
        return [text for text in _column(piece, field) if text]
    texts, problems = [], []
    for where, value in records(piece):
        text = value.get(field)
        if isinstance(text, str):
            texts.append(text)
        else:
            problems.append(_wrong_field(where, value, field))
    if problems:
        raise first_problems(problems, piece.name)
    return [text for text in texts if text]


def _wrong_field(where: str, value: dict[str, Any], field: str) -> str:
    if field in value:
        return f"{where}: field {field!r} is {_json_name(value[field])}, not a text"
    chat = "; chats need a job of kind sft" if "messages" in value else ""
    names = ", ".join(map(repr, list(value)[:8])) or "none"
    return f"{where}: has no field {field!r}; its fields are {names}: {OTHER_FIELD}{chat}"


def _json_name(value: object) -> str:
    """Return what JSON calls a value."""
    names = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), "true or false")


def _standard_library() -> list[InputFile]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return [file for file in _walk(root, leave_out=LEFT_OUT) if file.path.suffix == ".py"]


def _files_of(path: Path) -> list[InputFile]:
    if path.is_dir():
        return _walk(path)
    if "://" in str(path) or not path.exists():
        raise DataError(f"{path}: does not exist on this machine; give a file, a folder, or `{STANDARD_LIBRARY}`")
    return [InputFile(path, _kind(path) or "text", path.stat().st_size)]


def _walk(root: Path, leave_out: Sequence[str] = ()) -> list[InputFile]:
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in ("__pycache__", *leave_out)]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and (kind := _kind(path)) and path.is_file():
                files.append(InputFile(path, kind, path.stat().st_size))
    return sorted(files, key=lambda file: file.path.relative_to(root).as_posix())


def _some_files(root: Path) -> Iterator[InputFile]:
    """Yield files of a folder in any order; stops after LOOK_NAMES entries."""
    names = ((folder, name) for folder, _, item in os.walk(root) for name in item)
    for folder, name in islice(names, LOOK_NAMES):
        path = Path(folder, name)
        if not name.startswith(".") and (kind := _kind(path)) and path.is_file():
            yield InputFile(path, kind, path.stat().st_size)


def _problem_of(file: InputFile, has_rows: bool) -> str:
    """Return why the beginning of a file cannot be used; "" if it can, or if its first line is too long to check."""
    if file.kind == "parquet" and has_rows:
        return ""
    if file.kind == "parquet":
        try:
            next(_row_groups(file, "text"), None)
        except DataError as error:
            return str(error)
        return ""
    try:
        with _open(file.path) as stream:
            data = stream.read(LOOK_BYTES)
    except (OSError, EOFError) as error:
        return f"{file.path}: cannot be read ({error})"
    if len(data) == LOOK_BYTES:
        data = data[: len(data) - len(_half_character(data))]
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"{file.path}: is not UTF-8 text (byte 0x{data[error.start]:02x} at {error.start:,})"
    if (zero := data.find(b"\0")) >= 0:
        return f"{file.path}: is not text (a zero byte at {zero:,})"
    line = data.lstrip().partition(b"\n")[0]
    if file.kind != "jsonl" or len(line) >= LOOK_BYTES // 2 or not line:
        return ""
    first = DocumentChunk("jsonl", str(file.path), 0, line, number=1)
    try:
        list(records(first)) if has_rows else texts_of(first, "text")
    except DataError as error:
        return str(error)
    return ""


def _kind(path: Path) -> PieceKind | None:
    """Return the kind by file name; None if it is not known to be text."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    if last in _LINES:
        return "jsonl"
    if last == ".parquet":
        return "parquet"
    return "text" if last in _TEXT else None


def _open(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.suffix.lower() == ".zst":
        import io

        require_extra("parquet", str(path))
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), PIECE_BYTES)
    return path.open("rb")


def _blocks(file: InputFile) -> Iterator[DocumentChunk]:
    """Split a file at line ends every PIECE_BYTES; text without line ends is split between two characters."""
    longest = -1 if file.kind == "jsonl" else PIECE_BYTES
    number, tail, left = 1, b"", file.size
    is_jsonl = file.kind == "jsonl"
    try:
        with _open(file.path) as stream:
            data = stream.read(PIECE_BYTES)
            first = True
            while data:
                if len(data) >= PIECE_BYTES and not data.endswith(b"\n"):
                    data += stream.readline(longest)
                following = stream.read(PIECE_BYTES)
                tail = b"" if is_jsonl or not following or data.endswith(b"\n") else _half_character(data)
                data = data[: len(data) - len(tail)]
                took = min(left, len(data)) if following else left
                yield DocumentChunk(
                    file.kind, str(file.path), took, data, number, is_jsonl or first, is_jsonl or not following
                )
                left -= took
                number += data.count(b"\n")
                data, first = tail + following, False
    except (OSError, EOFError) as error:
        raise DataError(f"{file.path}: cannot be read: {error}; copy it again, or remove it") from None


def _half_character(data: bytes) -> bytes:
    """Return the incomplete UTF-8 character at the end of the data, if any."""
    for length in range(1, min(4, len(data)) + 1):
        byte = data[-length]
        if byte & 0xC0 != 0x80:  # not a continuation byte: the character begins here
            needed = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[-length:] if needed > length else b""
    return b""


def _row_groups(file: InputFile, field: str) -> Iterator[DocumentChunk]:
    require_extra("parquet", str(file.path))
    from pyarrow import ArrowException, parquet

    try:
        opened = parquet.ParquetFile(file.path)
        groups, columns = opened.num_row_groups, opened.schema_arrow.names
    except (ArrowException, OSError) as error:
        raise DataError(f"{file.path}: cannot be read as Parquet: {error}") from None
    if field and field not in columns:
        raise DataError(f"{file.path}: has no column {field!r}; its columns are {columns}: {OTHER_FIELD}")
    for number in range(groups):
        took = file.size * (number + 1) // groups - file.size * number // groups
        yield DocumentChunk("parquet", str(file.path), took, number=number)


def _rows(piece: DocumentChunk) -> Iterator[tuple[str, dict[str, Any]]]:
    from pyarrow import ArrowException, parquet

    try:
        opened = parquet.ParquetFile(piece.name)
        first = sum(opened.metadata.row_group(number).num_rows for number in range(piece.number))
        rows = opened.read_row_group(piece.number).to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(f"{piece.name}: cannot be read as Parquet: {error}") from None
    for number, row in enumerate(rows, first + 1):
        yield f"{piece.name}:{number}", row


def _column(piece: DocumentChunk, field: str) -> list[str]:
    from pyarrow import parquet

    table = parquet.ParquetFile(piece.name).read_row_group(piece.number, columns=[field])
    rows: list[str] = table.column(0).to_pylist()
    if any(not isinstance(text, str | None) for text in rows):
        raise DataError(f"{piece.name}: column {field!r} does not hold texts; {OTHER_FIELD}")
    return rows
