"""The list of commands, and their exit codes: 0 done, 1 failed, 2 bad input.

A user error is one line `error: ...` on stderr (one line per problem of a file). With `--json` the same is also printed
as an object on stdout, so that a script always finds one JSON object there.
"""

from __future__ import annotations

import errno
import gc
import json
import sys
from copy import copy
from typing import Annotated, Any

import typer

from craton.cli import data
from craton.cli.bench import bench
from craton.cli.calibrate import calibrate
from craton.cli.chaos import chaos
from craton.cli.evaluate import evaluate
from craton.cli.export import export
from craton.cli.logs import logs
from craton.cli.machines import cluster, observe
from craton.cli.machines.catalog import catalog
from craton.cli.machines.doctor import doctor
from craton.cli.machines.heal import heal
from craton.cli.plan import plan
from craton.cli.ps import ps
from craton.cli.resize import resize
from craton.cli.resume import resume
from craton.cli.rm import rm
from craton.cli.run import run
from craton.cli.sample import sample
from craton.cli.serve import serve
from craton.cli.stop import stop
from craton.cli.think import think
from craton.cli.top import top
from craton.cli.ui import ui
from craton.cli.validate import validate
from craton.cli.why import why
from craton.printable import printable

app = typer.Typer(
    name="craton",
    help="Plan, run, serve, watch and repair foundation-model jobs; predict time, memory and cost before renting GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(plan)
app.command()(run)
app.command()(serve)
app.command()(ps)
app.command()(logs)
app.command()(why)
app.command()(top)
app.command()(ui)
app.command()(stop)
app.command()(rm)
app.command()(resume)
app.command()(resize)
app.command()(chaos)
app.command()(export)
app.command()(sample)
app.command()(think)
app.command("eval")(evaluate)
app.command()(validate)
app.command()(doctor)
app.command()(heal)
app.command()(catalog)
app.command()(calibrate)
app.add_typer(data.app, name="data")
app.add_typer(cluster.app, name="cluster")
app.add_typer(observe.app, name="observe")
app.add_typer(bench.app, name="bench")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from craton.version import VERSION

        print(f"craton {VERSION}")
        raise typer.Exit


def _set_verbosity(count: int) -> None:
    from craton.log_levels import configure_logging

    configure_logging(count)


@app.callback()
def _craton(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose",
            "-v",
            count=True,
            metavar="",
            show_default=False,
            help="Log to stderr: -v info, -vv debug \\[default: $CRATON_LOG, else warning].",
            callback=_set_verbosity,
        ),
    ] = 0,
) -> None:
    """Options of every verb."""
    if context.invoked_subcommand != "plan":  # others may run for long
        gc.enable()


def main() -> None:
    """Run the command `craton`.

    Imports and plans create many objects that live to the end, and little garbage: they are faster without collections.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        _run()
    finally:
        if was_enabled:
            gc.enable()


def _run() -> None:
    try:
        # typer prints usage errors itself; with --json they are printed as JSON too
        command = typer.main.get_command(with_verb_only(sys.argv[1:]))
        _hide_types_of_flags(command)
        _accept_verbose_after_the_verb(command)
        code = command.main(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
    except typer.Abort:
        sys.exit(130)
    except (ValueError, OSError) as error:
        from craton.errors import CratonError

        if isinstance(error, CratonError):
            sys.exit(_report(error, exit_code=2))
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            name = str(error.filename)
            message = f"{name[:60]}… has {len(name):,} characters, which is too long for a file name; use a shorter one"
            sys.exit(_report(CratonError(message), exit_code=2))
        if isinstance(error, OSError):
            sys.exit(_report(error, exit_code=1))
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not hasattr(error, "format_message"):  # not a usage error
            raise
        error.show()  # type: ignore[attr-defined]
        if "--json" in sys.argv[1:]:
            print(json.dumps({"error": error.format_message(), "problems": [error.format_message()]}))
        sys.exit(2)


def with_verb_only(arguments: list[str]) -> typer.Typer:
    """Return the app with the given verb only, which is built much faster; the whole app for anything else."""
    verb = next((argument for argument in arguments if not argument.startswith("-")), "")
    commands = [info for info in app.registered_commands if verb in (info.name, getattr(info.callback, "__name__", ""))]
    if len(commands) != 1 or commands[0].name not in (None, verb):
        return app
    alone = copy(app)
    alone.registered_commands, alone.registered_groups = commands, []
    return alone


def _hide_types_of_flags(command: Any) -> None:
    """Hide the type of flags in the help: typer (0.29) shows `--json <bool>`, as if `--json` took a value."""
    for param in [*command.params, command.get_help_option(typer.Context(command, help_option_names=["-h", "--help"]))]:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        _hide_types_of_flags(inner)


def _accept_verbose_after_the_verb(command: Any) -> None:
    """`craton run JOB -v` is `craton -v run JOB`."""
    verbose = copy(next(param for param in command.params if param.name == "verbose"))
    verbose.expose_value, verbose.hidden = False, True
    verbose.callback = lambda context, param, count: _set_verbosity(count) if count else None
    pending = list(command.commands.values())
    while pending:
        inner = pending.pop()
        inner.params.append(verbose)
        pending += getattr(inner, "commands", {}).values()


def _report(error: Exception, exit_code: int) -> int:
    lines = list(getattr(error, "problems", None) or [str(error)])
    for line in lines:
        print(f"error: {printable(line)}", file=sys.stderr)
    if "--json" in sys.argv[1:]:
        print(json.dumps({"error": lines[0], "problems": lines}))
    return exit_code
