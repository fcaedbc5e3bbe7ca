"""Write docs/cli.md from the command line itself: `python docs/cli_reference.py`. A test compares them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from craton.cli.app import app

PAGE = Path(__file__).parent / "cli.md"
_TYPES = {int: "NUMBER", float: "NUMBER", Path: "FILE"}
HEAD = """# Command line

Made by `python docs/cli_reference.py` from the commands themselves. Every verb also takes `-h` and `-v`. Exit codes: 0
done, 1 failed, 2 bad input, 130 interrupted. With `--json` a verb prints one JSON document on stdout, errors included;
`logs` and `observe up` print one per line.
"""


def page_text() -> str:
    """The whole page."""
    return HEAD + "".join(_section(words, command) for words, command in _commands(["craton"], _root()))


def _root() -> Any:
    return typer.main.get_command(app)


def _commands(words: list[str], command: Any) -> Iterator[tuple[list[str], Any]]:
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands([*words, name], inner)


def _section(words: list[str], command: Any) -> str:
    title = " ".join(words)
    summary = _plain(command.help or "")
    rows = [_row(param) for param in command.params if not getattr(param, "hidden", False)]
    table = "\n| argument or option | meaning | default |\n|---|---|---|\n" + "".join(rows) if rows else ""
    return f"\n## `{title}`\n\n{summary}\n{table}"


def _row(param: Any) -> str:
    if param.param_type_name == "argument":
        name = f"`{param.metavar or param.name.upper()}`"
    else:
        name = ", ".join(f"`{option}`" for option in (*param.opts, *param.secondary_opts))
        if not param.is_flag and not param.count:
            name += f" `{param.metavar or _TYPES.get(param.type_descriptor.annotation, 'TEXT')}`"
    text, default = _split_default(_plain(getattr(param, "help", None) or ""))
    if not default:
        default = _default(param)
    return f"| {name} | {text} | {default} |\n"


def _split_default(text: str) -> tuple[str, str]:
    match = re.search(r"\s*\[default: (.*?)\]", text)
    return (text.replace(match[0], "").strip(), match[1]) if match else (text, "")


def _default(param: Any) -> str:
    if param.required:
        return "required"
    value = param.default
    if isinstance(value, bool) and param.secondary_opts:
        return f"`{(param.opts if value else param.secondary_opts)[0]}`"
    is_value = isinstance(value, str | int | float | Path) and not isinstance(value, bool)
    return f"`{value}`" if is_value and str(value) else ""


def _plain(text: str) -> str:
    return " ".join(text.replace("\\[", "[").replace("|", "\\|").split())


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
