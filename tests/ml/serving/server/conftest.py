"""A model folder with a small real tokenizer, and front ends on real ports with a scripted engine behind them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that tests with a real engine find its model
sys.path.insert(0, str(Path(__file__).parent))  # so that the tests find the scripted engine

from scripted_engine import Script, ScriptedEngine, Served, controlled, tokens_of

from craton.ml.data import load_tokenizer
from craton.ml.data.tokenizer import train_bpe

PYTHON_TAG = "<|python_tag|>"  # Llama's mark of a call, which texts leave out

TEMPLATE = (
    "{%- if tools %}<|im_start|>system\nWrite <tool_call>…</tool_call>: {{ tools | tojson }}<|im_end|>\n{% endif -%}"
    "{{- raise_exception('the template says no') if messages[0].content == 'refuse' -}}"
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}</tool_call>{% endfor -%}"
    "<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{{ '<think>\n' if think }}{% endif -%}"
)
Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    train_bpe(["The quick brown fox says hello to the world. What is 2 + 2? It is 4.\n"] * 4, 300, folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_special_tokens([PYTHON_TAG])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def encode(model_folder: Path) -> Callable[[str], list[int]]:
    return lambda text: tokens_of(model_folder, text)


@pytest.fixture(scope="module")
def start(model_folder: Path) -> Iterator[Serve]:
    """`start(*options, …)` gives a new front end; all of them end with the module."""
    started: list[Served] = []

    def make(
        *options: str,
        adapters: tuple[str, ...] = (),
        is_ready: bool = True,
        has_folder: bool = True,
        environment: dict[str, str] | None = None,
    ) -> Served:
        engine = ScriptedEngine(lambda _: Script(), adapters, is_ready)
        folder = ["--model-folder", str(model_folder)] if has_folder else []
        started.append(Served(engine, *folder, *options, environment=environment))
        return started[-1]

    yield make
    for served in started:
        served.stop()


@pytest.fixture(scope="session")
def shared(model_folder: Path) -> Iterator[Served]:
    """One for all tests that only ask."""
    engine = ScriptedEngine(lambda _: Script(), adapters=("painter",))
    served = Served(engine, "--model-folder", str(model_folder), "--admin")
    yield served
    served.stop()


@pytest.fixture
def served(shared: Served) -> Served:
    """The shared one, with nothing of the last test left in its engine."""
    shared.engine.forget()
    shared.engine.answer = lambda _: Script()
    shared.engine.control = controlled
    return shared
