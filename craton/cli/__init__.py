"""The command line: one file a verb, no logic; 0 done, 1 failed, 2 bad input; a user's mistake is one line.

A verb is a module `craton/cli/NAME.py` named in `craton.cli.app`. It holds either one function called like the module
(`def plan(job: ..., json: ...)`), or, for sub-verbs, a `typer.Typer` called `app`. At its top it imports only typer and
the standard library; what it needs of Craton it imports inside the function, so that `craton --help` stays fast.
A user's mistake is raised as a `craton.job.CratonError`; `main` prints it and picks the exit code.
"""

from craton.cli.app import main

__all__ = ["main"]
