"""HTTP clients against servers that break, stall and refuse: clear errors, bounded retries, no hang, no leaked key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from waiting import PATIENCE_SECONDS

from craton.ml.serving.clients import (
    AnswerTimeoutError,
    BrokenStreamError,
    EndpointUnavailableError,
    InferenceClient,
    InferenceError,
    InferenceRequest,
    MissingCapabilityError,
    OpenAIClient,
    ProtocolError,
    RequestRefusedError,
    Retries,
    ServerClient,
    ServerFailedError,
    Timeouts,
    complete,
)
from craton.ml.serving.clients.bounds import Slots
from craton.ml.serving.clients.event_stream import EventFormatError, EventReader
from craton.ml.serving.messages import Sampling

KEY = "sk-very-secret-0123456789"
HASTY = Retries(max_tries=3, max_seconds=30.0, first_delay=0.001, max_delay=0.002)
ASK = InferenceRequest("Once", Sampling(max_tokens=4, temperature=0.0))
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CARD = {"id": "tiny", "owned_by": "someone"}
STALL = b"nothing more, until the client leaves"
OURS = {"id": "tiny", "owned_by": "craton", "weights_version": 3}

Reply = bytes | list[bytes] | None  # None: nothing is ever sent


def event(**choice: Any) -> bytes:
    body = {"id": "cmpl-1", "choices": [{"index": 0, "finish_reason": None, **choice}]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def page(status: str, body: str, headers: str = "", kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body.encode())}\r\n{headers}"
    return f"{head}Connection: close\r\n\r\n{body}".encode()


GOOD = STREAM + event(text="upon") + event(text=" a", finish_reason="length") + b"data: [DONE]\n\n"


class RawServer:
    """Sends bytes: the cards of its models, and one reply after the other, the last again and again."""

    def __init__(self, *replies: Reply, card: dict[str, Any] = CARD) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.num_closed = 0
        self._replies = list(replies)
        self._card = card
        self.url = ""

    async def __aenter__(self) -> RawServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode()
            if path.startswith("/v1/models"):
                writer.write(page("200 OK", json.dumps({"data": [self._card]} if path == "/v1/models" else self._card)))
                return
            length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
            self.bodies.append(json.loads(await reader.readexactly(length)))
            self.paths.append(path)
            reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
            if reply is None:
                await reader.read()
                self.num_closed += 1
            for part in [reply] if isinstance(reply, bytes) else reply or []:
                if part == STALL:
                    await reader.read()
                    break
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
        except ConnectionError:
            self.num_closed += 1
        finally:
            writer.close()


def ask(
    server: RawServer,
    work: Callable[[InferenceClient], Awaitable[None]],
    made: type[OpenAIClient] | type[ServerClient] = OpenAIClient,
    **options: Any,
) -> None:
    async def inside() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS), server:
            options.setdefault("retries", HASTY)
            async with made(server.url, api_key=KEY, random_seed=1, **options) as client:
                await work(client)
                assert client.num_in_flight == 0

    asyncio.run(inside())


def expect_error(kind: type[InferenceError], message: str, *replies: Reply, **options: Any) -> RawServer:
    server = RawServer(*replies)

    async def work(client: InferenceClient) -> None:
        with pytest.raises(kind, match=message) as caught:
            await complete(client, ASK)
        assert KEY not in str(caught.value) + repr(client)
        assert server.url in str(caught.value)

    ask(server, work, **options)
    return server


@pytest.mark.parametrize(
    "reply",
    [
        GOOD,
        [GOOD[place : place + 1] for place in range(len(GOOD))],  # torn anywhere
        GOOD.replace(b"\n\n", b"\r\n\r\n").replace(b"data: ", b": a comment\r\nevent: x\r\ndata:"),
        GOOD.removesuffix(b"data: [DONE]\n\n"),
        GOOD + b"data: after the end\n\n",
    ],
)
def test_a_stream_is_read_however_it_is_split(reply: Reply) -> None:
    async def work(client: InferenceClient) -> None:
        (answer,) = await complete(client, ASK)
        assert (answer.text, answer.finish) == ("upon a", "length")

    ask(RawServer(reply), work)


@pytest.mark.parametrize(
    ("kind", "message", "reply"),
    [
        (ProtocolError, "an event is not JSON: 'nonsense'", STREAM + b"data: nonsense\n\n"),
        (ProtocolError, "an event is not JSON", STREAM + b'data: {"choices": "\xff\xfe"}\n\n'),
        (ProtocolError, "an event is not an object: '7'", STREAM + b"data: 7\n\n"),
        (ProtocolError, "a chunk of /v1/completions has another form", STREAM + b'data: {"choices": [7]}\n\n'),
        (ProtocolError, "more than 16,777,216 bytes", [STREAM, *[b"data: " + b"x" * (1 << 20)] * 17]),
        (ProtocolError, "far longer than max_tokens 4", [STREAM, *[event(text="x") * 1000] * 100]),
        (ProtocolError, "far longer than max_tokens 4", [STREAM, *[event(text="x" * 1000)] * 9]),
        (ProtocolError, "does not stream: it replies text/html", page("200 OK", "<html>", kind="text/html")),
        (ProtocolError, "does not stream: it replies application/json", page("200 OK", '{"choices": []}')),
        (ProtocolError, "redirects are not followed", page("302 Found", "", "Location: http://127.0.0.1:1/\r\n")),
        (RequestRefusedError, r"HTTP 400 at /v1/completions \(too long\)", page("400 X", '{"error": "too long"}')),
        (RequestRefusedError, r"HTTP 422 at .* \(no\)", page("422 X", '{"detail": "no"}')),
        (ServerFailedError, "an HTML page, '502 Bad'", page("502 X", "<html><title>502 Bad</title>", kind="text/html")),
        (EndpointUnavailableError, r"does not speak HTTP correctly.*gave up after 3 tries", b"SSH-2.0-OpenSSH\r\n\r\n"),
        (EndpointUnavailableError, r"closed the connection before it replied; gave up after 3 tries", b""),
        (BrokenStreamError, r"the stream ended before the answer; gave up after 3 tries", STREAM),
        (BrokenStreamError, r"ended before the answer after 1 tokens of the answer$", STREAM + event(text="upon")),
        (
            BrokenStreamError,
            r"the GPU fell off; gave up",
            STREAM + b'data: {"error": {"message": "the GPU fell off"}}\n\n',
        ),
        (BrokenStreamError, r"the GPU fell off", STREAM + b'data: {"error": "the GPU fell off"}\n\n'),
    ],
)
def test_what_is_no_answer_gives_a_clear_error(kind: type[InferenceError], message: str, reply: Reply) -> None:
    expect_error(kind, message, reply)


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
def test_a_key_that_the_server_quotes_is_not_shown(status: str) -> None:
    expect_error(RequestRefusedError, r"refuses this API key .*\*\*\*", page(status, f'{{"error": "wrong: {KEY}"}}'))


def test_a_busy_server_is_asked_again() -> None:
    busy = page("429 Too Many", '{"error": "later"}', "Retry-After: 0\r\n")
    server = RawServer(busy, page("503 Service Unavailable", "loading"), GOOD)

    async def work(client: InferenceClient) -> None:
        (answer,) = await complete(client, ASK)
        assert answer.text == "upon a"

    ask(server, work)
    assert len(server.bodies) == 3
    assert server.bodies[0] == server.bodies[2], "with the same seed"


@pytest.mark.parametrize("advice", [7200, 31])
def test_advice_beyond_the_bound_is_not_waited_for(advice: int) -> None:
    reply = page("429 Too Many", "later", f"Retry-After: {advice}\r\n")
    server = expect_error(EndpointUnavailableError, r"HTTP 429 .*gave up after 1 tries", reply)
    assert len(server.bodies) == 1


def test_a_server_that_is_not_there() -> None:
    async def work() -> None:
        async with OpenAIClient("http://127.0.0.1:1", retries=HASTY) as client:
            with pytest.raises(EndpointUnavailableError, match=r"cannot connect .Connection refused.*gave up after 3"):
                await client.submit(ASK)

    asyncio.run(work())


@pytest.mark.parametrize(
    ("timeouts", "reply", "message"),
    [
        (Timeouts(first_token=0.05), None, "no token after 50 ms"),
        (Timeouts(first_token=0.05), [STREAM, *[b": ping\n\n"] * 50], "no token after 50 ms|gave up"),
        (Timeouts(whole=0.05), None, "not finished after 50 ms"),
    ],
)
def test_a_server_that_sends_nothing(timeouts: Timeouts, reply: Reply, message: str) -> None:
    expect_error(InferenceError, message, reply, timeouts=timeouts)


def test_a_server_that_stalls_between_tokens() -> None:
    class Stalling(RawServer):
        async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
                writer.write(page("200 OK", json.dumps({"data": [CARD]})))
                writer.close()
                return
            writer.write(STREAM + event(text="upon"))
            await reader.read()
            self.num_closed += 1
            writer.close()

    server = Stalling(None)

    async def work(client: InferenceClient) -> None:
        (answer,) = await client.submit(ASK)
        with pytest.raises(AnswerTimeoutError, match="no further token for 50 ms"):
            [delta async for delta in client.stream(answer)]
        while not server.num_closed:
            await asyncio.sleep(0)
        assert answer.text == "upon", "what had come is kept"

    ask(server, work, timeouts=Timeouts(between_tokens=0.05))


def test_a_broken_stream_of_our_server_is_continued_with_its_tokens() -> None:
    first = event(text="upon", token_ids=[5], weights_versions=[3], logprobs={"token_logprobs": [-1.0]})
    second = event(text=" a", token_ids=[6, 7], weights_versions=[3, 3], logprobs={"token_logprobs": [-2.0, -3.0]})
    last = event(text="", finish_reason="length", stop_reason=None)
    server = RawServer(STREAM + first, STREAM, STREAM + second + last, card=OURS)
    sampling = Sampling(max_tokens=4, seed=11, logprobs=0)

    async def work(client: InferenceClient) -> None:
        (answer,) = await complete(client, InferenceRequest("Once", sampling, stop=("x",)))
        assert (answer.text, answer.tokens, answer.versions) == ("upon a", [5, 6, 7], [3, 3, 3])
        assert answer.logprobs == [-1.0, -2.0, -3.0]
        assert await client.weights_version() == 3

    ask(server, work, ServerClient)
    assert [body["continue_from"] for body in server.bodies] == [[], [5], [5]]
    assert {body["seed"] for body in server.bodies} == {11}


def test_a_stream_that_breaks_often_is_continued_as_long_as_it_gets_on() -> None:
    parts = [event(text=str(number), token_ids=[number], weights_versions=[0]) for number in range(3 * HASTY.max_tries)]
    last = event(text="", finish_reason="length", stop_reason=None)
    server = RawServer(*(STREAM + part for part in parts), STREAM + last, card=OURS)

    async def work(client: InferenceClient) -> None:
        (answer,) = await complete(client, InferenceRequest("Once", Sampling(max_tokens=99, seed=11)))
        assert answer.tokens == list(range(len(parts)))

    ask(server, work, ServerClient)


def test_copies_of_a_broken_stream_are_continued_one_by_one() -> None:
    def chunk(index: int, **fields: Any) -> bytes:
        return event(index=index, weights_versions=[], **fields)

    broken = STREAM + chunk(0, text="a", token_ids=[5]) + chunk(1, text="b", token_ids=[6], finish_reason="stop")
    rest = STREAM + chunk(0, text="c", token_ids=[7], finish_reason="length")
    server = RawServer(broken, rest, card=OURS)

    async def work(client: InferenceClient) -> None:
        answers = await complete(client, InferenceRequest("Once", Sampling(max_tokens=4, seed=11), copies=3))
        assert [answer.text for answer in answers] == ["ac", "b", "c"]

    ask(server, work, ServerClient)
    whole, *others = server.bodies
    assert (whole["n"], whole["seed"]) == (3, 11)
    assert sorted((body["n"], body["seed"], tuple(body["continue_from"])) for body in others) == [
        (1, 11, (5,)),
        (1, 13, ()),
    ]


def test_a_broken_branch_is_continued_with_its_tokens() -> None:
    first = event(text="upon", token_ids=[5], weights_versions=[3])
    branch = event(text=" a", token_ids=[6], weights_versions=[3], generated_token_ids=[5])
    rest = event(text=" time", token_ids=[7], weights_versions=[3], finish_reason="length")
    server = RawServer([STREAM + first, STALL], STREAM + branch, STREAM + rest, card=OURS)

    async def work(client: InferenceClient) -> None:
        (parent,) = await client.submit(InferenceRequest("Once", Sampling(max_tokens=4, seed=11)))
        async for _ in client.stream(parent):
            (branch,) = await client.fork(parent, [Sampling(max_tokens=3, seed=12)])
            assert [delta.text async for delta in client.stream(branch)] == [" a", " time"]
            assert (branch.generated, branch.tokens, branch.finish) == ((5,), [6, 7], "length")
            client.abort(parent)
            break

    ask(server, work, ServerClient)
    assert server.paths == ["/v1/completions", "/v1/fork", "/v1/completions"]
    assert (server.bodies[1]["id"], server.bodies[1]["branches"][0]["seed"]) == ("cmpl-1", 12)
    assert (server.bodies[2]["continue_from"], server.bodies[2]["seed"]) == ([5, 6], 12)


def test_a_fork_of_a_busy_server_is_tried_again() -> None:
    first = event(text="upon", token_ids=[5], weights_versions=[3])
    last = event(text=" a", token_ids=[6], weights_versions=[3], generated_token_ids=[5], finish_reason="length")
    busy, unknown = page("429 Busy", "later"), page("404 Not Found", '{"error": "choice 0 has ended"}')
    server = RawServer([STREAM + first, STALL], busy, STREAM + last, unknown, card=OURS)

    async def work(client: InferenceClient) -> None:
        (parent,) = await client.submit(InferenceRequest("Once", Sampling(max_tokens=4)))
        async for _ in client.stream(parent):
            (branch,) = await client.fork(parent, [Sampling(max_tokens=3)])
            assert [delta.text async for delta in client.stream(branch)] == [" a"]
            (late,) = await client.fork(parent, [Sampling(max_tokens=3)])
            with pytest.raises(RequestRefusedError, match="choice 0 has ended"):
                [delta async for delta in client.stream(late)]
            client.abort(parent)
            break

    ask(server, work, ServerClient)


def test_a_foreign_server_is_no_server_of_ours() -> None:
    async def work(client: InferenceClient) -> None:
        with pytest.raises(ProtocolError, match="not a Craton server with forks; use OpenAIClient"):
            await client.submit(ASK)

    ask(RawServer(GOOD), work, ServerClient)


def test_a_wish_that_cannot_be_granted_starts_nothing() -> None:
    """Trials are made once, and only for a wish; of an endpoint that ignores seeds and log-probs."""
    server = RawServer(GOOD)

    async def work(client: InferenceClient) -> None:
        await complete(client, ASK)
        assert len(server.bodies) == 1, "a plain request needs no trial"
        for sampling, message in (
            (Sampling(seed=1), "does not give seeds; set sampling.seed to None, or use a Craton server"),
            (Sampling(logprobs=0), "does not give logprobs; set sampling.logprobs to None"),
            (Sampling(logprobs=2), "does not give logprobs, alternatives"),
            (Sampling(top_k=5), "does not give extended sampling; leave top_k, min_p"),
        ):
            before = len(server.bodies)
            with pytest.raises(MissingCapabilityError) as caught:
                await client.submit(InferenceRequest("Once", sampling))
            assert str(caught.value).startswith(f"{server.url} {message}")
            assert before in (1, len(server.bodies)), "it is tried out once"
        assert len(server.bodies) < 12

    ask(server, work)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://user:word@host:1"])
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(RequestRefusedError, match="URL") as caught:
        OpenAIClient(url)
    assert "word" not in str(caught.value).replace("password", "")


def test_the_size_of_an_event_is_limited() -> None:
    reader = EventReader(max_bytes=100)
    assert reader.feed(b'data: {"a":\ndata: 1}\n\n') == [{"a": 1}]
    for _ in range(3):
        reader.feed(b"data: " + b"x" * 20 + b"\n")
    with pytest.raises(EventFormatError, match="more than 100 bytes"):
        reader.feed(b"data: " + b"x" * 20 + b"\n")


def test_slots_are_given_in_order_and_not_lost() -> None:
    async def work() -> None:
        slots = Slots(2)
        order: list[int] = []

        async def take(number: int, count: int) -> None:
            await slots.take(count)
            order.append(number)

        await slots.take(2)
        tasks = [asyncio.create_task(take(number, count)) for number, count in enumerate((2, 1, 1))]
        await asyncio.sleep(0)
        tasks[0].cancel()  # a waiting one leaves no hole
        await asyncio.sleep(0)
        slots.give(2)
        await asyncio.gather(*tasks[1:])
        assert (order, slots.taken) == ([1, 2], 2)
        late = asyncio.create_task(take(3, 1))
        await asyncio.sleep(0)
        slots.give()
        late.cancel()  # after it got its slot, before it could run
        with pytest.raises(asyncio.CancelledError):
            await late
        assert slots.taken == 1

    asyncio.run(work())


def scored(logprob: float, **more: Any) -> bytes:
    """A whole answer as vLLM streams it: the token that ends it is among the token ids."""
    scores = {"token_logprobs": [logprob, -0.5]}
    return (
        STREAM
        + event(text="upon", logprobs=scores, token_ids=[7, 2], finish_reason="stop", stop_reason=None, **more)
        + b"data: [DONE]\n\n"
    )


def test_log_probs_that_ignore_the_temperature_are_refused_where_it_matters() -> None:
    sampling = Sampling(max_tokens=4, temperature=0.6, logprobs=0, logprobs_mode="sampled")

    async def work(client: InferenceClient) -> None:
        await client.require("token_ids", "logprobs", "token_prompts")
        with pytest.raises(MissingCapabilityError, match=r"sampled logprobs; sample from .* processed_logprobs"):
            await complete(client, InferenceRequest([1, 2], sampling))
        (answer,) = await complete(client, InferenceRequest([1, 2], Sampling(logprobs=0, logprobs_mode="sampled")))
        assert (answer.sampled_tokens, answer.sampled_logprobs) == ([7, 2], [-1.5, -0.5])

    ask(RawServer(scored(-1.5)), work)


def test_log_probs_that_follow_the_temperature_are_found() -> None:
    trials = [scored(-1.5)] * 3  # completion, chat, prompt of token ids
    refused = page("400 Bad Request", json.dumps({"error": {"message": "unknown field logprobs_mode"}}))
    server = RawServer(*trials, refused, scored(-0.01))

    async def work(client: InferenceClient) -> None:
        await client.require("sampled_logprobs")
        sampling = Sampling(max_tokens=4, temperature=0.6, logprobs=0, logprobs_mode="sampled")
        await complete(client, InferenceRequest([1, 2], sampling))
        assert "logprobs_mode" not in server.bodies[-1]
        assert server.bodies[-1]["return_token_ids"]

    ask(server, work)


def test_an_endpoint_without_log_probs_is_refused_before_anything_starts() -> None:
    async def work(client: InferenceClient) -> None:
        with pytest.raises(MissingCapabilityError, match=r"^http://127\S+ does not give token ids, logprobs; use a C"):
            await client.require("token_ids", "logprobs")

    ask(RawServer(GOOD), work)
