"""What another user may put in the place of a file or folder of a run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

KINDS = ("FIFO", "link", "folder", "sparse", "garbage", "empty", "nested")
SECRET = "the key is 4711"
SPARSE_BYTES = 10 << 30


def plant(path: Path, kind: str, outside: Path) -> None:
    """Replaces what is there. A link leads to `outside`, where the same file has SECRET in it."""
    away = outside / path.name
    if path.is_dir() and not path.is_symlink():
        shutil.copytree(path, away, symlinks=True)
        for inner in away.rglob("*"):
            if inner.is_file():
                inner.write_bytes(f'{{"{SECRET}": "{SECRET}"}}\n'.encode() + inner.read_bytes())
        shutil.rmtree(path)
    else:
        outside.mkdir(exist_ok=True)
        away.write_text(f'{{"{SECRET}": "{SECRET}"}}\n{SECRET}\n')
        path.unlink(missing_ok=True)
    match kind:
        case "FIFO":
            os.mkfifo(path)
        case "link":
            path.symlink_to(away)
        case "folder":
            path.mkdir()
        case "sparse":
            with open(path, "wb") as file:
                file.truncate(SPARSE_BYTES)
        case "garbage":
            path.write_bytes(bytes(range(256)) * 40)
        case "empty":
            path.touch()
        case "nested":
            path.write_text('{"a":' * 50_000)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}
