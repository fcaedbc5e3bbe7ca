"""The command line: one file per command, no logic; exit codes 0 done, 1 failed, 2 bad input; user errors in one line.

A command is a module `craton/cli/NAME.py`, listed in `craton.cli.app`. It holds either one function with the module's
name (`def plan(job: ..., json: ...)`) or, for subcommands, a `typer.Typer` called `app`. At the top it imports only
typer and the standard library. It imports other Craton modules inside the function: `craton --help` stays fast.
A user error is a `craton.errors.CratonError`; `main` prints it and chooses the exit code.
"""

from craton.cli.app import main

__all__ = ["main"]
