"""Log levels of Craton's own loggers: `CRATON_LOG`, and `-v` on the command line, which sets it.

`CRATON_LOG=debug` sets the level of all of Craton; `CRATON_LOG=info,orchestration.slurm=debug` that of one package too.
Processes that a run starts on this machine inherit the variable. Log lines go to stderr; results go to stdout.
"""

from __future__ import annotations

import logging
import os
import sys

from craton.errors import CratonError

VARIABLE = "CRATON_LOG"
LEVELS = ("debug", "info", "warning", "error")
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
ROOT = "craton"


class LogLevelError(CratonError):
    """CRATON_LOG is neither a level nor a list of PACKAGE=LEVEL."""


def configure_logging(verbosity: int = 0, default: str = "warning", *, is_strict: bool = True) -> None:
    """Set levels from CRATON_LOG, or from a number of `-v`, which wins: once is info, twice is debug. Unless
    `is_strict`, a wrong CRATON_LOG is reported and ignored: an agent must not end because of it."""
    if verbosity:
        os.environ[VARIABLE] = "info" if verbosity == 1 else "debug"
    try:
        levels = parse_levels(os.environ.get(VARIABLE, ""), default)
    except LogLevelError as error:
        if is_strict:
            raise
        print(f"warning: {error}", file=sys.stderr)
        levels = {ROOT: default}
    root = logging.getLogger(ROOT)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT))
        root.addHandler(handler)
        root.propagate = False
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level.upper())


def parse_levels(text: str, default: str = "warning") -> dict[str, str]:
    """Logger → level, the root first; LogLevelError with what is allowed."""
    levels = {ROOT: default}
    for part in filter(None, (part.strip() for part in text.split(","))):
        package, equals, level = part.rpartition("=")
        if level.lower() not in LEVELS or (equals and not package):
            raise LogLevelError(
                f"{VARIABLE}={text}: {part!r} is not a log level; give {', '.join(LEVELS)}, or PACKAGE=LEVEL, e.g. "
                "info,orchestration.slurm=debug"
            )
        name = f"{ROOT}.{package.removeprefix(f'{ROOT}.')}" if equals and package != ROOT else ROOT
        levels[name] = level.lower()
    return levels
