"""One contract for all inference clients: an engine in this process, our server, any endpoint with OpenAI's API.

The endpoints serve one small model in fp32. Our server is a real run, with front end and engine process; the foreign
one is `transformers serve`. A test asks for what its endpoint has, or sees that it refuses in time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import requests
from live_server import make_model, serving
from test_engine_client import is_finished
from waiting import PATIENCE_SECONDS, wait_until

from craton.agent.processes import free_port
from craton.job.sections.strategy import parse_strategy
from craton.ml.models import Decoder, config_from_huggingface, load_weights
from craton.ml.serving.clients import (
    Answer,
    AnswerTimeoutError,
    ClientClosedError,
    EngineClient,
    InferenceClient,
    InferenceError,
    InferenceRequest,
    MissingCapabilityError,
    OpenAIClient,
    RequestRefusedError,
    ServerClient,
    Timeouts,
    complete,
    complete_all,
    complete_blocking,
    connect,
)
from craton.ml.serving.engine.build import build_engine
from craton.ml.serving.messages import Grammar, Sampling
from craton.ml.serving.settings import EngineSettings
from craton.ml.serving.strategies import CallableScorer, Limits, run_strategy
from craton.ml.serving.text import Vocabulary, load_template

KINDS = ["engine", "server", "openai", pytest.param("foreign", marks=pytest.mark.slow)]
TEXT = "The quick brown fox says"
END = {0: -100.0, 2: -100.0}  # the tokens that end an answer, which is to have its length
LONG = Sampling(max_tokens=120, temperature=1.0, logit_bias=END)
SHORT = replace(LONG, max_tokens=12)

pytestmark = pytest.mark.xdist_group("client contract")


@dataclass
class Endpoint:
    """How to open clients of it, and the share of its KV cache that is used (None: it does not say)."""

    kind: str
    open: Callable[..., InferenceClient]
    used: Callable[[], float | None]

    def expect_freed(self) -> None:
        wait_until(lambda: self.used() in (None, 0.0), "the KV cache blocks are freed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folders") / "little"
    folder.mkdir()
    make_model(folder, 1)
    return folder


@pytest.fixture(scope="module")
def engine_endpoint(folder: Path) -> Iterator[Endpoint]:
    model = Decoder(config_from_huggingface(folder)).eval().requires_grad_(False)
    load_weights(model, folder)
    engine = build_engine(model, EngineSettings(max_length=256, blocks=400, page=4), tuple(END), folder)

    def used() -> float:
        engine.check()
        return float(engine.stats().blocks_used)

    yield Endpoint("engine", lambda **options: EngineClient(engine, folder, **options), used)
    assert engine._grammars is not None
    engine._grammars.close()


@pytest.fixture(scope="module")
def server_url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(folder, tmp_path_factory.mktemp("runs"), "contract") as server:
        yield server.url


@contextmanager
def foreign_server(folder: Path) -> Iterator[str]:
    """`transformers serve`, offline."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(folder)]
    log = folder.parent / "foreign.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"],
            stdout=output,
            stderr=output,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
        )
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until(lambda: answers(url) or process.poll() is not None, "the foreign server is ready")
            if process.poll() is not None:
                pytest.skip(f"transformers serve does not start: {log.read_text(errors='replace').strip()[-300:]}")
            yield url
        finally:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=PATIENCE_SECONDS).status_code == 200
    except requests.ConnectionError:
        return False


@pytest.fixture(scope="module", params=KINDS)
def endpoint(request: pytest.FixtureRequest, folder: Path) -> Iterator[Endpoint]:
    kind = request.param
    if kind == "engine":
        yield request.getfixturevalue("engine_endpoint")
    elif kind == "foreign":
        with foreign_server(folder) as url:
            yield Endpoint(kind, lambda **options: OpenAIClient(url, str(folder), **options), lambda: None)
    else:
        url = request.getfixturevalue("server_url")
        made = ServerClient if kind == "server" else OpenAIClient

        def used() -> float:
            text = requests.get(f"{url}/metrics", timeout=PATIENCE_SECONDS).text
            lines = [
                line for line in text.splitlines() if line.startswith(("vllm:kv_cache_usage_perc", "vllm:num_req"))
            ]
            return sum(float(line.rpartition(" ")[2]) for line in lines)

        yield Endpoint(kind, lambda **options: made(url, **options), used)


def run(endpoint: Endpoint, work: Callable[[InferenceClient], Awaitable[None]], **options: Any) -> None:
    """Do the work with a new client, and see that it leaves nothing behind."""

    async def inside() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS), endpoint.open(random_seed=7, **options) as client:
            await work(client)
            await idle(client)
            assert client._slots.taken == 0

    asyncio.run(inside())
    endpoint.expect_freed()


async def idle(client: InferenceClient) -> None:
    """The event loop closes generators that were left."""
    while client.num_in_flight:
        await asyncio.sleep(0)


async def one(client: InferenceClient, sampling: Sampling = SHORT, **fields: Any) -> Answer:
    (answer,) = await complete(client, InferenceRequest(TEXT, sampling, **fields))
    return answer


def test_an_answer_is_the_sum_of_its_deltas(endpoint: Endpoint) -> None:
    async def work(client: InferenceClient) -> None:
        (answer,) = await client.submit(InferenceRequest(TEXT, SHORT))
        assert client.num_in_flight == 1
        deltas = [delta async for delta in client.stream(answer)]
        assert "".join(delta.text for delta in deltas) == answer.text != ""
        assert [token for delta in deltas for token in delta.tokens] == answer.tokens
        assert [delta.finish for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
        assert answer.request.sampling.seed is not None, "the client has drawn it"
        capabilities = await client.capabilities()
        if capabilities.token_ids and endpoint.kind != "openai":
            assert len(answer.tokens) == 12

    run(endpoint, work)


def test_a_chat_is_answered(endpoint: Endpoint) -> None:
    async def work(client: InferenceClient) -> None:
        messages = [{"role": "user", "content": "What is 2 + 2?"}]
        (answer,) = await complete(client, InferenceRequest(messages, SHORT))
        assert answer.finish == "length"
        assert answer.text

    run(endpoint, work)


def test_the_message_of_a_chat_is_continued(endpoint: Endpoint, folder: Path) -> None:
    greedy = replace(SHORT, temperature=0.0)
    ask, begun = {"role": "user", "content": "What is 2 + 2?"}, "The quick\n\n"
    rendered = load_template(folder).render([ask]) + begun  # type: ignore[union-attr]
    tokens = Vocabulary(folder).encode(rendered, with_special_tokens=False)

    async def work(client: InferenceClient) -> None:
        chat = [ask, {"role": "assistant", "content": begun}]
        continued = InferenceRequest(chat, greedy, continues_message=True)
        if not (await client.capabilities()).continued_chats:
            with pytest.raises(MissingCapabilityError, match="does not give continued chats; send the chat as a text"):
                await client.submit(continued)
            return
        (answer,) = await complete(client, continued)
        (expected,) = await complete(client, InferenceRequest(tokens, greedy))
        (another,) = await complete(client, InferenceRequest(chat, greedy))
        assert answer.text == expected.text != another.text
        await client.require("continued_whitespace")

    run(endpoint, work)
    if endpoint.kind != "foreign":
        run(endpoint, lambda client: client.require("continued_chats"))


def test_a_tree_searches_a_chat(endpoint: Endpoint) -> None:
    strategy = parse_strategy(
        {"kind": "tree", "n": 8, "width": 2, "depth": 4, "step": {"tokens": 3}, "score": "length"}
    )
    request = InferenceRequest([{"role": "user", "content": "What is 2 + 2?"}], replace(SHORT, seed=3))

    async def work(client: InferenceClient) -> None:
        capabilities = await client.capabilities()
        if not (capabilities.continued_chats and capabilities.seeds):
            return
        scorer = CallableScorer(lambda prompt, texts: [float(len(text)) for text in texts])
        first, again = [await run_strategy(client, request, strategy, scorer, Limits()) for _ in range(2)]
        assert (first.text, first.report) == (again.text, again.report)
        assert first.report["depth"] > 1
        assert len(first.text) == max(first.report["scores"])

    run(endpoint, work)


def test_copies_have_seeds_one_after_the_other(endpoint: Endpoint) -> None:
    async def work(client: InferenceClient) -> None:
        request = InferenceRequest(TEXT, replace(SHORT, seed=40), copies=3)
        if not (await client.capabilities()).seeds:
            with pytest.raises(MissingCapabilityError, match=r"does not give seeds; set sampling\.seed to None"):
                await client.submit(request)
            answers = await complete(client, replace(request, sampling=SHORT))
            assert len(answers) == 3
            return
        answers = await complete(client, request)
        assert [answer.request.sampling.seed for answer in answers] == [40, 41, 42]
        alone = [await one(client, replace(SHORT, seed=seed)) for seed in (40, 41, 42)]
        assert [answer.text for answer in answers] == [answer.text for answer in alone]
        assert len({answer.text for answer in answers}) == 3

    run(endpoint, work)


def test_log_probs_are_given_or_refused(endpoint: Endpoint) -> None:
    async def work(client: InferenceClient) -> None:
        sampling = replace(SHORT, logprobs=0, temperature=0.0)
        if not (await client.capabilities()).logprobs:
            with pytest.raises(MissingCapabilityError, match=r"127\.0\.0\.1.* does not give logprobs; set sampling"):
                await one(client, sampling)
            return
        answer = await one(client, sampling)
        assert len(answer.logprobs) == 12
        assert all(value <= 0 for value in answer.logprobs)

    run(endpoint, work)


def test_log_probs_of_the_sampled_distribution_are_given_or_refused(endpoint: Endpoint) -> None:
    async def work(client: InferenceClient) -> None:
        sampling = replace(SHORT, logprobs=0, temperature=0.01, logprobs_mode="sampled")
        if not (await client.capabilities()).sampled_logprobs:
            with pytest.raises(MissingCapabilityError, match=r"does not give (logprobs, )?sampled logprobs; s"):
                await one(client, sampling)
            return
        sampled = await one(client, sampling)
        model = await one(client, replace(sampling, logprobs_mode="model"))
        assert sampled.text == model.text
        assert len(sampled.logprobs) == len(model.logprobs) == 12
        assert min(sampled.logprobs) > -0.7, "the likeliest token is nearly certain"
        assert max(model.logprobs) < -1

    run(endpoint, work)


def test_a_stop_token_has_its_log_prob(endpoint: Endpoint) -> None:
    async def work(client: InferenceClient) -> None:
        if endpoint.kind == "foreign":
            return
        await client.require("token_ids", "logprobs")
        sampling = replace(SHORT, max_tokens=4, logprobs=0, seed=3, logprobs_mode="sampled", logit_bias={0: 100.0})
        plain = replace(sampling, temperature=0.7)
        answer = await one(client, plain)
        assert (answer.tokens, answer.finish, answer.stop_token) == ([], "stop", 0)
        assert answer.sampled_tokens == [0]
        assert answer.sampled_versions == [0]
        assert answer.sampled_logprobs == pytest.approx([0.0], abs=1e-6)
        model = await one(client, replace(plain, logprobs_mode="model"))
        assert model.sampled_logprobs[0] < -1

    run(endpoint, work)


def test_token_ids_and_versions_are_given_or_refused(endpoint: Endpoint) -> None:
    async def work(client: InferenceClient) -> None:
        capabilities = await client.capabilities()
        if not capabilities.token_ids:
            with pytest.raises(MissingCapabilityError, match="does not give token ids; use a Craton server"):
                await client.require("token_ids")
        if capabilities.token_prompts:
            (answer,) = await complete(client, InferenceRequest([5, 17, 2, 80], replace(SHORT, temperature=0.0)))
            assert len(answer.tokens) == 12
        if capabilities.weights_versions:
            assert await client.weights_version() == 0
            assert set((await one(client)).versions) == {0}
        else:
            with pytest.raises(MissingCapabilityError, match="weights versions"):
                await client.weights_version()
        with pytest.raises(ValueError, match=r"no capability 'token_id'.*did you mean 'token_ids'"):
            await client.require("token_id")

    run(endpoint, work)


def test_branches_continue_a_running_answer(endpoint: Endpoint) -> None:
    async def work(client: InferenceClient) -> None:
        capabilities = await client.capabilities()
        seed = {"seed": 5} if capabilities.seeds else {}
        (parent,) = await client.submit(InferenceRequest(TEXT, replace(LONG, **seed)))
        branches: list[Answer] = []
        async for _ in client.stream(parent):
            if parent.text and not branches:
                branches = await client.fork(parent, [parent.request.sampling, replace(LONG, max_tokens=80)])
                client.abort((await client.fork(parent, [LONG]))[0])
        same, other = branches
        for branch in branches:
            async for _ in client.stream(branch):
                pass
        assert (parent.finish, same.finish, other.finish) == ("length", "length", "length")
        if capabilities.shared_forks:
            begun = len(same.generated)
            assert 0 < begun < 120
            assert same.tokens == parent.tokens[begun:]
            twin = await complete(client, replace(other.request, generated=other.generated))
            assert twin[0].tokens == other.tokens
            assert len(other.generated) + len(other.tokens) == 80
        else:
            assert str(same.request.prompt).startswith(TEXT)
            assert len(str(same.request.prompt)) > len(TEXT), "a fork is a longer prompt"
            with pytest.raises(MissingCapabilityError, match="does not give shared forks; accept that a fork is a new"):
                await client.require("shared_forks")
        with pytest.raises(RequestRefusedError, match="only running answers can be forked"):
            await client.fork(parent, [LONG])

    run(endpoint, work)


def test_an_answer_is_continued_or_that_is_refused(endpoint: Endpoint) -> None:
    async def work(client: InferenceClient) -> None:
        if not (await client.capabilities()).continued_requests:
            with pytest.raises(
                MissingCapabilityError, match="does not give continued requests; send the answer so far"
            ):
                await one(client, generated=(5, 6))
            return
        whole = await one(client, replace(SHORT, seed=9))
        first = await one(client, replace(SHORT, seed=9, max_tokens=5))
        (rest,) = await complete(client, first.continuation(max_tokens=12))
        assert [*first.tokens, *rest.tokens] == whole.tokens
        assert rest.generated == tuple(first.tokens)

    run(endpoint, work)


def test_a_stream_that_is_left_early_aborts(endpoint: Endpoint) -> None:
    async def work(client: InferenceClient) -> None:
        (answer,) = await client.submit(InferenceRequest(TEXT, LONG))
        async for _ in client.stream(answer):
            break
        await idle(client)
        assert answer.finish == "abort"
        answers = await client.submit(InferenceRequest(TEXT, LONG, copies=3))
        client.abort(answers[1])
        async for _ in client.stream(answers[0]):
            client.abort(answers[2])
            break

    run(endpoint, work)


def test_a_cancelled_task_aborts(endpoint: Endpoint) -> None:
    async def work(client: InferenceClient) -> None:
        task = asyncio.create_task(complete(client, InferenceRequest(TEXT, LONG, copies=2)))
        while client.num_in_flight < 2:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(endpoint, work)


def test_a_closed_client_aborts(endpoint: Endpoint) -> None:
    async def work(client: InferenceClient) -> None:
        (answer,) = await client.submit(InferenceRequest(TEXT, LONG))
        stream = client.stream(answer)
        await anext(stream)
        await client.close()
        with pytest.raises(ClientClosedError):
            [delta async for delta in stream]
        with pytest.raises(ClientClosedError):
            await client.submit(InferenceRequest(TEXT, LONG))

    run(endpoint, work)


def test_few_answers_are_in_flight(endpoint: Endpoint) -> None:
    async def work(client: InferenceClient) -> None:
        most = 0

        def requests() -> Iterator[InferenceRequest]:
            nonlocal most
            for number in range(6):
                most = max(most, client.num_in_flight)
                yield InferenceRequest(TEXT, replace(SHORT, max_tokens=number + 1, temperature=0.0))

        found = await complete_all(client, requests())
        texts = [answers[0].text for answers in found]
        assert most <= 2
        assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
        with pytest.raises(RequestRefusedError, match="3 copies does not fit max_in_flight 2"):
            await client.submit(InferenceRequest(TEXT, SHORT, copies=3))

    run(endpoint, work, max_in_flight=2)


def test_a_late_answer_is_aborted(endpoint: Endpoint) -> None:
    async def work(client: InferenceClient) -> None:
        await client.capabilities()
        client.timeouts = Timeouts(first_token=1e-6)
        (answer,) = await client.submit(InferenceRequest(TEXT, LONG))
        with pytest.raises(AnswerTimeoutError, match=r"no token after .* \(timeouts\.first_token\)"):
            async for _ in client.stream(answer):
                pass

    run(endpoint, work)


def test_a_bad_request_is_refused_alone(endpoint: Endpoint) -> None:
    async def work(client: InferenceClient) -> None:
        good = asyncio.create_task(one(client))
        bad = InferenceRequest((), SHORT)
        with pytest.raises(InferenceError, match="prompt"):
            await complete(client, bad)
        with pytest.raises(RequestRefusedError, match="copies is 0; it must be 1 or more"):
            await client.submit(InferenceRequest(TEXT, copies=0))
        assert (await good).finish == "length"

    run(endpoint, work)


def test_structured_output_is_given_or_refused(endpoint: Endpoint) -> None:
    async def work(client: InferenceClient) -> None:
        sampling = replace(LONG, logit_bias={}, grammar=Grammar("regex", "[abc]{3}"), seed=None)
        if not (await client.capabilities()).grammars:
            with pytest.raises(MissingCapabilityError, match="does not give grammars"):
                await one(client, sampling)
            return
        answer = await one(client, sampling)
        assert set(answer.text) <= set("abc")
        assert (len(answer.text), answer.finish) == (3, "stop")

    run(endpoint, work)


def test_a_stop_string_ends_an_answer(endpoint: Endpoint) -> None:
    async def work(client: InferenceClient) -> None:
        greedy = replace(SHORT, temperature=0.0)
        text = (await one(client, greedy)).text
        stopped = await one(client, greedy, stop=(text[3:5],))
        assert stopped.finish == "stop"
        if endpoint.kind != "foreign":  # transformers keeps the stop string in the text
            assert stopped.text == text[: text.index(text[3:5])]

    run(endpoint, work)


def test_code_without_an_event_loop_gets_answers(engine_endpoint: Endpoint) -> None:
    found = complete_blocking(lambda: engine_endpoint.open(), [InferenceRequest(TEXT, SHORT, copies=2)] * 2)
    assert [[answer.finish for answer in answers] for answers in found] == [["length"] * 2] * 2


def test_a_server_of_ours_is_recognized(server_url: str) -> None:
    async def work() -> None:
        async with await connect(server_url) as client:
            assert isinstance(client, ServerClient)
        with pytest.raises(InferenceError, match="no model 'litle'; available: little; did you mean 'little'"):
            await connect(server_url, model="litle")

    asyncio.run(work())


def test_the_example_of_the_docs_runs(server_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "http://127.0.0.1:8000" in code
    exec(compile(code.replace("http://127.0.0.1:8000", server_url), "serving.md", "exec"), {})
    assert capsys.readouterr().out


def interrupt_at_random(endpoint: Endpoint, num_rounds: int, seed: int) -> None:
    """Requests that are continued, forked and aborted at random places, several at once, equal their twins."""
    draw = random.Random(seed)

    async def work(client: InferenceClient) -> None:
        async def interrupted(request: InferenceRequest, cut: int, action: str) -> None:
            (answer,) = await client.submit(request)
            branches: list[Answer] = []
            async for _ in client.stream(answer):
                if len(answer.tokens) < cut:
                    continue
                if action == "continue":
                    client.abort(answer)
                elif not branches and not answer.is_done:
                    branches = await client.fork(answer, [request.sampling, replace(request.sampling, seed=77)])
                    client.abort(branches[1])
            (twin,) = await complete(client, request)
            assert answer.tokens == twin.tokens[: len(answer.tokens)]
            if answer.finish == "abort":
                (rest,) = await complete(client, answer.continuation())
                assert [*answer.tokens, *rest.tokens] == twin.tokens
                assert answer.text + rest.text == twin.text
            if branches and await is_finished(client, branches[0]):
                assert [*branches[0].generated, *branches[0].tokens] == twin.tokens

        for _ in range(num_rounds):
            samplings = [replace(LONG, max_tokens=40, seed=draw.randrange(1000), temperature=draw.choice([0.0, 1.0]))]
            samplings += [replace(samplings[0], presence_penalty=1.0, frequency_penalty=0.5, top_p=0.9)]
            samplings += [replace(samplings[0], logit_bias={}, grammar=Grammar("regex", "[a-c]{3,30}(x|yy)?"))]
            samplings += [replace(samplings[0], min_tokens=9, stop_tokens=tuple(range(60)))]
            async with asyncio.TaskGroup() as group:
                for sampling in samplings:
                    text = TEXT[: draw.randrange(1, len(TEXT))]
                    action = draw.choice(["continue", "fork"])
                    request = InferenceRequest(text, sampling, stop=draw.choice([(), ("qu",)]))
                    group.create_task(interrupted(request, draw.randrange(1, 30), action))

    run(endpoint, work)


@pytest.mark.parametrize("endpoint", ["server"], indirect=True)
def test_interrupted_answers_equal_their_twins(endpoint: Endpoint) -> None:
    interrupt_at_random(endpoint, 2, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["server"], indirect=True)
def test_many_interrupted_answers_equal_their_twins(endpoint: Endpoint) -> None:
    interrupt_at_random(endpoint, 60, seed=random.randrange(1 << 30))
