"""What a request may ask for, and what happens to the others when one goes wrong."""

from __future__ import annotations

import copy
import gc
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_pairs import LONGEST, VOCABULARY, Answer, expect_greedy, pair, their_logprobs
from served_ranks import random_model

from craton.ml.data import load_tokenizer
from craton.ml.data.tokenizer import train_bpe
from craton.ml.models import Decoder
from craton.ml.serving.device import sampler
from craton.ml.serving.engine.build import build_engine
from craton.ml.serving.engine.engine import Engine
from craton.ml.serving.messages import STEP_BOUNDS, Abort, Grammar, OutputDelta, Sampling, Submit
from craton.ml.serving.schedule import Sequence as SequenceOfEngine
from craton.ml.serving.settings import EngineSettings, ServingError

PROMPT = (5, 17, 2, 80, 33, 9, 41)
GREEDY = Sampling(max_tokens=12, temperature=0.0)


def engine_of(model: Decoder | None = None, stop_tokens: Sequence[int] = (), **settings: Any) -> Engine:
    defaults = {"max_length": LONGEST, "blocks": 200, "max_running": 4, "page": 4, "chunk_tokens": 32}
    return build_engine(model or pair("llama")[1], EngineSettings(**{**defaults, **settings}), stop_tokens=stop_tokens)


def answers(engine: Engine, *requests: Submit) -> dict[tuple[int, int], Answer]:
    pieces: dict[tuple[int, int], list[OutputDelta]] = {}
    for request in requests:
        engine.submit(request)
    for _ in range(2000):
        for piece in engine.step():
            pieces.setdefault((piece.id, piece.index), []).append(piece)
        if engine.is_idle:
            engine.check()
            return {key: Answer.of(each) for key, each in pieces.items()}
    raise AssertionError("requests do not end")


def answer(engine: Engine, prompt: Sequence[int] = PROMPT, sampling: Sampling = GREEDY, **others: Any) -> Answer:
    (found,) = answers(engine, Submit(1, tuple(prompt), sampling, **others)).values()
    return found


def error_of(engine: Engine, prompt: Sequence[int] = PROMPT, sampling: Sampling = GREEDY, **others: Any) -> str:
    found = answer(engine, prompt, sampling, **others)
    assert found.last is not None
    assert found.last.finish == "error"
    return found.last.error


def test_a_stop_token_ends_an_answer_and_is_not_part_of_it() -> None:
    plain = answer(engine_of())
    stop = plain.tokens[4]
    first = plain.tokens.index(stop)
    for found in (
        answer(engine_of(stop_tokens=[stop])),
        answer(engine_of(), sampling=Sampling(max_tokens=12, temperature=0.0, stop_tokens=(stop,))),
    ):
        assert found.tokens == plain.tokens[:first]
        assert found.last is not None
        assert (found.last.finish, found.last.stop_token) == ("stop", stop)
    ignoring = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
    assert answer(engine_of(stop_tokens=[stop]), sampling=ignoring).tokens == plain.tokens
    late = Sampling(max_tokens=12, temperature=0.0, min_tokens=first + 3)
    assert len(answer(engine_of(stop_tokens=[stop]), sampling=late).tokens) >= first + 3


def test_an_answer_ends_where_the_model_does() -> None:
    found = answer(engine_of(max_length=16), sampling=Sampling(max_tokens=100, temperature=0.0))
    assert len(found.tokens) == 16 - len(PROMPT)
    assert found.last is not None
    assert found.last.finish == "length"


def test_log_probabilities_of_prompt_and_alternatives() -> None:
    theirs = pair("llama")[0]
    prompt = [*PROMPT, *range(40, 60)]
    sampling = Sampling(max_tokens=5, temperature=0.0, logprobs=3, prompt_logprobs=2)
    found = answer(engine_of(chunk_tokens=8), prompt, sampling)
    expected = their_logprobs(theirs, prompt + found.tokens)
    assert found.prompt_logprobs is not None
    assert found.prompt_logprobs[0] is None
    for place, given in enumerate(found.prompt_logprobs[1:], 1):
        assert given is not None
        best = expected[place - 1].topk(2)
        assert given.tokens == (prompt[place], *best.indices.tolist())
        torch.testing.assert_close(
            torch.tensor(given.logprobs[0]), expected[place - 1, prompt[place]], atol=1e-4, rtol=0
        )
        torch.testing.assert_close(torch.tensor(given.logprobs[1:]), best.values, atol=1e-4, rtol=0)
    for place, (token, given) in enumerate(zip(found.tokens, found.alternatives, strict=True), len(prompt)):
        assert given.tokens == (token, *expected[place - 1].topk(3).indices.tolist())


@pytest.mark.parametrize("settings", [{}, {"draft_tokens": 3}, {"graphs": "always", "overlap": False}])
def test_log_probabilities_of_the_sampled_distribution(settings: dict[str, Any]) -> None:
    theirs = pair("llama")[0]
    prompt = (5, 6, 7, 8) * 5  # repeats itself, for drafts
    sampling = Sampling(max_tokens=24, temperature=0.6, seed=5, logprobs_mode="sampled")
    stop = answer(engine_of(**settings), prompt, sampling).tokens[-1]
    found = answer(engine_of(**settings), prompt, replace(sampling, stop_tokens=(stop,)))
    assert found.last is not None
    assert found.last.stop_token == stop
    text = [*prompt, *found.tokens, stop]
    expected = (their_logprobs(theirs, text) / 0.6).log_softmax(-1)[len(prompt) - 1 : -1]
    expected = expected.gather(-1, torch.tensor(text[len(prompt) :]).unsqueeze(-1)).squeeze(-1)
    logprobs = torch.tensor([*found.logprobs, found.last.stop_logprob])
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
    model = answer(engine_of(**settings), prompt, replace(sampling, logprobs_mode="model"))
    unscaled = their_logprobs(theirs, [*prompt, *model.tokens])[len(prompt) - 1 : -1]
    unscaled = unscaled.gather(-1, torch.tensor(model.tokens).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(torch.tensor(model.logprobs), unscaled, atol=1e-4, rtol=0)


def test_sampling_after_the_start_uses_only_kernels_that_the_start_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU compiles one kernel for each function and dtype of the logits."""
    used: set[tuple[str, torch.dtype]] = set()

    def record(name: str) -> None:
        function = getattr(sampler, name)

        def recorded(logits: torch.Tensor, *others: Any) -> Any:
            used.add((name, logits.dtype))
            return function(logits, *others)

        monkeypatch.setattr(sampler, name, recorded)

    record("choose")
    record("choose_kept")
    engine = engine_of(copy.deepcopy(pair("llama")[1]).bfloat16(), graphs="always")
    compiled = used.copy()
    used.clear()
    every = Sampling(max_tokens=3, temperature=1.0, ignore_eos=True)
    answer(engine, sampling=every)
    answer(engine, sampling=replace(every, top_k=5, top_p=0.9, logprobs_mode="sampled"))
    assert used == {("choose", torch.bfloat16), ("choose_kept", torch.bfloat16)}  # no copy in fp32
    answer(engine, sampling=replace(every, presence_penalty=0.5))
    answer(engine, sampling=replace(every, min_p=0.1, repetition_penalty=1.2))
    assert used == compiled == {(name, dtype) for name, _ in used for dtype in (torch.bfloat16, torch.float32)}


def test_a_seed_decides_whatever_else_is_computed() -> None:
    sampling = Sampling(max_tokens=20, temperature=1.0, seed=7)
    alone = answer(engine_of(), sampling=sampling)
    others = [Submit(number, (number, 3, 4), Sampling(max_tokens=25, temperature=1.0)) for number in range(2, 6)]
    together = answers(engine_of(chunk_tokens=4), *others, Submit(1, PROMPT, sampling))[1, 0]
    assert together.tokens == alone.tokens
    assert answer(engine_of(), sampling=Sampling(max_tokens=20, temperature=1.0, seed=8)).tokens != alone.tokens


def test_copies_differ_and_share_the_prompt() -> None:
    sampling = Sampling(max_tokens=20, temperature=1.0, seed=7)
    engine = engine_of()
    found = answers(engine, Submit(1, PROMPT * 3, sampling, copies=3))
    assert sorted(found) == [(1, 0), (1, 1), (1, 2)]
    assert len({tuple(each.tokens) for each in found.values()}) == 3
    assert [each.cached_tokens for each in found.values()] == [0, 0, 0], "what the first one computed was not found"


@pytest.mark.parametrize("draft_tokens", [2, 5])
def test_drafts_change_no_random_answer(draft_tokens: int) -> None:
    requests = [
        Submit(number, (number, 8, 9, number, 8, 9), Sampling(max_tokens=40, temperature=0.3, seed=number))
        for number in range(1, 9)
    ]
    plain = answers(engine_of(), *requests)
    engine = engine_of(draft_tokens=draft_tokens)
    drafted = answers(engine, *requests)
    assert {key: each.tokens for key, each in drafted.items()} == {key: each.tokens for key, each in plain.items()}
    stats = engine.stats()
    assert stats.accepted
    assert stats.drafted == draft_tokens * stats.drafts


def test_penalties_and_bias_are_those_of_their_formulas() -> None:
    theirs = pair("llama")[0]
    sampling = Sampling(
        max_tokens=15,
        temperature=0.0,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        logit_bias={11: 2.5, 3: -4.0},
    )
    found = answer(engine_of(), sampling=sampling)
    text = list(PROMPT)
    for token in found.tokens:
        with torch.no_grad():
            logits = theirs(torch.tensor([text])).logits[0, -1].float()
        seen = torch.zeros(VOCABULARY, dtype=torch.bool)
        seen[torch.tensor(text)] = True
        written = torch.bincount(torch.tensor(text[len(PROMPT) :], dtype=torch.int64), minlength=VOCABULARY)
        logits = torch.where(seen, torch.where(logits > 0, logits / 1.3, logits * 1.3), logits)
        logits = logits - 0.4 * written - 0.7 * (written > 0)
        logits[11] += 2.5
        logits[3] -= 4.0
        assert token == int(logits.argmax())
        text.append(token)


def test_a_request_whose_logits_are_not_numbers_fails_alone() -> None:
    model = copy.deepcopy(pair("llama")[1])
    with torch.no_grad():
        model.embedding.weight[90] = torch.nan
    engine = engine_of(model)
    found = answers(engine, Submit(1, PROMPT, GREEDY), Submit(2, (3, 90, 4), GREEDY), Submit(3, (6, 7), GREEDY))
    assert found[2, 0].last is not None
    assert found[2, 0].last.finish == "error"
    assert "not a number" in found[2, 0].last.error
    expect_greedy(pair("llama")[0], list(PROMPT), found[1, 0])
    expect_greedy(pair("llama")[0], [6, 7], found[3, 0])


def test_what_went_wrong_once_is_not_kept_for_others() -> None:
    model = copy.deepcopy(pair("llama")[1])
    engine = engine_of(model)
    prompt = [*PROMPT, *PROMPT, *PROMPT]
    sound = model.norm.weight.detach().clone()
    with torch.no_grad():
        model.blocks[0].attention.qkv.weight.add_(torch.nan)
    assert "not a number" in error_of(engine, prompt)
    with torch.no_grad():
        model.load_state_dict(pair("llama")[1].state_dict())
    assert torch.equal(model.norm.weight, sound)
    found = answer(engine, prompt)
    assert found.cached_tokens == 0
    expect_greedy(pair("llama")[0], prompt, found)
    assert answer(engine, prompt).cached_tokens


def test_bad_requests_are_refused_with_a_reason() -> None:
    engine = engine_of(max_length=32)
    assert "40 tokens; prompt and answer together may have 32" in error_of(engine, [1] * 40)
    assert "no tokens" in error_of(engine, [])
    assert f"token 500 is not in the model's vocabulary of {VOCABULARY}" in error_of(engine, [500])
    assert "max_tokens is 0" in error_of(engine, sampling=Sampling(max_tokens=0))
    assert "adapter 'pirate' is not loaded" in error_of(engine, adapter="pirate")
    assert answer(engine).tokens


def test_an_abort_ends_a_request_and_frees_its_blocks() -> None:
    engine = engine_of()
    engine.submit(Submit(1, PROMPT, Sampling(max_tokens=200, temperature=0.0)))
    engine.submit(Submit(2, PROMPT, GREEDY))
    for _ in range(3):
        engine.step()
    engine.abort(Abort(1))
    pieces = []
    while not engine.is_idle:
        pieces += engine.step()
    assert [piece.finish for piece in pieces if piece.id == 1 and piece.finish] == ["abort"]
    assert not [piece for piece in pieces if piece.id == 1 and piece.tokens]
    engine.check()
    assert engine.stats().blocks_used == 0


def test_those_of_smaller_priority_come_first() -> None:
    engine = engine_of(max_running=1)
    requests = [Submit(number, (number,), GREEDY, priority=-number) for number in range(1, 5)]
    engine.submit(Submit(9, PROMPT, GREEDY, priority=-100))
    engine.step()
    for request in requests:
        engine.submit(request)
    ended = []
    while not engine.is_idle:
        ended += [piece.id for piece in engine.step() if piece.finish]
    assert ended == [9, 4, 3, 2, 1]


def test_those_that_end_while_they_wait_are_neither_counted_nor_kept() -> None:
    engine = engine_of(max_running=1)
    engine.submit(Submit(0, PROMPT, Sampling(max_tokens=200, temperature=0.0), priority=-1))
    engine.step()
    for number in range(1, 1001):
        engine.submit(Submit(number, (number % VOCABULARY, 3), GREEDY, priority=number % 7))
    assert engine.stats().waiting == 1000
    for number in range(1, 1000):
        engine.abort(Abort(number))
    assert engine.stats().waiting == 1
    engine.step()
    engine.check()
    gc.collect()
    kept = [each for each in gc.get_objects() if type(each) is SequenceOfEngine]
    assert len(kept) < 100, "most of them lay deep among those that wait"
    engine.abort(Abort(0))
    ended = []
    while not engine.is_idle:
        ended += [piece.id for piece in engine.step() if piece.finish == "length"]
    assert ended == [1000]
    assert engine.is_still


@pytest.mark.parametrize("overlap", [True, False])
def test_when_blocks_run_out_the_worst_priority_leaves_then_the_newest(overlap: bool) -> None:
    """Also those that write, and that would have been computed in the very step in which another one needs a block."""
    engine = engine_of(max_length=64, blocks=28, max_running=6, overlap=overlap)
    answer(engine, (1, 2), Sampling(max_tokens=1))  # who has seen only short answers lets too many in
    priorities = {1: 5, 2: 0, 3: 5, 4: 0, 5: 1, 6: 1}
    writing = Sampling(max_tokens=40, temperature=0.0)
    prompts = {number: (number, 8, 9, 40 + number) for number in priorities}
    pieces: dict[int, list[OutputDelta]] = {number: [] for number in priorities}
    for number, priority in priorities.items():  # one after the other, so that the worst come first in a step
        engine.submit(Submit(number, prompts[number], writing, priority=priority))
        for piece in engine.step():
            pieces[piece.id].append(piece)
    left: list[int] = []
    while not engine.is_idle:
        before = [sequence.id for sequence in engine.scheduler.running]
        for piece in engine.step():
            pieces[piece.id].append(piece)
        engine.check()
        ended = [number for number in before if pieces[number] and pieces[number][-1].finish]
        after = [sequence.id for sequence in engine.scheduler.running]
        gone = [number for number in before if number not in after and number not in ended]
        for number in gone:
            stayed = [each for each in after if each in before]
            worse = [each for each in stayed if (priorities[each], each) > (priorities[number], number)]
            assert not worse, f"{number} left, and {worse} stayed"
        left += gone
    assert left[:2] == [3, 1]
    assert 2 not in left
    assert engine.stats().preemptions >= 3
    for number, prompt in prompts.items():
        found = Answer.of(pieces[number])
        assert len(found.tokens) == 40
        expect_greedy(pair("llama")[0], list(prompt), found)


def test_nobody_leaves_for_one_that_waits() -> None:
    engine = engine_of(max_running=2)
    writing = Sampling(max_tokens=30, temperature=0.0)
    for number, priority in ((1, 5), (2, 5), (3, 0)):
        engine.submit(Submit(number, (number, 4), writing, priority=priority))
        engine.step()
    ended = []
    while not engine.is_idle:
        ended += [piece.id for piece in engine.step() if piece.finish]
    assert ended == [1, 2, 3]
    assert engine.stats().preemptions == 0


def test_the_first_piece_says_when_its_computation_began() -> None:
    engine = engine_of(max_running=1)
    asked = time.monotonic()
    for number in (1, 2):
        engine.submit(Submit(number, (number, 4), GREEDY, copies=2 if number == 2 else 1))
    pieces: list[tuple[float, OutputDelta]] = []
    while not engine.is_idle:
        pieces += [(time.monotonic(), piece) for piece in engine.step()]
    by_copy = {key: [each for each in pieces if (each[1].id, each[1].index) == key] for key in ((1, 0), (2, 0), (2, 1))}
    assert asked <= by_copy[1, 0][0][1].admitted <= by_copy[1, 0][0][0]
    ended = next(moment for moment, piece in by_copy[1, 0] if piece.finish)
    assert ended <= by_copy[2, 0][0][1].admitted <= by_copy[2, 0][0][0]
    assert by_copy[2, 1][0][1].admitted == by_copy[2, 0][0][1].admitted, "copies share their prompt"
    assert not any(piece.admitted for each in by_copy.values() for _, piece in each[1:])


def test_steps_are_counted_by_their_tokens() -> None:
    engine = engine_of(chunk_tokens=32)
    answer(engine, [7] * 50, Sampling(max_tokens=4, temperature=0.0))
    stats = engine.stats()
    by_bound = dict(zip((*STEP_BOUNDS, None), stats.steps_by_tokens, strict=True))
    assert {bound: count for bound, count in by_bound.items() if count} == {1: 3, 32: 2}
    assert (stats.steps, stats.step_tokens) == (5, 53)


def test_grammars_of_many_are_filled_together_and_one_at_its_limits_ends_alone(tmp_path: Path) -> None:
    train_bpe(["0123456789 abc"] * 4, 300, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    model = random_model(pair("llama")[1].config, vocab=320)
    settings = EngineSettings(max_length=LONGEST, blocks=200, max_running=4, page=4, chunk_tokens=32)
    engine = build_engine(model, settings, stop_tokens=(0,), tokenizer_folder=tmp_path)
    alone = answer(engine)
    held = Sampling(max_tokens=20, temperature=0.0, grammar=Grammar("regex", "[0-9]{6}"))
    for number in (1, 2, 3):
        engine.submit(Submit(number, (number, 5), held))
    engine.submit(Submit(4, PROMPT, GREEDY))
    pieces: dict[int, list[OutputDelta]] = {number: [] for number in range(1, 5)}
    while not engine.is_idle:
        for piece in engine.step():
            pieces[piece.id].append(piece)
        if len(pieces[2]) == 2 and pieces[2][-1].finish is None:
            for sequence in engine._sequences[2]:
                assert sequence.grammar is not None
                sequence.grammar.matcher.consume_token(1000)  # spoils it for good
    for number in (1, 3):
        assert re.fullmatch("[0-9]{6}", tokenizer.decode(Answer.of(pieces[number]).tokens))
    assert pieces[2][-1].finish == "error"
    assert "exceeded a limit" in pieces[2][-1].error
    assert re.fullmatch("[0-9]+", tokenizer.decode(Answer.of(pieces[2]).tokens))
    assert Answer.of(pieces[4]).tokens == alone.tokens
    engine.check()


def test_new_weights_in_place_have_a_version_and_no_old_prefix() -> None:
    model = copy.deepcopy(pair("llama")[1])
    engine = engine_of(model)
    prompt = [*PROMPT, *PROMPT]
    before = answer(engine, prompt)
    assert before.versions == [0] * 12
    assert answer(engine, prompt).cached_tokens
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    engine.change_version()
    after = answer(engine, prompt)
    assert after.cached_tokens == 0
    assert after.versions == [1] * 12
    assert after.logprobs != before.logprobs


def test_a_version_that_changes_in_mid_answer_is_on_every_token() -> None:
    engine = engine_of()
    engine.submit(Submit(1, PROMPT, Sampling(max_tokens=30, temperature=0.0)))
    pieces = []
    for _ in range(10):
        pieces += engine.step()
    pieces += engine.change_version(5, recompute=True)
    while not engine.is_idle:
        pieces += engine.step()
    found = Answer.of(pieces)
    assert len(found.tokens) == 30
    assert set(found.versions) == {0, 5}
    assert sorted(found.versions) == found.versions
    expect_greedy(pair("llama")[0], list(PROMPT), found)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pausing(mode: str) -> None:
    engine = engine_of()
    engine.submit(Submit(1, PROMPT, Sampling(max_tokens=30, temperature=0.0)))
    pieces = []
    for _ in range(5):
        pieces += engine.step()
    pieces += engine.pause(mode)  # type: ignore[arg-type]
    engine.submit(Submit(2, PROMPT, GREEDY))
    assert engine.step() == []
    finish = {"keep": None, "wait": "length", "abort": "abort"}[mode]
    assert pieces[-1].finish == finish
    with pytest.raises(ServingError, match="paused"):
        engine.pause()
    engine.resume()
    while not engine.is_idle:
        pieces += engine.step()
    by_id = {number: Answer.of([piece for piece in pieces if piece.id == number]) for number in (1, 2)}
    assert len(by_id[1].tokens) == 30 or mode == "abort"
    expect_greedy(pair("llama")[0], list(PROMPT), by_id[2])
    engine.check()


def test_too_little_room_says_what_to_lower() -> None:
    with pytest.raises(ServingError, match=r"room for 72 tokens.*max_length is 256.*lower max_length"):
        engine_of(blocks=20)


def test_what_is_the_engines_fault_is_told_apart() -> None:
    engine = engine_of()
    engine.submit(Submit(1, PROMPT, GREEDY, copies=2))
    engine.step()
    told = engine.refuse("the weights are mixed")
    assert {(piece.index, piece.finish, piece.is_ours) for piece in told if piece.finish} == {
        (0, "error", True),
        (1, "error", True),
    }
    refused = answers(engine, Submit(2, PROMPT, GREEDY, copies=2), Submit(3, (), GREEDY))
    assert all(refused[2, index].last.is_ours for index in (0, 1))  # type: ignore[union-attr]
    assert not refused[3, 0].last.is_ours  # type: ignore[union-attr]
    engine.change_version()
    assert answer(engine).tokens
    engine.check()


def test_a_copy_that_nobody_waits_for_is_not_made() -> None:
    engine = engine_of(max_running=1)
    engine.submit(Submit(9, PROMPT, GREEDY))
    engine.step()
    engine.submit(Submit(1, (4, 5, 6), Sampling(max_tokens=5, temperature=1.0, seed=3), copies=3))
    engine.abort(Abort(1, 0))
    engine.abort(Abort(1, 2))
    pieces: dict[int, list[OutputDelta]] = {}
    while not engine.is_idle:
        for piece in engine.step():
            pieces.setdefault(piece.index, []).append(piece) if piece.id == 1 else None
    found = {index: Answer.of(each) for index, each in pieces.items()}
    assert {index: each.last.finish for index, each in found.items()} == {  # type: ignore[union-attr]
        0: "abort",
        1: "length",
        2: "abort",
    }
    alone = answers(engine_of(), Submit(1, (4, 5, 6), Sampling(max_tokens=5, temperature=1.0, seed=3), copies=3))
    assert found[1].tokens == alone[1, 1].tokens
    engine.check()
