"""Tool calls and reasoning are found in text, the same one character at a time, all at once, and cut anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from craton.ml.serving.server.errors import BadRequestError
from craton.ml.serving.server.tools import (
    Parsed,
    Parser,
    ReasoningParser,
    ToolChoice,
    begins_inside,
    choice_grammar,
    guess_style,
    make_parser,
)
from craton.ml.serving.server.tools.parsed import Plain

AUTO = ToolChoice("auto")
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "note": {"type": ["string", "null"]},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        },
    },
    "now": {"type": "object", "properties": {}},
}


@dataclass
class Whole:
    """All that was found, put together as a client does."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]


def together(parts: list[Parsed]) -> Whole:
    calls: list[list[str]] = []
    for part in parts:
        for call in part.calls:
            if call.name is not None:
                assert call.index == len(calls), "calls begin in order"
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    return Whole(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        [(name, arguments) for name, arguments in calls],
    )


def parse(make: Callable[[], Parser], chunks: list[str]) -> Whole:
    parser = make()
    return together([*(parser.feed(chunk) for chunk in chunks), parser.finish()])


def parse_every_way(make: Callable[[], Parser], text: str) -> Whole:
    """By letters, at once, and cut at every place; all must agree."""
    whole = parse(make, [text])
    assert parse(make, list(text)) == whole
    for cut in range(len(text)):
        assert parse(make, [text[:cut], text[cut:]]) == whole, f"cut at {cut}"
    return whole


def parser(style: str) -> Callable[[], Parser]:
    return lambda: make_parser(style, SCHEMAS, AUTO)  # type: ignore[arg-type]


HERMES = [
    ("hello", "hello", []),
    ("a < b <too", "a < b <too", []),
    ("trailing space \n", "trailing space \n", []),
    (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln {1} \\"}", "days": 2}}\n</tool_call>',
        "",
        [("weather", '{"city": "Köln {1} \\"}", "days": 2}')],
    ),
    (
        'Let me see.\n\n<tool_call>{"name":"now","arguments":{}}</tool_call>\n<tool_call>\n'
        '{"arguments": {"city": "x"}, "name": "weather"}\n</tool_call>\n',
        "Let me see.",
        [("now", "{}"), ("weather", '{"city": "x"}')],
    ),
    ('<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    ('<tool_call>{"name": "now", "arguments": null}</tool_call> done', "done", [("now", "{}")]),
    ('<tool_call>{"name": "w", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("w", '{"a": 1}')]),
    (
        '<tool_call>{"name": "now", "arguments": {}}<tool_call>{"name": "b"}</tool_call>',
        "",
        [("now", "{}"), ("b", "{}")],
    ),
    ('<tool_call>{"name": "now"}}\n</tool_call>', "", [("now", "{}")]),
    ('<tool_call>{"name": "now"} and so on', "and so on", [("now", "{}")]),
    ("<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
    ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    ('<tool_call>{"name": 3}', '<tool_call>{"name": 3}', []),
    ('<tool_call>{"name": "weather", "arguments": {"city": "Pa', "", [("weather", '{"city": "Pa')]),
    ('<tool_call>{"na', '<tool_call>{"na', []),
    ("<tool_ca", "<tool_ca", []),
]
LLAMA = [
    ("hello", "hello", []),
    ('{"name": "weather", "parameters": {"city": "Oslo"}}', "", [("weather", '{"city": "Oslo"}')]),
    ('<|python_tag|>{"name": "unknown", "parameters": {"a": [1, {}]}}', "", [("unknown", '{"a": [1, {}]}')]),
    (
        '{"type": "function", "name": "now", "parameters": {}}; {"function": "weather", "parameters": {"days": 1}}',
        "",
        [("now", "{}"), ("weather", '{"days": 1}')],
    ),
    ('{"name": "nobody", "parameters": {}}', '{"name": "nobody", "parameters": {}}', []),
    ('{"title": "An answer in JSON", "name": "now"}', '{"title": "An answer in JSON", "name": "now"}', []),
    (' \n{"name": "now"} and then', "and then", [("now", "{}")]),
    ('Sure. <|python_tag|>weather.call(city="Rome", days=3)', "Sure.", [("weather", '{"city": "Rome", "days": 3}')]),
    ("<|python_tag|>print(1 + 1)", "print(1 + 1)", []),
    ("<|python_tag|>weather.call(city=f())", "weather.call(city=f())", []),
    ('{"name": "weather", "parameters": {"city": "Os', "", [("weather", '{"city": "Os')]),
    ('{"name": "wea', '{"name": "wea', []),
    ("a <| b <|python", "a <| b <|python", []),
    ("{not json}", "{not json}", []),
]
QWEN_CODER = [
    ("hello <b>", "hello <b>", []),
    (
        'I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nNew "York"\n\n</b>\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=metric>True</parameter>\n</function>\n</tool_call>",
        "I look.",
        [("weather", '{"city": "New \\"York\\"\\n\\n</b>", "days": 3, "metric": true}')],
    ),
    (
        "<tool_call><function=now></function></tool_call>\n<tool_call><function=now></function></tool_call>",
        "",
        [("now", "{}"), ("now", "{}")],
    ),
    (
        '<function=weather><parameter=tags>["a", 1]</parameter><parameter=note>null</parameter></function> bye',
        "bye",
        [("weather", '{"tags": ["a", 1], "note": null}')],
    ),
    (
        "<function=weather><parameter=note>12</parameter><parameter=limit>12</parameter><parameter=x>1</parameter>"
        "<parameter=days>many</parameter></function>",
        "",
        [("weather", '{"note": "12", "limit": 12, "x": "1", "days": "many"}')],
    ),
    ("<tool_call>but no", "<tool_call>but no", []),
    ("<tool_call>\n<function=wea", "<function=wea", []),
    ("<function=weather><parameter=city>Par", "", [("weather", '{"city": "Par')]),
]


@pytest.mark.parametrize(("text", "content", "calls"), HERMES)
def test_hermes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse_every_way(parser("hermes"), text) == Whole(content, "", calls)


@pytest.mark.parametrize(("text", "content", "calls"), LLAMA)
def test_llama(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse_every_way(parser("llama3_json"), text) == Whole(content, "", calls)


@pytest.mark.parametrize(("text", "content", "calls"), QWEN_CODER)
def test_qwen_coder(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse_every_way(parser("qwen3_coder"), text) == Whole(content, "", calls)


def test_the_arguments_come_as_they_are_written() -> None:
    for style, text in (
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Par'),
        ("llama3_json", '{"name": "weather", "parameters": {"city": "Par'),
        ("qwen3_coder", "<function=weather><parameter=city>Par"),
    ):
        made = parser(style)()
        arguments = [call.arguments for letter in text for call in made.feed(letter).calls]
        assert "".join(arguments) == '{"city": "Par'
        assert len(arguments) > len("Par"), style


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "<function=", "weather>", "<parameter=", "city>", "</parameter>",
    "</function>", "<think>", "</think>", '{"name": "now"', ', "arguments": {"a": "}"}', "}", '"', "\\", "\n", " x ",
    ";", "<", "now.call(", ")",
]  # fmt: skip


@pytest.mark.parametrize("style", ["hermes", "llama3_json", "qwen3_coder"])
@settings(max_examples=150)
@given(data=st.data())
def test_any_text_is_found_the_same_in_any_cut(style: str, data: st.DataObject) -> None:
    chunks = data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=12))
    text = "".join(chunks)

    def make() -> Parser:
        return ReasoningParser(parser(style)(), is_inside=False)

    whole = parse(make, [text])
    assert parse(make, chunks) == whole
    assert parse(make, list(text)) == whole
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=4)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(make, pieces) == whole


@pytest.mark.parametrize(
    ("text", "is_inside", "reasoning", "content"),
    [
        ("<think>\nWhy?\n\nSo.\n</think>\n\nYes.\n", False, "Why?\n\nSo.", "Yes.\n"),
        ("Why?</think>Yes", True, "Why?", "Yes"),
        ("<think>Why?</think>Yes", True, "Why?", "Yes"),
        ("</think>\nYes", True, "", "Yes"),
        ("<<think>", True, "<<think>", ""),
        ("Yes <think> no </think>", False, "", "Yes <think> no </think>"),
        ("\n\n<think>a < b</think>", False, "a < b", ""),
        ("cut off <", True, "cut off <", ""),
        ("<thi", False, "", "<thi"),
        ("  ", False, "", "  "),
    ],
)
def test_reasoning(text: str, is_inside: bool, reasoning: str, content: str) -> None:
    assert parse_every_way(lambda: ReasoningParser(Plain(), is_inside), text) == Whole(content, reasoning, [])


def test_a_call_after_reasoning() -> None:
    text = '<think>\n<tool_call> no\n</think>\n\n<tool_call>{"name": "now"}</tool_call>'
    whole = parse_every_way(lambda: ReasoningParser(parser("hermes")(), is_inside=False), text)
    assert whole == Whole("", "<tool_call> no", [("now", "{}")])


def test_the_prompt_says_whether_reasoning_has_begun() -> None:
    assert begins_inside("<|assistant|>\n<think>\n")
    assert not begins_inside("<|assistant|>\n<think>\n\n</think>\n\n")


def test_required_calls_follow_a_grammar_and_are_read_back() -> None:
    choice = ToolChoice("required")
    grammar = choice_grammar("hermes", SCHEMAS, choice, is_parallel=True)
    assert grammar is not None
    schema = json.loads(grammar.text)
    assert (grammar.kind, schema["type"], schema["minItems"]) == ("json_schema", "array", 1)
    assert [call["properties"]["name"] for call in schema["items"]["anyOf"]] == [{"const": "weather"}, {"const": "now"}]
    single = choice_grammar("llama3_json", SCHEMAS, choice, is_parallel=False)
    assert single is not None
    assert json.loads(single.text)["maxItems"] == 1
    assert "parameters" in json.loads(single.text)["items"]["anyOf"][0]["required"]
    text = '[{"name": "weather", "arguments": {"city": "a"}}, {"name": "now", "arguments": {}}]'
    whole = parse_every_way(lambda: make_parser("hermes", SCHEMAS, choice), text)
    assert whole == Whole("", "", [("weather", '{"city": "a"}'), ("now", "{}")])


def test_references_of_a_tool_find_their_definitions() -> None:
    place = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Place"}}}
    schemas = {
        "go": {"type": "object", "properties": {"to": {"$ref": "#/$defs/Place"}}, "$defs": {"Place": place}},
        "sit": {"properties": {"on": {"$ref": "#/definitions/Place"}}, "definitions": {"Place": {"type": "string"}}},
    }
    grammar = choice_grammar("hermes", schemas, ToolChoice("required"), is_parallel=True)
    assert grammar is not None
    schema = json.loads(grammar.text)
    arguments = [call["properties"]["arguments"] for call in schema["items"]["anyOf"]]
    assert arguments[0]["properties"]["to"] == {"$ref": "#/$defs/go.Place"}
    assert arguments[1]["properties"]["on"] == {"$ref": "#/$defs/sit.Place"}
    assert schema["$defs"]["go.Place"]["properties"]["next"] == {"$ref": "#/$defs/go.Place"}
    assert schema["$defs"]["sit.Place"] == {"type": "string"}


def test_a_named_tool_gets_the_whole_answer_as_arguments() -> None:
    choice = ToolChoice("named", "weather")
    grammar = choice_grammar("none", SCHEMAS, choice, is_parallel=True)
    assert grammar is not None
    assert json.loads(grammar.text) == SCHEMAS["weather"]
    whole = parse_every_way(lambda: make_parser("none", SCHEMAS, choice), '{"city": "a"}')
    assert whole == Whole("", "", [("weather", '{"city": "a"}')])


def test_the_style_is_guessed_from_the_template() -> None:
    assert guess_style("<tool_call>\n<function=example>") == "qwen3_coder"
    assert guess_style("return <tool_call>{json}</tool_call>") == "hermes"
    assert guess_style("<|start_header_id|> … respond with {'name': …, 'parameters': …}") == "llama3_json"
    assert guess_style("[INST] {{ messages }}") == "none"
    with pytest.raises(BadRequestError, match="--tool-parser"):
        make_parser("none", SCHEMAS, AUTO)
