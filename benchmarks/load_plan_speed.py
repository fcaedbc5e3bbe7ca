"""`python benchmarks/load_plan_speed.py`: processor time of plans of a server's load, beside a loop for comparison."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from craton.infrastructure import resolve_cluster
from craton.job import parse_job
from craton.planning.rates import machine_of
from craton.planning.serving.load import ServedLoad, TokenLengths
from craton.planning.serving.profile import find_engine_profile
from craton.planning.serving.search import plan_load
from craton.planning.serving.search.evaluate import evaluate, largest_load
from craton.planning.serving.search.replicas import candidates_of

JOB = """\
kind: serve
model: llama-3.1-8b
cluster: p5en.48xlarge x 1
software: vllm
serve: {load: {rate: 20, input: 1024, output: 256}, slo: {ttft: 500ms, tpot: 30ms}}
"""
LAYOUTS = 1000
LIMITS = {("ttft", "p95"): 0.5, ("tpot", "p95"): 0.03}


def milliseconds(action: Callable[[], object], repeats: int) -> float:
    """Return the smallest processor time of several runs."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def main() -> None:
    job = parse_job(JOB)
    shape, cluster = job.model_shape, resolve_cluster(job.cluster, job.price)
    assert shape is not None
    machine = machine_of(cluster)
    load = ServedLoad(TokenLengths.fixed(1024), TokenLengths.fixed(256), rate=20.0)
    every = candidates_of(job, shape, machine, find_engine_profile("vllm", machine.gpu), load)
    assert every is not None
    one, many = every.only([0]), every.only([0] * LAYOUTS)

    def search() -> None:
        largest_load(many, load, LIMITS)
        evaluate(many, load, np.ones(LAYOUTS))

    print(f"loop of 5,000,000      {milliseconds(lambda: sum(i * i % 7 for i in range(5_000_000)), 3):8.1f} ms")
    print(f"one deployment         {milliseconds(lambda: evaluate(one, load, np.ones(1)), 20):8.1f} ms")
    print(f"its largest load       {milliseconds(lambda: largest_load(one, load, LIMITS), 10):8.1f} ms")
    print(f"{LAYOUTS:,} layouts          {milliseconds(search, 3):8.1f} ms")
    print(f"whole plan, 4 layouts  {milliseconds(lambda: plan_load(job), 5):8.1f} ms")


if __name__ == "__main__":
    main()
