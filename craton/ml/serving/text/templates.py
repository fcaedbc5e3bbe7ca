"""Chat templates: renders messages to a prompt as transformers does, without importing it.

Templates come from model folders and run in Jinja's sandbox, on plain JSON data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from craton.ml.serving.settings import ServingError

TEMPLATE = "chat_template.jinja"
_CONFIG = "tokenizer_config.json"
_TOKENS_MAP = "special_tokens_map.json"
_MARK = "THE-MESSAGE-CONTINUES-HERE "  # its space is missing behind it where a template trims messages


class ChatTemplateError(ServingError):
    """The template rejects the messages."""


class ChatTemplate:
    """One template, or a default one plus one for tools, as some models have."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self.source = "\n".join(templates.values())
        self._special_tokens = dict(special_tokens)
        self._templates = {name: environment.from_string(text) for name, text in templates.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt. Raise ChatTemplateError with the template's own error if it rejects the messages.

        `continue_final_message`: the prompt ends with the content of the last message, without what ends a message."""
        if continue_final_message:
            *before, last = messages
            marked = {**last, "content": last["content"] + _MARK}
            return _cut_at_mark(self.render([*before, marked], tools, add_generation_prompt, options), last["content"])
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        variables = {
            **self._special_tokens,
            "documents": None,
            **(options or {}),
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._templates[name].render(variables)
        except Exception as error:  # noqa: BLE001  (a template is a program: it may raise anything about its input)
            reason = f"the chat template rejects the messages: {type(error).__name__}: {error}"
            raise ChatTemplateError(reason) from None


def _cut_at_mark(prompt: str, content: str) -> str:
    """Return a prompt up to the mark behind the last message's content."""
    end = prompt.rfind(_MARK.strip())
    if end < 0 or content.strip() not in prompt[:end]:
        raise ChatTemplateError(
            "the chat template changes the last message's content, so that it cannot be continued; "
            "set continue_final_message to false"
        )
    is_trimmed = not prompt.startswith(_MARK, end)
    return prompt[:end].rstrip() if is_trimmed else prompt[:end]


def load_template(folder: Path) -> ChatTemplate | None:
    """Return the template of a model folder, or None."""
    config = _read(folder / _CONFIG)
    file = folder / TEMPLATE
    template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(template, str):
        templates = {"default": template}
    elif isinstance(template, list):
        templates = {str(entry["name"]): str(entry["template"]) for entry in template}
        templates.setdefault("default", next(iter(templates.values())))
    else:
        return None
    named = {**_read(folder / _TOKENS_MAP), **config}
    special = {}
    for key, value in named.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            special[key] = text
    return ChatTemplate(templates, special)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; for a prompt it has no effect."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own form)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
