"""Files of a run directory: JSON lines, regular files only, storage that fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.telemetry.files.lines import LineWriter, parse_line, read_lines, tail_lines
    from craton.telemetry.files.regular_files import (
        UnsafeFileError,
        append_regular,
        first_link,
        names_in,
        note_unread,
        noting_unread,
        open_regular,
        paths_in,
        read_regular,
        read_regular_text,
    )
    from craton.telemetry.files.storage import (
        STORAGE_ERRORS,
        SafeOutput,
        protect_output,
        replace_bytes,
        replace_text,
        storage_problem,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
