"""YAML as people would write it: keys in the order they were given, no aliases, texts of several lines as blocks."""

from __future__ import annotations

import yaml


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def to_yaml(*documents: object) -> str:
    """One document, or several separated as kubectl wants them."""
    return "---\n".join(yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120) for document in documents)
