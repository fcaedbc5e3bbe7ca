"""lm-evaluation-harness through our server gives, item by item, what its own Hugging Face backend gives."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))  # the live server of the serving tests

from live_server import LONGEST, Server, make_model, serving

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: `make evaluators` installs it")

NUM_LIKELY = 6  # problems with a continuation that the model would write, and as many without
WINDOW = LONGEST - 2  # local-completions leaves out two tokens of its max_length, its own backend none
PROMPTS = ["What is 2 + 2?", "The quick brown fox", "Hello, world.", "It is 4.", "says hello to", "über 日本"]
TASKS = {
    "choices": """\
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: choices
doc_to_target: gold
""",
    "continuations": """\
output_type: loglikelihood
doc_to_text: "{{prompt}}"
doc_to_target: "{{continuation}}"
metric_list: [{metric: acc}, {metric: perplexity}]
""",
    "documents": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
""",
    "answers": """\
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{continuation}}"
generation_kwargs: {until: ["."], max_gen_toks: 24, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match}]
""",
}


def likeliest_text(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str | None:
    """Return the two tokens that the model would write, or None if their text has other tokens."""
    begin = tokens = tokenizer(prompt).input_ids
    with torch.no_grad():
        for _ in range(2):
            tokens = [*tokens, int(model(torch.tensor([tokens])).logits[0, -1].argmax())]
    text = str(tokenizer.decode(tokens[len(begin) :], skip_special_tokens=True))
    return text if tokenizer(prompt + text).input_ids == tokens else None


def write_tasks(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a task of each kind, with choices that the model would write itself and ones that it would not."""
    rows: list[dict[str, Any]] = []
    for prompt in (f"{text} {number}" for number in range(100) for text in PROMPTS):
        likeliest = likeliest_text(model, tokenizer, prompt)
        if likeliest is None and sum(row["is_likely"] for row in rows) < len(rows):
            continue
        rows.append(
            {
                "prompt": prompt,
                "choices": [" the world", " 4.", likeliest or "!", " brown fox says hello"],
                "gold": len(rows) % 4,
                "continuation": likeliest or " naïve 日 fox",
                "text": f"{prompt} to the world " * (1 + len(rows)),
                "is_likely": likeliest is not None,
            }
        )
        if len(rows) == 2 * NUM_LIKELY:
            break
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, lines in TASKS.items():
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {data}}}\ntest_split: train\n"
            f"target_delimiter: ''\n{lines}",
            encoding="utf-8",
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that often ends a text, for whether an end is counted matters."""
    folder = tmp_path_factory.mktemp("models") / "little"
    folder.mkdir()
    theirs = make_model(folder, 1)
    end = AutoTokenizer.from_pretrained(folder).eos_token_id
    with torch.no_grad():
        theirs.lm_head.weight[end] *= 4
    theirs.config.eos_token_id = theirs.generation_config.eos_token_id = end
    theirs.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("runs"), "evaluated") as server:
        yield server


def evaluated(folder: Path, kind: str, arguments: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    return {name: sorted(results["samples"][name], key=lambda sample: sample["doc_id"]) for name in TASKS}


def test_lm_eval_through_the_server_equals_its_own_backend(
    model: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    theirs = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    write_tasks(tmp_path, theirs, tokenizer)
    expected = evaluated(tmp_path, "hf", {"pretrained": theirs, "tokenizer": tokenizer, "max_length": WINDOW})
    found = evaluated(
        tmp_path,
        "local-completions",
        {
            "model": server.name,
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": str(model),
            "tokenizer_backend": "huggingface",
            "max_length": LONGEST,
            "num_concurrent": 4,
        },
    )
    greedy = []
    for name in ("choices", "continuations"):
        for their_sample, sample in zip(expected[name], found[name], strict=True):
            pairs = zip(their_sample["filtered_resps"], sample["filtered_resps"], strict=True)
            for (their_logprob, their_greedy), (logprob, is_greedy) in pairs:
                assert logprob == pytest.approx(their_logprob, abs=1e-4)
                assert is_greedy == their_greedy, sample["arguments"]
                greedy.append(is_greedy)
    assert NUM_LIKELY * 2 <= sum(greedy) < len(greedy), "both kinds, in both tasks"
    for their_sample, sample in zip(expected["documents"], found["documents"], strict=True):
        assert sample["filtered_resps"] == pytest.approx(their_sample["filtered_resps"], rel=1e-6)
    texts = [sample["filtered_resps"] for sample in found["answers"]]
    assert texts == [sample["filtered_resps"] for sample in expected["answers"]]
    assert len({text for (text,) in texts}) > len(texts) / 2
