"""HTML pages that commands write to a path of the user."""

from __future__ import annotations

from pathlib import Path


def prepare_page(path: Path) -> None:
    """Make the folder of a page, before work that takes long. CratonError if no file can be written there."""
    from craton.errors import CratonError

    if path.is_dir():
        raise CratonError(f"--html {path}: is a folder; name a file, e.g. {path / 'report.html'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CratonError(f"--html {path}: its folder cannot be made ({error.strerror}); name another path") from None


def write_page(path: Path, page: str) -> None:
    """Write a page. CratonError if the file cannot be written."""
    from craton.errors import CratonError

    prepare_page(path)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise CratonError(f"--html {path}: cannot be written ({error.strerror}); name another path") from None
