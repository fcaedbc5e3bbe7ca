"""Continued, forked and aborted requests give the tokens of requests that were never interrupted.

A small model in fp32. The twins run alone, in one engine with room for everything; the others share small engines that
chunk their prefill, preempt, use host memory and draft tokens, with grammars and an adapter among them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from model_pairs import Answer, pair
from safetensors.torch import save_file
from served_ranks import random_model

from craton.ml.data.tokenizer import train_bpe
from craton.ml.export_adapters import CONFIG, WEIGHTS
from craton.ml.serving.device import Adapters
from craton.ml.serving.engine import build_runner, join_engine
from craton.ml.serving.engine.build import bytes_of_block
from craton.ml.serving.engine.engine import Engine
from craton.ml.serving.grammar import Grammars
from craton.ml.serving.messages import Abort, Fork, ForkBranch, Grammar, OutputDelta, Sampling, Submit
from craton.ml.serving.settings import EngineSettings

VOCABULARY, MAX_LENGTH, MAX_STEPS = 320, 64, 5000
ADAPTER = "painter"
PLAIN = Sampling(max_tokens=16, temperature=1.0, seed=5)
SAMPLINGS = {
    "plain": PLAIN,
    "greedy": replace(PLAIN, temperature=0.0, max_tokens=32),
    "penalties": replace(PLAIN, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3, top_p=0.95),
    "log-probs": replace(PLAIN, logprobs=2, temperature=0.7),
    "stop tokens": replace(PLAIN, stop_tokens=tuple(range(80)), min_tokens=7),
    "grammar": replace(PLAIN, grammar=Grammar("regex", "[a-c]{3,9}(x|yy)?")),
}
PROMPTS = [tuple((7 * place + start) % 300 + 1 for place in range(30)) for start in (0, 11)]


@dataclass(frozen=True)
class Case:
    """A request, and what happens to it once it has `cut` tokens."""

    sampling: str
    prompt: int
    length: int
    has_adapter: bool
    cut: int
    action: str  # continue, fork, sibling (a fork with another seed), abort

    def submit(self, number: int, generated: tuple[int, ...] = (), sampling: Sampling | None = None) -> Submit:
        adapter = ADAPTER if self.has_adapter else None
        chosen = sampling or SAMPLINGS[self.sampling]
        return Submit(number, PROMPTS[self.prompt][: self.length], chosen, adapter=adapter, generated=generated)


CASES = st.lists(
    st.builds(
        Case,
        st.sampled_from(sorted(SAMPLINGS)),
        st.integers(0, len(PROMPTS) - 1),
        st.integers(1, 30),
        st.booleans(),
        st.integers(1, 14),
        st.sampled_from(["continue", "continue", "fork", "sibling", "abort"]),
    ),
    min_size=3,
    max_size=5,
)
DRAFT_MODEL = "draft model"
WAYS = {
    "roomy": EngineSettings(page=4, blocks=200, chunk_tokens=64),
    "chunked": EngineSettings(page=4, blocks=200, chunk_tokens=5, overlap=False),
    "tight": EngineSettings(page=4, blocks=27, chunk_tokens=16, shared_prefix="off"),  # every request needs its own
    "offloaded": EngineSettings(page=2, blocks=40, chunk_tokens=16),
    "drafting": EngineSettings(page=4, blocks=200, chunk_tokens=32, draft_tokens=3),
    DRAFT_MODEL: EngineSettings(page=4, blocks=40, chunk_tokens=16, draft_tokens=2),
}


class Engines:
    """Engines on one model, each new, over the memory of the last one of its way."""

    def __init__(self, folder: Path) -> None:
        train_bpe(["abc xyz 0123456789"] * 4, 300, folder)
        self._folder = folder
        self._grammars = Grammars(folder, VOCABULARY, stop_tokens=(0,))
        self._made: dict[str, Callable[[], Engine]] = {}
        _save_adapter(folder / ADAPTER)
        self.used: Counter[str] = Counter()
        self.reference = self._prepare(WAYS["roomy"], has_host=False)()

    def engine(self, way: str) -> Engine:
        if way not in self._made:
            self._made[way] = self._prepare(WAYS[way], way == "offloaded")
        return self._made[way]()

    def note(self, engine: Engine) -> None:
        stats = engine.stats()
        for name in ("preemptions", "prefix_hits", "host_hits", "accepted"):
            self.used[name] += getattr(stats, name)

    def close(self) -> None:
        self._grammars.close()

    def _prepare(self, settings: EngineSettings, has_host: bool) -> Callable[[], Engine]:
        model = random_model(pair("llama")[1].config, vocab=VOCABULARY)
        if has_host:
            settings = replace(settings, host_bytes=100 * bytes_of_block(model, settings))
        adapters = Adapters(model, slots=1, rank=4)
        slots = {ADAPTER: adapters.load(ADAPTER, self._folder / ADAPTER)}
        draft = random_model(pair("llama")[1].config, vocab=VOCABULARY) if settings == WAYS[DRAFT_MODEL] else None
        settings = replace(settings, max_length=MAX_LENGTH, max_running=5)
        runner, settings, length = build_runner(model, settings, adapters=adapters, draft=draft)
        return lambda: join_engine(runner, runner, settings, length, (0,), self._grammars, slots)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("tokenizer"))
    yield made
    made.close()


def _save_adapter(folder: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for layer in range(2):
        for name, rows, columns in (("q_proj", 64, 32), ("o_proj", 32, 64)):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn((4, columns), generator=generator) / 4
            tensors[f"{module}.lora_B.weight"] = torch.randn((rows, 4), generator=generator) / 4
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 6.0, "bias": "none", "target_modules": ["q_proj", "o_proj"]}
    (folder / CONFIG).write_text(json.dumps(fields))


def alone(engine: Engine, request: Submit) -> Answer:
    engine.submit(request)
    pieces: list[OutputDelta] = []
    for _ in range(MAX_STEPS):
        pieces += wait_and_step(engine)
        if engine.is_idle:
            return Answer.of([piece for piece in pieces if piece.id == request.id])
    raise AssertionError("the request does not end")


def wait_and_step(engine: Engine) -> list[OutputDelta]:
    """One step, once the grammars of all requests are compiled."""
    for compiled, _ in engine._compiling:
        compiled.exception()
    return engine.step()


class Run:
    """Cases in one engine: `answers` has all that each request got, behind the tokens that it began with."""

    def __init__(self, engine: Engine, cases: list[Case]) -> None:
        self.engine = engine
        self.cases = cases
        self.begun: dict[int, tuple[int, ...]] = {}
        self.pieces: dict[int, list[OutputDelta]] = {}
        self.samplings: dict[int, Sampling] = {}
        self._waiting = dict(enumerate(cases))  # those to which nothing has happened yet

    def answers(self) -> dict[int, Answer]:
        if self.engine.settings.blocks < 100:  # after a short answer it admits too many
            alone(self.engine, Submit(999, (1, 2), Sampling(max_tokens=1, temperature=0.0)))
        for number, case in enumerate(self.cases):
            self._submit(number, case.submit(number))
        for _ in range(MAX_STEPS):
            for piece in wait_and_step(self.engine):
                self.pieces[piece.id].append(piece)
            self.engine.check()
            for number, case in list(self._waiting.items()):
                if self.is_ended(number) or len(self.tokens(number)) >= case.cut:
                    del self._waiting[number]
                    if not self.is_ended(number):
                        self._interrupt(number, case)
            if self.engine.is_idle:
                assert self.engine.stats().blocks_used == 0
                return {number: Answer.of(pieces) for number, pieces in self.pieces.items()}
        raise AssertionError("requests do not end")

    def tokens(self, number: int) -> tuple[int, ...]:
        return (*self.begun[number], *(token for piece in self.pieces[number] for token in piece.tokens))

    def is_ended(self, number: int) -> bool:
        return bool(self.pieces[number]) and self.pieces[number][-1].finish is not None

    def _submit(self, number: int, request: Submit) -> None:
        self._begin(number, request.generated, request.sampling)
        self.engine.submit(request)

    def _begin(self, number: int, generated: tuple[int, ...], sampling: Sampling) -> None:
        self.begun[number], self.pieces[number], self.samplings[number] = generated, [], sampling

    def _interrupt(self, number: int, case: Case) -> None:
        if case.action in ("continue", "abort"):
            self.engine.abort(Abort(number))
            if case.action == "continue":
                self._submit(100 + number, case.submit(100 + number, self.tokens(number)[: case.cut]))
            return
        sampling = self.samplings[number]
        if case.action == "sibling":
            sampling = replace(sampling, seed=77)
        self._begin(100 + number, self.tokens(number), sampling)
        self.engine.start_branches(Fork(number, (ForkBranch(100 + number, sampling),)))


def expect_twins(engines: Engines, way: str, cases: list[Case]) -> None:
    engine = engines.engine(way)
    run = Run(engine, cases)
    answers = run.answers()
    engines.note(engine)
    for number, case in enumerate(cases):
        twin = alone(engines.reference, case.submit(1))
        found = run.tokens(number)
        is_aborted = case.action in ("continue", "abort") and answers[number].last.finish == "abort"  # type: ignore[union-attr]
        assert list(found) == (twin.tokens[: len(found)] if is_aborted else twin.tokens)
        if 100 + number not in answers:
            continue
        expected = twin
        begun = run.begun[100 + number]
        if case.action in ("fork", "sibling"):
            assert run.pieces[100 + number][0].generated == list(begun), "a branch says where it began"
        if case.action == "sibling":
            rest = alone(engines.reference, case.submit(1, begun, run.samplings[100 + number]))
            expected = replace(rest, tokens=[*begun, *rest.tokens], logprobs=[0.0] * len(begun) + rest.logprobs)
        assert list(run.tokens(100 + number)) == expected.tokens
        last, twins_last = answers[100 + number].last, expected.last
        assert last is not None
        assert twins_last is not None
        assert (last.finish, last.stop_token) == (twins_last.finish, twins_last.stop_token)
        torch.testing.assert_close(
            torch.tensor(answers[100 + number].logprobs),
            torch.tensor(expected.logprobs[len(begun) :]),
            atol=2e-4,
            rtol=0,
        )
        engines.used[f"{case.action} of {case.sampling}"] += 1


def expect_all_ways(engines: Engines, num_examples: int) -> None:
    @settings(max_examples=num_examples, phases=[Phase.generate])
    @given(CASES)
    def check(way: str, cases: list[Case]) -> None:
        expect_twins(engines, way, cases)

    for way in WAYS:
        check(way)


def test_continued_forked_and_aborted_requests_equal_their_twins(engines: Engines) -> None:
    expect_all_ways(engines, 2)


@pytest.mark.slow
def test_many_continued_forked_and_aborted_requests_equal_their_twins(engines: Engines) -> None:
    expect_all_ways(engines, 60)


@pytest.mark.parametrize(
    ("way", "used"),
    [("tight", "preemptions"), ("offloaded", "host_hits"), ("chunked", "prefix_hits"), ("drafting", "accepted")],
)
def test_every_kind_of_sampling_is_continued_and_forked(engines: Engines, way: str, used: str) -> None:
    before = engines.used[used]
    for actions in (("continue", "fork"), ("sibling", "continue")):
        cases = [
            Case(name, 0, 24 + place, place == 1, 6, actions[place % 2]) for place, name in enumerate(sorted(SAMPLINGS))
        ]
        expect_twins(engines, way, cases)
    assert engines.used[used] > before


@pytest.mark.parametrize("name", sorted(SAMPLINGS))
def test_an_answer_can_be_continued_from_any_of_its_tokens(engines: Engines, name: str) -> None:
    case = Case(name, 0, 9, has_adapter=False, cut=1, action="continue")
    whole = alone(engines.reference, case.submit(1))
    assert whole.last is not None
    length = len(whole.tokens)
    for cut in (1, length // 2, length - 1, length):
        rest = alone(engines.reference, case.submit(2, tuple(whole.tokens[:cut])))
        assert rest.tokens == whole.tokens[cut:], cut
        assert rest.last is not None
        # An answer without its stop token is not complete: it is computed once more.
        assert (rest.last.finish, rest.last.stop_token) == (whole.last.finish, whole.last.stop_token)
    if name == "log-probs":
        rest = alone(engines.reference, case.submit(3, tuple(whole.tokens[:4])))
        assert [each.tokens for each in rest.alternatives] == [each.tokens for each in whole.alternatives[4:]]


def test_a_prompt_in_chunks_with_a_grammar_samples_only_after_the_last(engines: Engines) -> None:
    request = Case("grammar", 0, 30, False, 1, "").submit(1)
    assert alone(engines.engine("chunked"), request).tokens == alone(engines.reference, request).tokens


def test_copies_continue_from_the_same_tokens_with_their_own_seeds(engines: Engines) -> None:
    engine = engines.engine("roomy")
    request = replace(Case("plain", 0, 9, False, 1, "").submit(1, (50, 60, 70)), copies=3)
    engine.submit(request)
    pieces: dict[int, list[OutputDelta]] = {0: [], 1: [], 2: []}
    while not engine.is_idle:
        for piece in engine.step():
            pieces[piece.index].append(piece)
    for copy, copys in pieces.items():
        twin = replace(request, copies=1, sampling=replace(PLAIN, seed=5 + copy))
        assert Answer.of(copys).tokens == alone(engines.reference, twin).tokens


@pytest.mark.parametrize(
    ("name", "generated", "length", "message"),
    [
        ("plain", (5, VOCABULARY), 9, f"token {VOCABULARY} is not in the model's vocabulary"),
        ("plain", (5, 0, 6), 9, "token 0 among the generated tokens ends an answer"),
        ("stop tokens", (90, 79), 9, "token 79 among the generated tokens ends an answer"),
        ("plain", (5,) * 17, 9, "17 generated tokens to continue from exceed max_tokens 16"),
        ("plain", (5,) * 16, 63, "exceed the 64 that prompt and answer together may have"),
        ("grammar", (1, 2), 9, "the grammar does not allow token 1, number 1 of the 2 generated tokens"),
    ],
)
def test_tokens_that_no_answer_has_are_refused(
    engines: Engines, name: str, generated: tuple[int, ...], length: int, message: str
) -> None:
    request = replace(Case(name, 0, 9, False, 1, "").submit(1, generated), prompt=(3,) * length)
    refused = alone(engines.reference, request)
    assert refused.last is not None
    assert refused.last.finish == "error"
    assert message in refused.last.error
    assert not refused.last.is_ours


def test_a_continued_request_that_is_aborted_before_its_first_new_token_counts_as_aborted(engines: Engines) -> None:
    engine = engines.engine("roomy")
    engine.submit(Case("plain", 0, 9, False, 1, "").submit(1, (50, 60)))
    engine.abort(Abort(1))
    engine.step()
    assert engine.stats().aborted == 1
