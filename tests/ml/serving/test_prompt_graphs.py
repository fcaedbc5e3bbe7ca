"""Steps with prompts as graphs: which steps have one, and that answers are those of steps without."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from model_pairs import VOCABULARY, pair
from test_engine import engine_of

from craton.ml.serving.device import sampler
from craton.ml.serving.device.prompt_graphs import MAX_PROMPTS, PromptGraphs, token_counts
from craton.ml.serving.engine.engine import Engine
from craton.ml.serving.messages import Sampling, Submit
from craton.ml.serving.schedule import StepInput

# more requests than tokens of the smallest graph
SETTINGS: dict[str, Any] = {"max_running": 70, "chunk_tokens": 100, "blocks": 900}
Counts = dict[str, int]


def count_steps(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Count steps with prompts, and those that were graphs."""
    found = {"asked": 0, "replayed": 0}
    takes, replay = PromptGraphs.takes, PromptGraphs.replay

    def counted(graphs: PromptGraphs, work: StepInput) -> bool:
        found["asked"] += 1
        return takes(graphs, work)

    def replayed(graphs: PromptGraphs, work: StepInput, placed: Any = None) -> Any:
        found["replayed"] += 1
        return replay(graphs, work, placed)

    monkeypatch.setattr(PromptGraphs, "takes", counted)
    monkeypatch.setattr(PromptGraphs, "replay", replayed)
    return found


def load(engine: Engine, **options: Any) -> dict[int, list[int]]:
    """Requests of all lengths that arrive while others are answered; return the tokens of each."""
    draw = random.Random(5)
    tokens: dict[int, list[int]] = {}
    for number in range(50):
        prompt = tuple(draw.randrange(VOCABULARY) for _ in range(draw.choice((1, 2, 5, 30, 90, 180))))
        sampling = Sampling(**{"max_tokens": draw.randint(1, 20), "temperature": 0.8, "seed": number} | options)
        engine.submit(Submit(number, prompt, sampling))
        for _ in range(draw.randint(0, 2)):
            collect(engine, tokens)
    while not engine.is_idle:
        collect(engine, tokens)
    engine.scheduler.check()
    return tokens


def collect(engine: Engine, tokens: dict[int, list[int]]) -> None:
    for piece in engine.step():
        assert not piece.error, piece.error
        tokens.setdefault(piece.id, []).extend(piece.tokens)


@pytest.mark.parametrize(
    ("family", "settings", "options"),
    [
        ("llama", {}, {}),
        ("qwen3", {"overlap": False}, {"top_p": 0.7, "presence_penalty": 0.4}),
        ("llama", {"draft_tokens": 3}, {"temperature": 0.0}),
        ("mixtral", {}, {"logit_bias": {3: 2.0}}),
        ("deepseek_v3", {}, {"logprobs": 2}),
    ],
)
def test_answers_are_those_of_steps_without_graphs(
    monkeypatch: pytest.MonkeyPatch, family: str, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    expected = load(engine_of(pair(family)[1], **SETTINGS | settings, graphs="never"), **options)
    engine = engine_of(pair(family)[1], **SETTINGS | settings, graphs="always")
    found = count_steps(monkeypatch)
    assert load(engine, **options) == expected
    assert found["replayed"] == found["asked"] > 20


def test_prompts_whose_logprobs_are_asked_for_run_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(**SETTINGS, graphs="always")
    found = count_steps(monkeypatch)
    engine.submit(Submit(1, tuple(range(30)), Sampling(max_tokens=1, prompt_logprobs=1)))
    (piece,) = (piece for _ in range(3) for piece in engine.step())
    assert piece.prompt_logprobs is not None
    assert len(piece.prompt_logprobs) == 30
    assert found == {"asked": 1, "replayed": 0}


def test_a_step_has_the_next_larger_size() -> None:
    graphs = graphs_of(max_running=40, chunk_tokens=300)
    assert graphs.sizes == [64, 128, 192, 256, 320]
    assert graphs.bounds == [32, 40]
    assert graphs.takes(step([1] * 32 + [200]))
    assert graphs.takes(step([1] * 40 + [280]))
    assert not graphs.takes(step([1] * 41 + [5]))  # no graph has room for more that decode
    assert not graphs.takes(step([1, 320]))
    assert graphs.takes(step([2] * (MAX_PROMPTS - 1)))  # and padding
    assert not graphs.takes(step([2] * (MAX_PROMPTS - 1) + [3]))


def test_a_server_with_large_steps_captures_no_more_graphs() -> None:
    graphs = graphs_of(max_running=4, chunk_tokens=16_384)
    assert graphs.sizes[-1] == 4096
    assert not graphs.takes(step([200] * 21))


def test_drafts_are_sampled_in_the_graph_with_room_for_them() -> None:
    """40 requests with 3 draft tokens each, while a prompt is computed: few decode, but many tokens are sampled."""
    graphs = graphs_of(max_running=256, chunk_tokens=512)
    plain = step([4] * 40 + [200])
    ends = np.cumsum(plain.counts[:40], dtype=np.int32)
    sampled = np.append((ends[:, None] + np.arange(-4, 0)).flatten(), 359).astype(np.int32)
    rows = np.append(plain.rows[:40].repeat(4), plain.rows[40]).astype(np.int32)
    work = replace(plain, sampled=sampled, sampled_rows=rows)
    assert graphs.takes(work)
    chosen = graphs.replay(work)[1]
    assert len(chosen.tokens) == len(sampled) == 161


def test_padding_is_cut_where_requests_are_short() -> None:
    """128 tokens of padding are more than a request of this engine may have."""
    graphs = graphs_of(max_length=20, max_running=4, chunk_tokens=1000)
    assert graphs.sizes[-1] == 1024
    longest = graphs._runner.longest
    prompts = 4
    assert graphs.takes(step([20] * prompts))
    chosen = graphs.replay(step([20] * prompts))[1]
    assert len(chosen.tokens) == prompts
    assert longest < 48


def test_without_capture_there_is_none() -> None:
    graphs = graphs_of(max_running=4, chunk_tokens=64)
    work = step([5])
    assert graphs.takes(work)
    graphs.drop()
    assert not graphs.takes(work)


@pytest.mark.parametrize("multiple", [1, 8, 48])
@pytest.mark.parametrize("largest", [1, 100, 2048, 10_000])
def test_sizes_are_multiples_of_the_ranks_and_waste_little(largest: int, multiple: int) -> None:
    sizes = token_counts(largest, multiple)
    assert all(size % multiple == 0 for size in sizes)
    assert sizes == sorted(set(sizes))
    assert largest <= sizes[-1] < largest + 256 + multiple
    for smaller, larger in pairwise(sizes):
        assert larger - smaller <= max(64, smaller / 6) + multiple


def graphs_of(**settings: Any) -> PromptGraphs:
    runner: Any = engine_of(**{"blocks": 600, "graphs": "always"} | settings)._executor
    assert runner.prompt_graphs is not None
    return runner.prompt_graphs


def step(counts: list[int]) -> StepInput:
    """Requests with as many tokens as they have in this step, all of which sample one."""
    numbers, decode = np.asarray(counts, np.int32), sum(count == 1 for count in counts)
    rows = np.arange(len(counts), dtype=np.int32) % 4
    last = np.cumsum(numbers, dtype=np.int32) - 1
    return StepInput(rows, numbers, numbers, decode, np.zeros(sum(counts) - decode, np.int32), last, rows)


def test_every_kind_of_step_runs_before_a_capture_whatever_kernels_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiles ahead runs them all while launches do nothing: sampled tokens are what their memory held."""
    runner: Any = engine_of(**SETTINGS, graphs="always")._executor
    for name in ("choose", "choose_kept"):
        monkeypatch.setattr(
            sampler, name, lambda logits, *_: (torch.full((len(logits),), 1 << 40), logits[:, 0].float())
        )
    kinds = len(runner.graphs.sizes[1]) * 2 + len(runner.prompt_graphs.sizes) * len(runner.prompt_graphs.bounds)
    bodies, ran = runner._bodies, []
    monkeypatch.setattr(runner, "_bodies", lambda: (ran.append(body) or body for body in bodies()))
    with torch.inference_mode():
        runner._run_every_body()
    assert len(ran) == kinds + 6 + 1  # steps without a graph, and samplers
    assert not runner.table.next_token.any()
