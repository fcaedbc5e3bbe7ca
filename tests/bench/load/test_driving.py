"""Loads against a real server with known latencies: what is sent and when, what is counted, and what can go wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from fast_server import fast_server
from openai_like_server import TEMPLATE_TOKENS, Behaviour, Server, openai_like_server

from craton.bench.load import (
    Closed,
    Limit,
    LoadSettings,
    LoadTarget,
    LoadWorkload,
    Open,
    Prefixes,
    Sweep,
    Timed,
    bench_serve,
    parse_objectives,
)
from craton.bench.load.benchmark import Report, _notes
from craton.bench.load.lengths import Lengths
from craton.bench.load.requests import FIRST_LEVEL, Request

WORKLOAD = LoadWorkload(Lengths("fixed", 20), Lengths("fixed", 4))
TRIALS = 1  # requests before a load, when the server takes token ids


FOUR = Closed(4)


def drive(
    server: Server, load: Any = FOUR, requests: int = 8, workload: LoadWorkload = WORKLOAD, **changed: Any
) -> Report:
    of_target = ("chat", "ignore_eos", "timeout_seconds")
    target = LoadTarget(server.url, **{name: changed.pop(name) for name in of_target if name in changed})
    limit = changed.pop("limit", Limit(requests=requests))
    return bench_serve(LoadSettings(target, workload, load, limit, **changed))


def bodies(server: Server) -> list[str]:
    return sorted(json.dumps(body) for body in server.behaviour.received)


def test_known_latencies_are_found() -> None:
    """Nothing can come sooner than the server sends it; how much later it comes is up to the machine."""
    with openai_like_server(Behaviour(first_seconds=0.2, gap_seconds=0.06)) as server:
        began = time.monotonic()
        found = drive(server, requests=4, workload=replace(WORKLOAD, output=Lengths("fixed", 6))).shown.summary
        wall_seconds = time.monotonic() - began
    assert found.failed == 0
    assert found.ttft_seconds is not None
    assert found.itl_seconds is not None
    assert found.tpot_seconds is not None
    assert found.e2e_seconds is not None
    assert found.ttft_seconds.p50 >= 0.2
    assert found.itl_seconds.p50 >= 0.03  # the gap after a piece that came late is a short one
    assert found.tpot_seconds.p50 >= 0.03
    assert 0.2 + 5 * 0.06 <= found.e2e_seconds.p50 <= wall_seconds
    assert found.output_tokens == 4 * 6
    assert found.prompt_tokens == 4 * 20


def test_tokens_come_from_usage_and_gaps_from_pieces() -> None:
    with openai_like_server(Behaviour(tokens_per_piece=4)) as server:
        report = drive(server, workload=replace(WORKLOAD, output=Lengths("fixed", 16)))
    assert report.shown.summary.output_tokens == 8 * 16
    assert report.shown.summary.tokens_per_chunk == 4
    assert {len(sample.gap_seconds) for sample in report.shown.samples} == {3}


def test_without_usage_pieces_are_counted_and_that_is_said(server: Server) -> None:
    server.behaviour.usage = False
    report = drive(server)
    assert report.shown.summary.output_tokens == 8 * 4
    assert report.shown.summary.prompt_tokens == 8 * 20
    assert any("every chunk of an answer counts as one token" in note for note in report.notes)


def test_a_closed_load_keeps_its_number_running() -> None:
    with openai_like_server(Behaviour(first_seconds=0.02)) as server:
        report = drive(server, Closed(3), requests=12)
    assert server.behaviour.most_running == 3
    assert len(report.shown.samples) == 12


def test_an_open_load_does_not_wait_for_a_slow_server() -> None:
    """One request at a time, 30 ms each, 100 a second asked for: what waits is what users would feel."""
    with openai_like_server(Behaviour(first_seconds=0.03, at_once=1)) as server:
        report = drive(server, Open(100), requests=20, workload=replace(WORKLOAD, output=Lengths("fixed", 1)))
    samples = sorted(report.shown.samples, key=lambda sample: sample.due_seconds)
    times = list(islice(Open(100).times(0, FIRST_LEVEL), 20))
    assert [sample.due_seconds for sample in samples] == pytest.approx(times)
    assert server.behaviour.most_running > 3
    assert max(sample.e2e_seconds for sample in samples) >= 20 * 0.03 - times[-1]
    assert report.shown.summary.late_seconds is not None
    assert all(sample.late_seconds >= 0 for sample in samples)


def test_sending_stops_at_the_end_of_the_time_and_all_is_awaited() -> None:
    with openai_like_server(Behaviour(first_seconds=0.1)) as server:
        for load in (Closed(2), Open(50)):
            report = drive(server, load, limit=Limit(seconds=0.3))
            samples = report.shown.samples
            assert max(sample.due_seconds for sample in samples) < 0.3
            assert report.shown.summary.answered == len(samples)
            assert max(sample.end_seconds for sample in samples) > 0.3


def test_a_seed_sends_the_same_and_another_does_not(server: Server) -> None:
    sent = []
    for seed in (5, 5, 6):
        drive(server, Open(500), seed=seed, warm_up_requests=2)
        sent.append(bodies(server))
        server.behaviour.received.clear()
    assert sent[0] == sent[1]
    assert len(sent[0]) == TRIALS + 2 + 8
    assert not set(sent[0]) & set(sent[2])


def test_warm_up_is_not_counted(server: Server) -> None:
    report = drive(server, requests=5, warm_up_requests=3)
    assert len(server.behaviour.received) == TRIALS + 3 + 5
    assert report.shown.summary.requests == 5
    assert len(set(bodies(server))) == TRIALS + 3 + 5


def test_what_is_asked_beside_the_prompt(server: Server) -> None:
    drive(server, ignore_eos=True)
    body = server.behaviour.received[-1]
    assert body["ignore_eos"] is True
    assert (body["max_tokens"], body["temperature"], body["stream"]) == (4, 0, True)
    assert body["stream_options"] == {"include_usage": True}
    assert len(body["prompt"]) == 20
    server.behaviour.received.clear()
    drive(server)
    assert "ignore_eos" not in server.behaviour.received[-1]


@pytest.mark.parametrize(
    ("change", "reason"), [({"takes_ids": False}, "valid string"), ({"vocabulary": 900}, "out of vocabulary")]
)
def test_a_server_that_refuses_ids_gets_words_of_the_same_length(
    server: Server, change: dict[str, Any], reason: str
) -> None:
    for name, value in change.items():
        setattr(server.behaviour, name, value)
    report = drive(server, workload=replace(WORKLOAD, input=Lengths("fixed", 400)))
    assert report.prompts == "random words"
    assert "prompts are words" in report.notes[0]
    assert reason in report.notes[0]
    assert report.shown.summary.prompt_tokens / 8 == pytest.approx(400, rel=0.1)


def test_a_smaller_vocabulary_is_kept_to(server: Server) -> None:
    server.behaviour.vocabulary = 900
    report = drive(server, workload=replace(WORKLOAD, vocabulary=900))
    assert report.prompts == "random token ids below 900"
    assert not any("prompts are words" in note for note in report.notes)


def test_a_chat_counts_its_template(server: Server) -> None:
    report = drive(server, chat=True, workload=replace(WORKLOAD, input=Lengths("fixed", 100)))
    assert report.shown.summary.failed == 0
    assert report.shown.summary.output_tokens == 8 * 4
    assert report.shown.summary.prompt_tokens / 8 == pytest.approx(100, rel=0.15)
    words = server.behaviour.received[-1]["messages"][0]["content"]
    assert server.behaviour.received[-1]["messages"][0]["role"] == "user"
    assert abs(len(words) / 2 - (100 - TEMPLATE_TOKENS)) < 20


def test_the_first_token_of_a_chat_is_not_the_name_of_who_speaks() -> None:
    with openai_like_server(Behaviour(first_seconds=0.08)) as server:
        found = drive(server, chat=True).shown.summary
    assert found.ttft_seconds is not None
    assert found.ttft_seconds.p50 >= 0.08


def test_every_way_to_fail_is_an_error_of_that_request_alone(server: Server) -> None:
    faults = ["429", "503", "cut", "error", "empty", "abort", "hang"]
    server.behaviour.fails = {TRIALS + 3 + index: fault for index, fault in enumerate(faults)}
    report = drive(server, requests=20, timeout_seconds=1.0, objectives=parse_objectives("ttft=10s"))
    found = report.shown.summary
    assert {failure.kind: failure.count for failure in found.failures} == dict.fromkeys(
        [
            "HTTP 429",
            "HTTP 503",
            "cut short",
            "error in the stream",
            "empty answer",
            "ended by the server: abort",
            "timeout",
        ],
        1,
    )
    examples = {failure.kind: failure.example for failure in found.failures}
    assert examples["HTTP 429"] == "overloaded, come back later"
    assert "the engine broke" in examples["error in the stream"]
    assert found.answered == 13
    assert found.output_tokens == 13 * 4
    assert found.good_share == pytest.approx(13 / 20)


def test_a_server_that_dies_is_an_error_and_no_hang() -> None:
    """A real process, killed while it streams: its answers are cut, and who comes later finds nobody."""
    with fast_server(pieces=100_000, ticks_per_second=100) as (process, url):

        @contextmanager
        def bar(title: str) -> Iterator[Any]:
            def kill_when_it_streams(done: int, total: int, what: str) -> None:
                if not what.startswith("0 tokens/s"):
                    process.kill()

            yield kill_when_it_streams

        settings = LoadSettings(LoadTarget(url), WORKLOAD, Closed(2), Limit(requests=6))
        report = bench_serve(settings, bar)
    assert report.shown.summary.answered == 0
    kinds = {failure.kind: failure.count for failure in report.shown.summary.failures}
    assert sum(kinds.values()) == 6
    assert "no connection" in kinds
    assert set(kinds) <= {"no connection", "cut short", "connection lost"}


def test_progress_is_told_with_tokens_and_running_requests() -> None:
    told: list[tuple[str, int, int, str]] = []

    @contextmanager
    def bar(title: str) -> Iterator[Any]:
        yield lambda done, total, what: told.append((title, done, total, what))

    with openai_like_server(Behaviour(first_seconds=0.05, gap_seconds=0.05)) as server:
        bench_serve(
            LoadSettings(LoadTarget(server.url), WORKLOAD, Closed(2), Limit(requests=4), warm_up_requests=1), bar
        )
        bench_serve(LoadSettings(LoadTarget(server.url), WORKLOAD, Closed(2), Limit(seconds=0.3)), bar)
    assert {title for title, *_ in told} == {"warm-up", "requests", "seconds"}
    assert all(0 <= done <= total for _, done, total, _ in told)
    assert any(what.endswith("2 running") and not what.startswith("0 tokens/s") for *_, what in told)


def test_a_trace_is_replayed_at_its_times(server: Server) -> None:
    requests = (Request("first", 2, 0.0), Request([5, 6, 7], 3, 0.15), Request("last", 1, 0.3))
    report = drive(server, Timed(), requests=3, workload=replace(WORKLOAD, trace=requests), warm_up_requests=1)
    prompts = [body["prompt"] for body in server.behaviour.received]
    assert prompts == ["tsrif", "tsrif", "first", [5, 6, 7], "last"]  # trial and warm-up backwards
    assert [sample.due_seconds for sample in report.shown.samples] == pytest.approx([0.0, 0.15, 0.3])
    assert [sample.output_tokens for sample in report.shown.samples] == [2, 3, 1]
    assert report.shown.summary.duration_seconds >= 0.3


def test_a_trace_may_be_driven_by_another_load(server: Server) -> None:
    requests = tuple(Request(f"prompt {index}", 2) for index in range(5))
    report = drive(server, Closed(2), requests=99, workload=replace(WORKLOAD, trace=requests))
    assert report.shown.summary.answered == 5


def test_shared_prefixes_reach_the_server(server: Server) -> None:
    drive(server, requests=40, workload=replace(WORKLOAD, prefixes=Prefixes(30, 2, 0.5)))
    starts = [tuple(body["prompt"][:30]) for body in server.behaviour.received[TRIALS:]]
    assert len({start for start in starts if starts.count(start) > 1}) == 2
    assert {len(body["prompt"]) for body in server.behaviour.received[TRIALS:]} == {50}


def test_a_cache_that_knows_prompts_it_should_not_is_told(server: Server) -> None:
    server.behaviour.cached_tokens = 15
    report = drive(server)
    assert report.shown.summary.cached_tokens == 8 * 15
    assert any("75% of the prompt tokens came from the server's prefix cache" in note for note in report.notes)
    shared = drive(server, workload=replace(WORKLOAD, prefixes=Prefixes(30)))
    assert not any("prefix cache" in note for note in shared.notes)


def test_a_client_that_is_busy_or_late_is_told(server: Server) -> None:
    report = drive(server)
    (level,) = report.levels
    assert level.summary.late_seconds is not None
    assert 0 < level.busy <= 1
    late = replace(level.summary.late_seconds, p99=0.05)
    slow = replace(level, busy=0.97, summary=replace(level.summary, late_seconds=late))
    told = " ".join(_notes(replace(report, levels=(slow,))))
    assert "this client was busy 97% of the time" in told
    assert "sent 50.0 ms late or more" in told


def test_a_sweep_finds_where_a_server_saturates() -> None:
    """Two requests at a time of 100 ms each: 20 requests/s. Short levels find it only roughly."""
    behaviour = Behaviour(first_seconds=0.1, at_once=2)
    with openai_like_server(behaviour) as server:
        workload = replace(WORKLOAD, output=Lengths("fixed", 1))
        for seconds in (0.8, 2.0, 5.0, 12.0):  # a busy machine makes a queue, or hides one, in a short level
            report = drive(server, Sweep(4, 160), workload=workload, limit=Limit(seconds=seconds))
            found = report.saturation
            assert found is not None
            if found.sustained and found.too_much:
                break
    assert found.sustained is not None
    assert found.too_much is not None
    assert 4 <= found.sustained < found.too_much <= 160
    rates = [level.load.requests_per_second for level in report.levels if isinstance(level.load, Open)]
    assert rates == sorted(rates)
    assert isinstance(report.shown.load, Open)
    assert report.shown.load.requests_per_second == found.sustained
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["saturation"] == {
        "sustained_requests_per_second": found.sustained,
        "too_much_requests_per_second": found.too_much,
    }
