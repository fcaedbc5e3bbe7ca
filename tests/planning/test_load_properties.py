"""More load, longer prompts, fewer prefix hits or slower GPUs never plan a faster server."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from craton.infrastructure import cluster_of
from craton.job import Job, parse_job
from craton.planning.rates import MachineRates, machine_of
from craton.planning.serving.load import ServedLoad, TokenLengths
from craton.planning.serving.profile import find_engine_profile
from craton.planning.serving.search.evaluate import evaluate, largest_load
from craton.planning.serving.search.replicas import ServedCandidates, candidates_of

SERVERS = (
    ("llama-3.1-8b", "p5en.48xlarge", "craton", "bf16"),
    ("llama-3.1-70b", "p5en.48xlarge", "vllm", "bf16"),
    ("deepseek-v3", "p6-b200.48xlarge", "sglang", "fp8"),
)
MEAN_SLACK = 1.02  # the closed forms average over a few batches and chunk sizes
PERCENTILE_SLACK = 1.3  # the shape of a distribution may change, e.g. where one prompt less fits in a step
# Of a closed load, in which time may move from TTFT to TPOT or back: users wait for the one or for the other.
CLOSED = ("e2e mean", "seconds")
OPEN = (*CLOSED, "ttft")
FASTER = 1.5


@cache
def job_of(server: tuple[str, str, str, str]) -> tuple[Job, MachineRates]:
    model, instance, software, precision = server
    text = f"kind: serve\nmodel: {model}\ncluster: {instance} x 1\nsoftware: {software}\n"
    job = parse_job(f"{text}serve: {{initialize: random, precision: {precision}}}\n")
    return job, machine_of(cluster_of(instance, 1))


def candidates(server: tuple[str, str, str, str], load: ServedLoad, speed: float = 1.0) -> ServedCandidates:
    job, machine = job_of(server)
    rates = machine.rates
    scaled = {
        field.name: getattr(rates, field.name) * speed
        for field in fields(rates)
        if field.name.endswith("bytes_per_second")
    }
    flops = {name: {key: value * speed for key, value in getattr(rates, name).items()} for name in FLOPS}
    machine = replace(machine, rates=replace(rates, **scaled, **flops))
    assert job.model_shape is not None
    found = candidates_of(job, job.model_shape, machine, find_engine_profile(job.software, machine.gpu), load)
    assert found is not None
    return found


FLOPS = ("peak_flops", "matrix_flops")


def statistics(
    server: tuple[str, str, str, str], load: ServedLoad, speed: float = 1.0, replicas: int = 1
) -> dict[str, np.ndarray]:
    """Return seconds of every candidate's latency and per request, all lower for a faster server."""
    tried = candidates(server, load, speed)
    found = evaluate(tried, load, np.full(len(tried), float(replicas)))
    shape = (3, len(tried))
    table = {
        f"{name} {key}": np.broadcast_to(getattr(found.latencies, name)[key], shape)[0]
        for name in ("ttft", "tpot", "e2e")
        for key in ("mean", "p95")
    }
    if load.concurrency is not None:
        table["seconds per request"] = 1.0 / np.broadcast_to(found.rate, shape)[0]
    else:
        table["seconds per request at most"] = 1.0 / largest_load(tried, load, {})
    return table


def check_not_slower(
    fast: dict[str, np.ndarray], slow: dict[str, np.ndarray], *names: str, mean_slack: float = MEAN_SLACK
) -> None:
    is_kept_up = np.isfinite(slow["e2e mean"])  # TPOT of a server that does not keep up is that of its largest batch
    for name, seconds in fast.items():
        slack = PERCENTILE_SLACK if name.endswith("p95") else mean_slack
        chosen = is_kept_up if name.startswith("tpot") else np.full(len(seconds), True)
        if name.startswith(names):
            assert np.all(seconds[chosen] <= slack * slow[name][chosen]), (name, seconds, slow[name])


LENGTHS = st.one_of(
    st.integers(32, 2000).map(TokenLengths.fixed),
    st.tuples(st.integers(16, 1000), st.floats(1.0, 3.5)).map(
        lambda pair: TokenLengths.lognormal(pair[0], pair[1] * pair[0])
    ),
)
LOADS = st.builds(
    lambda prompt, output, users, rate: ServedLoad(
        TokenLengths.fixed(prompt), output, rate=None if users else rate, concurrency=users or None
    ),
    st.integers(64, 16_384),
    LENGTHS,
    st.sampled_from([0, 0, 1, 7, 64, 500, 3000]),
    st.floats(0.05, 20.0),
)
few = settings(max_examples=30, deadline=None, database=None, phases=[Phase.generate])


@seed(1)
@few
@given(st.sampled_from(SERVERS), LOADS, st.floats(0.0, 0.98), st.floats(0.0, 0.98))
def test_more_prefix_hits_never_plan_a_slower_server(
    server: tuple[str, str, str, str], load: ServedLoad, one: float, other: float
) -> None:
    few_hits, more_hits = sorted((one, other))
    fast, slow = (statistics(server, replace(load, prefix_hits=hits)) for hits in (more_hits, few_hits))
    # Where prompts were the bottleneck, more of them decode together: TPOT may rise, and the answer still ends earlier.
    check_not_slower(fast, slow, *CLOSED, "ttft")


@seed(2)
@few
@given(st.sampled_from(SERVERS), LOADS, st.floats(1.02, 4.0))
def test_more_load_never_plans_a_faster_server(
    server: tuple[str, str, str, str], load: ServedLoad, factor: float
) -> None:
    if load.rate is not None:
        more = replace(load, rate=load.rate * factor)
    else:
        assert load.concurrency is not None
        more = replace(load, concurrency=int(load.concurrency * factor) + 1)
    names = ("e2e mean",) if load.concurrency else (*OPEN, "tpot", "e2e")
    check_not_slower(statistics(server, load), statistics(server, more), *names)


@seed(3)
@few
@given(st.sampled_from(SERVERS), LOADS, st.floats(1.02, 4.0))
def test_longer_prompts_never_plan_a_faster_server(
    server: tuple[str, str, str, str], load: ServedLoad, factor: float
) -> None:
    longer = replace(load, input=load.input.scaled(factor))
    check_not_slower(statistics(server, load), statistics(server, longer), *CLOSED, "ttft")


@seed(4)
@few
@given(st.sampled_from(SERVERS), LOADS)
def test_faster_gpus_never_plan_a_slower_server(server: tuple[str, str, str, str], load: ServedLoad) -> None:
    fast, slow = statistics(server, load, FASTER), statistics(server, load)
    # The closed forms are least accurate for prompts near saturation, and for steps that wait for kernel launches.
    names, slack = (CLOSED, 1.1) if load.concurrency else (OPEN, PERCENTILE_SLACK)
    check_not_slower(fast, slow, *names, mean_slack=slack)


@seed(5)
@few
@given(st.sampled_from(SERVERS), LOADS, st.integers(1, 8), st.integers(1, 8))
def test_more_gpus_never_plan_a_slower_server(
    server: tuple[str, str, str, str], load: ServedLoad, replicas: int, more: int
) -> None:
    slow, fast = (statistics(server, load, replicas=count) for count in (replicas, replicas + more))
    check_not_slower(fast, slow, "e2e mean", *(() if load.concurrency else ("ttft", "tpot")))


@pytest.mark.parametrize("users", [1, 64, 512])
def test_a_closed_load_counts_cached_tokens_in_the_kv_cache_but_does_not_compute_them(users: int) -> None:
    load = ServedLoad(TokenLengths.fixed(8192), TokenLengths.fixed(64), concurrency=users)
    server = SERVERS[0]
    none, half = statistics(server, load), statistics(server, replace(load, prefix_hits=0.5))
    short = statistics(server, replace(load, input=TokenLengths.fixed(4096)))
    for name in ("ttft mean", "e2e mean", "seconds per request"):
        assert np.all(short[name] <= half[name]), name
        assert np.all(half[name] < none[name]), name
