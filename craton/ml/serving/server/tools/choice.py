"""Selects the tool call parser and the grammar of an answer, by the request's tools and its `tool_choice`.

With `auto` the model may call tools or not, in its own style. With `required` or a named tool, a grammar forces JSON: a
list of calls, or only the arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from craton.ml.serving.messages import Grammar
from craton.ml.serving.server.errors import BadRequestError
from craton.ml.serving.server.settings import ToolStyle
from craton.ml.serving.server.tools.json_calls import CallList, HermesParser, NamedCall
from craton.ml.serving.server.tools.llama import MARK, LlamaParser
from craton.ml.serving.server.tools.parsed import Parser, Plain
from craton.ml.serving.server.tools.qwen_coder import QwenCoderParser

Schemas = Mapping[str, dict[str, Any]]  # of the parameters, by the tool's name

_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True)
class ToolChoice:
    """The request's `tool_choice`."""

    kind: Literal["none", "auto", "required", "named"]
    name: str = ""  # of the named tool


def guess_style(template: str) -> ToolStyle:
    """Return the tool call style of a chat template."""
    if "<function=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template:
        return "hermes"
    if MARK in template or ("<|start_header_id|>" in template and "parameters" in template):
        return "llama3_json"
    return "none"


def keeps_special_tokens(style: ToolStyle) -> bool:
    """Whether the style's marks are special tokens, which detokenization would remove."""
    return style == "llama3_json"


def make_parser(style: ToolStyle, schemas: Schemas, choice: ToolChoice) -> Parser:
    """Return a new parser for one answer."""
    if choice.kind == "none":
        return Plain()
    if choice.kind == "required":
        return CallList()
    if choice.kind == "named":
        return NamedCall(choice.name)
    if style == "hermes":
        return HermesParser()
    if style == "llama3_json":
        return LlamaParser(schemas)
    if style == "qwen3_coder":
        return QwenCoderParser(schemas)
    raise BadRequestError(
        "the tool call format of this model is unknown; start the server with --tool-parser, or set tool_choice to "
        '"required", "none" or one tool',
        "tools",
    )


def choice_grammar(style: ToolStyle, schemas: Schemas, choice: ToolChoice, is_parallel: bool) -> Grammar | None:
    """Return the grammar that this choice requires; None: no constraint."""
    if choice.kind in ("none", "auto"):
        return None
    if choice.kind == "named":
        return Grammar("json_schema", json.dumps(schemas[choice.name]))
    key = "parameters" if style == "llama3_json" else "arguments"
    definitions: dict[str, Any] = {}
    calls = []
    for name, schema in schemas.items():
        arguments = _hoist(schema, name, definitions)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, key: arguments},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    whole: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not is_parallel:
        whole["maxItems"] = 1
    if definitions:
        whole["$defs"] = definitions
    return Grammar("json_schema", json.dumps(whole))


def _hoist(schema: dict[str, Any], name: str, definitions: dict[str, Any]) -> Any:
    """Return the schema with its definitions moved to the root of the whole schema, and its references updated."""
    moved = {key: value for key, value in schema.items() if key not in _DEFINITIONS}
    for place in _DEFINITIONS:
        for key, value in (schema.get(place) or {}).items():
            definitions[f"{name}.{key}"] = _redirect(value, name)
    return _redirect(moved, name)


def _redirect(schema: Any, name: str) -> Any:
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [_redirect(part, name) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {key: _redirect(value, name) for key, value in schema.items()}
    reference = result.get("$ref")
    for place in _DEFINITIONS:
        if isinstance(reference, str) and reference.startswith(f"#/{place}/"):
            result["$ref"] = f"#/$defs/{name}." + reference.removeprefix(f"#/{place}/")
    return result
