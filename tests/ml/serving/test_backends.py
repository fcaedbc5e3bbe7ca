"""Attention by plain torch, which the kernels are compared with."""

from __future__ import annotations

import pytest
from model_pairs import LONGEST, Answer, expect_greedy, pair

from craton.ml.serving.engine.build import build_engine
from craton.ml.serving.messages import OutputDelta, Sampling, Submit
from craton.ml.serving.settings import EngineSettings, ServingError


def test_plain_attention_gives_the_model_s_answers() -> None:
    options = EngineSettings(
        max_length=LONGEST,
        blocks=200,
        max_running=4,
        page=4,
        chunk_tokens=16,
        backend="torch",
    )
    engine = build_engine(pair("qwen3")[1], options)
    prompts = {number: [number + place for place in range(3 + 7 * number)] for number in range(5)}
    for number, prompt in prompts.items():
        engine.submit(Submit(number, tuple(prompt), Sampling(max_tokens=12, temperature=0.0)))
    pieces: dict[int, list[OutputDelta]] = {}
    while not engine.is_idle:
        for piece in engine.step():
            pieces.setdefault(piece.id, []).append(piece)
    for number, prompt in prompts.items():
        expect_greedy(pair("qwen3")[0], prompt, Answer.of(pieces[number]))


def test_an_unknown_backend_is_refused_before_the_model_is_built() -> None:
    with pytest.raises(ServingError, match=r"backend is 'flash3'; allowed: auto, torch, triton"):
        EngineSettings(backend="flash3")  # type: ignore[arg-type]
