"""Tokens to text and back: whole characters, stop strings however they are cut, templates as transformers has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import Script, Served
from tokenizers import Tokenizer, decoders, models

from craton.ml.serving.messages import OutputDelta
from craton.ml.serving.server.http_service import generation_defaults
from craton.ml.serving.text import AnswerReader, ChatTemplate, ChatTemplateError, Detokenizer, Vocabulary, load_template
from craton.ml.serving.text.answer import StopStrings
from craton.ml.serving.text.vocabulary import HELD_TOKENS

EMOJI = "naïve 👩‍👩‍👧 数 fox"


@pytest.fixture(scope="module")
def vocabulary(model_folder: Path) -> Vocabulary:
    return Vocabulary(model_folder)


def test_no_character_is_ever_split(vocabulary: Vocabulary) -> None:
    tokens = vocabulary.encode(EMOJI, with_special_tokens=False)
    assert len(tokens) > len(EMOJI), "some characters are several tokens"
    detokenizer = Detokenizer(vocabulary, prompt=(5,))
    chunks = [detokenizer.feed(token) for token in tokens]
    assert "".join(chunks) + detokenizer.finish() == EMOJI
    assert not any("\N{REPLACEMENT CHARACTER}" in chunk for chunk in chunks)


def test_an_answer_cut_within_a_character_says_so(vocabulary: Vocabulary) -> None:
    tokens = vocabulary.encode("a👧", with_special_tokens=False)
    detokenizer = Detokenizer(vocabulary, prompt=(5,))
    assert [detokenizer.feed(token) for token in tokens[:-1]] == ["a", "", "", ""]
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"
    assert detokenizer.finish() == ""


def test_bytes_that_never_become_text_are_not_held_for_ever(vocabulary: Vocabulary) -> None:
    bad = next(token for token in range(300) if vocabulary.token_bytes(token) == b"\xff")
    detokenizer = Detokenizer(vocabulary, prompt=(5,))
    shown = [detokenizer.feed(bad) for _ in range(3 * HELD_TOKENS)]
    assert "\N{REPLACEMENT CHARACTER}" * HELD_TOKENS in "".join(shown)


def test_a_prompt_that_ends_within_a_character_is_not_repeated(vocabulary: Vocabulary) -> None:
    tokens = vocabulary.encode("hello 👧", with_special_tokens=False)
    detokenizer = Detokenizer(vocabulary, tuple(tokens[:-1]))
    answer = detokenizer.feed(tokens[-1]) + detokenizer.feed(vocabulary.encode("x", with_special_tokens=False)[0])
    assert answer == "\N{REPLACEMENT CHARACTER}x"


def test_special_tokens_are_left_out_unless_asked_for(vocabulary: Vocabulary) -> None:
    tokens = vocabulary.encode("a<|im_end|>b", with_special_tokens=False)
    plain, kept = Detokenizer(vocabulary, (5,)), Detokenizer(vocabulary, (5,), keep_special=True)
    assert "".join(plain.feed(token) for token in tokens) == "ab"
    assert "".join(kept.feed(token) for token in tokens) == "a<|im_end|>b"


def test_the_bytes_of_tokens_make_up_the_text(vocabulary: Vocabulary) -> None:
    tokens = vocabulary.encode(EMOJI, with_special_tokens=False)
    assert b"".join(vocabulary.token_bytes(token) for token in tokens) == EMOJI.encode()
    assert vocabulary.token_bytes(299_999) == b""


def test_a_tokenizer_that_writes_spaces_as_marks(tmp_path: Path) -> None:
    """Such tokenizers drop the space before the first token: within an answer it must stay."""
    words = {"<unk>": 0, "▁hello": 1, "▁world": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    tokenizer = Tokenizer(models.BPE(words, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary(tmp_path)
    detokenizer = Detokenizer(vocabulary, prompt=(1,))
    assert [detokenizer.feed(token) for token in (2, *(3 + byte for byte in "é".encode()), 1)] == [
        " world", "", "é", " hello",
    ]  # fmt: skip
    assert [vocabulary.token_bytes(token) for token in (1, 3 + 0xC3)] == [b" hello", b"\xc3"]


@pytest.mark.parametrize(
    ("text", "stops", "kept", "found"),
    [
        ("hello world", ["wor"], "hello ", "wor"),
        ("hello world", ["worm", "wo"], "hello ", "wo"),
        ("aaab", ["aab"], "a", "aab"),
        ("one\n\ntwo", ["\n\n", "\n"], "one", "\n"),
        ("abcd", ["bcd", "cd"], "a", "bcd"),
        ("hello", ["loo"], "hello", None),
    ],
)
def test_stop_strings(text: str, stops: list[str], kept: str, found: str | None) -> None:
    for cut in range(len(text) + 1):
        for chunks in ([text[:cut], text[cut:]], list(text)):
            strings = StopStrings(stops)
            given = ""
            for chunk in chunks:
                if strings.found is None:
                    given += strings.feed(chunk)
            assert (given + strings.finish(), strings.found) == (kept, found)


@settings(max_examples=300)
@given(text=st.text("ab", max_size=20), stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_are_the_first_to_be_complete(text: str, stops: list[str]) -> None:
    """Against the plainest rule: the shortest beginning of the text that ends with one of them."""
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    expected = text
    if ends:
        found = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        expected = text[: ends[0] - len(found)]
    for chunks in ([text], list(text)):
        strings = StopStrings(stops)
        given = "".join(strings.feed(chunk) for chunk in chunks if strings.found is None) + strings.finish()
        assert given == expected


def read_all(reader: AnswerReader, tokens: list[int], in_piece: int) -> list[Any]:
    additions = []
    for at in range(0, len(tokens), in_piece):
        part = tokens[at : at + in_piece]
        piece = OutputDelta(1, 0, part, [-0.5] * len(part))
        piece.finish = "stop" if at + in_piece >= len(tokens) else None
        additions.append(reader.read(piece))
        if reader.is_complete:
            break
    return additions


@pytest.mark.parametrize("in_piece", [1, 2, 100])
def test_log_probs_come_with_their_text(vocabulary: Vocabulary, in_piece: int) -> None:
    tokens = vocabulary.encode("hello 👧 the world", with_special_tokens=False)
    reader = AnswerReader(Detokenizer(vocabulary, (5,)), ["the wo"], has_scores=True)
    additions = read_all(reader, tokens, in_piece)
    text = "".join(addition.text for addition in additions)
    scored = [score.token for addition in additions for score in addition.scores]
    assert (text, additions[-1].finish, additions[-1].reason) == ("hello 👧 ", "stop", "the wo")
    # " the" begins with the space that stays.
    assert b"".join(vocabulary.token_bytes(token) for token in scored).decode() == "hello 👧 the"
    assert reader.num_tokens == len(tokens) - 1, "all but the last one, since the stop string ends in the one before"


def test_stop_strings_wait_for_the_least_number_of_tokens(vocabulary: Vocabulary) -> None:
    tokens = vocabulary.encode("fox fox fox", with_special_tokens=False)
    first = vocabulary.encode("fox", with_special_tokens=False)
    reader = AnswerReader(Detokenizer(vocabulary, (5,)), ["fox"], min_tokens=len(first))
    assert "".join(addition.text for addition in read_all(reader, tokens, 1)) == "fox "


# The shapes of the templates people use, in our own words.
TEMPLATES = {
    "plain": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "marked": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "tools": "{{ bos_token }}{%- for tool in tools or [] %}\n  {{ tool | tojson(indent=2) }}\n{%- endfor %}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% set ns.last = loop.index %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    "{{ ns.last }}",
    "options": "{{ 'thinks' if enable_thinking is defined and enable_thinking }}{{ messages[0]['content'][:2] }}",
}
MESSAGES = [
    {"role": "system", "content": " Be <b>brief</b>. "},
    {"role": "user", "content": "Grüße & Küsse"},
    {"role": "assistant", "content": "ja"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"ä": {}}}}}]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str, model_folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder, bos_token="<|im_start|>")
    template = ChatTemplate(
        {"default": TEMPLATES[name]}, {"bos_token": "<|im_start|>", "eos_token": str(tokenizer.eos_token)}
    )
    for tools in (None, TOOLS):
        expected = tokenizer.apply_chat_template(
            MESSAGES, tools=tools, chat_template=TEMPLATES[name], tokenize=False, enable_thinking=True
        )
        assert template.render(MESSAGES, tools, False, {"enable_thinking": True}) == expected


@pytest.mark.parametrize("content", ["ja", "", "two\n words \n", " <b>&amp;</b> THE-MESSAGE-CONTINUES-HERE "])
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "options"])
def test_the_last_message_is_left_open_as_in_transformers(name: str, content: str, model_folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder, bos_token="<|im_start|>")
    messages = [*MESSAGES[:2], {"role": "assistant", "content": content}]
    special = {"bos_token": "<|im_start|>", "eos_token": str(tokenizer.eos_token)}
    expected = tokenizer.apply_chat_template(
        messages, chat_template=TEMPLATES[name], tokenize=False, continue_final_message=True
    )
    template = ChatTemplate({"default": TEMPLATES[name]}, special)
    assert template.render(messages, None, False, continue_final_message=True) == expected
    assert expected.rstrip().endswith(content.strip())


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ messages[-1].content[2:] }}"])
def test_a_message_that_the_template_changes_cannot_be_continued(template: str) -> None:
    with pytest.raises(ChatTemplateError, match="cannot be continued"):
        ChatTemplate({"default": template}, {}).render(MESSAGES, None, False, continue_final_message=True)


def test_a_template_is_found_in_the_configuration_too(tmp_path: Path) -> None:
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}x"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = load_template(tmp_path)
    assert template is not None
    assert template.render([]) == "<s>x"
    config["chat_template"] = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = load_template(tmp_path)
    assert template is not None
    assert (template.render([]), template.render([], TOOLS)) == ("d", "t")
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_template(tmp_path) is None


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].content + 1 }}", "{{ ''.__class__.__mro__ }}"],
)
def test_a_template_may_refuse_and_may_not_escape(template: str) -> None:
    with pytest.raises(ChatTemplateError, match="the chat template rejects the messages"):
        ChatTemplate({"default": template}, {}).render(MESSAGES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"temperature": 0.6, "top_k": 20, "do_sample": true}', {"temperature": 0.6, "top_k": 20.0}),
        ('{"temperature": -1, "top_p": 0.9, "top_k": "many"}', {"top_p": 0.9}),
        ("[1]", {}),
        ("{", {}),
    ],
)
def test_what_the_makers_of_a_model_advise(tmp_path: Path, text: str, expected: dict[str, float]) -> None:
    assert generation_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    assert generation_defaults(tmp_path) == expected


def test_without_a_tokenizer_answers_are_numbers(start: Callable[..., Served]) -> None:
    served = start(has_folder=False)
    served.engine.answer = lambda _: Script([7, 300, 12])
    ask: Any = {"model": "scripted", "prompt": [1, 2, 3], "max_tokens": 9}
    whole = served.client().completions.create(**ask, logprobs=1)
    assert whole.choices[0].text == " 7 300 12"
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.text_offset == [0, 2, 6]
    chunks = served.client().completions.create(
        model="scripted", prompt=[1, 2, 3], max_tokens=9, stop=" 300", stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == " 7"
