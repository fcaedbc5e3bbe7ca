"""Write readable YAML: keys in the given order, no anchors, multi-line texts as blocks."""

from __future__ import annotations

import io
from collections.abc import Callable

import yaml

TextStyle = Callable[[str], str | None]  # `|` for a block, `'` and `"` for quotes, None where YAML may choose


def block_style(text: str) -> str | None:
    # A block cannot hold a line that ends in a space, nor characters that YAML has to escape.
    is_block = "\n" in text and all(line == line.rstrip() and line.isprintable() for line in text.split("\n"))
    return "|" if is_block else None


def to_yaml(
    *documents: object,
    indent_lists: bool = True,
    allow_unicode: bool = False,
    text_style: TextStyle = block_style,
) -> str:
    """Return one document, or several separated by `---` as kubectl expects."""
    stream = io.StringIO()
    writer = _Writer(stream, indent_lists, allow_unicode, text_style)
    writer.open()
    for document in documents:
        writer.represent(document)
    writer.close()
    return stream.getvalue()


class _Writer(yaml.SafeDumper):
    def __init__(self, stream: io.StringIO, indent_lists: bool, allow_unicode: bool, text_style: TextStyle) -> None:
        super().__init__(stream, default_flow_style=False, sort_keys=False, width=120, allow_unicode=allow_unicode)
        self.indent_lists = indent_lists
        self.text_style = text_style

    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless and not self.indent_lists)


def _represent_text(writer: _Writer, text: str) -> yaml.ScalarNode:
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style=writer.text_style(text))


_Writer.add_representer(str, _represent_text)
