"""Planning speed: `python benchmarks/plan_speed.py`.

Prints the median of five: all layouts of Llama-3.1-405B on 16,384 H100, the largest search of the examples, five
instance types in eight sizes, and the start of the command line beside that of the library it is made with.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from craton.infrastructure import cluster_of
from craton.job import load_job
from craton.job.model import model_preset
from craton.planning import plan, plan_clusters
from craton.planning.calibration import find_profile
from craton.planning.rates import machine_of
from craton.planning.search import search
from craton.planning.step import StepModel

EXAMPLES = Path(__file__).parent.parent / "examples"
INSTANCES = ("p4de.24xlarge", "p5.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge", "p6-b300.48xlarge")
SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)


def main() -> None:
    cluster = cluster_of("p5.48xlarge", 2048)
    machine = machine_of(cluster)
    profile = find_profile("megatron-bridge", machine.gpu)

    def giant() -> int:
        shape = model_preset("llama-3.1-405b")
        model = StepModel(shape, 8192, 2048, machine.rates, machine.network, profile.traits)
        return search(model, machine, profile, cluster.num_gpus, "bf16").evaluated

    job = load_job(EXAMPLES / "llama-8b.yaml")
    experts = load_job(EXAMPLES / "deepseek-v3.yaml")
    print(f"{giant():,} layouts of Llama-3.1-405B on 16,384 GPUs: {median(giant):.2f} s")
    print(f"whole plan of llama-8b.yaml: {median(lambda: plan(job)):.2f} s")
    print(f"whole plan of deepseek-v3.yaml: {median(lambda: plan(experts)):.2f} s")
    clusters = median(lambda: plan_clusters(job, INSTANCES, SIZES), times=3)
    print(f"{len(INSTANCES)} instance types x {len(SIZES)} sizes, all layouts: {clusters:.2f} s")
    ours = median(lambda: python("-m", "craton", "--help"))
    library = median(lambda: python("-c", "import typer, typer.rich_utils"))
    print(f"craton --help: {ours:.2f} s, {ours / library:.2f} times the import of its library")


def python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)


def median(action: Callable[[], object], times: int = 5) -> float:
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
