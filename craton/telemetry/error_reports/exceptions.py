"""Report an exception of this process."""

from __future__ import annotations

import traceback
from dataclasses import replace

from craton.telemetry.error_reports.report import ErrorReport, RaisedError, report_chain

MAX_CHAIN, MAX_FRAMES = 16, 200


def report_exception(
    error: BaseException, *, phase: str = "", step: int | None = None, is_echo: bool | None = None
) -> ErrorReport:
    """Return the report of an exception. It never raises: an exception that cannot be printed is reported by type."""
    try:
        report = report_chain(_chain(error))
    except Exception:  # noqa: BLE001 -- a user's exception may raise in its own __str__
        report = ErrorReport(type=type(error).__name__)
    return replace(report, phase=phase, step=step, is_echo=report.is_echo if is_echo is None else is_echo)


def _chain(error: BaseException) -> list[RaisedError]:
    """Return the exceptions that led to this one, the root first."""
    chain: list[RaisedError] = []
    seen: set[int] = set()
    present: BaseException | None = error
    while present is not None and id(present) not in seen and len(chain) < MAX_CHAIN:
        seen.add(id(present))
        if isinstance(present, BaseExceptionGroup) and present.exceptions:
            before: BaseException | None = present.exceptions[0]
        else:
            before = present.__cause__ or (None if present.__suppress_context__ else present.__context__)
        chain.append(_raised(present))
        present = before
    return chain[::-1]


def _raised(error: BaseException) -> RaisedError:
    frames = [
        (frame.filename, frame.lineno or 0, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
    ]
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    errno, path = None, ""
    if isinstance(error, OSError):
        errno = error.errno if isinstance(error.errno, int) else None
        path = error.filename if isinstance(error.filename, str) else ""
    message = str(error)
    if isinstance(error, SystemExit):
        message = "the program called exit with code 0" if error.code in (None, 0) else _exit_text(error.code)
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno or 0, ""))
    return RaisedError(name, message, frames, errno, path)


def _exit_text(code: object) -> str:
    return f"the program called exit with code {code}" if isinstance(code, int) else str(code)
