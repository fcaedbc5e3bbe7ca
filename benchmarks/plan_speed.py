"""Planning speed: `python benchmarks/plan_speed.py`.

Prints the median of five: `craton plan` of two examples as a command, in processor seconds, beside a loop of Python
that tells how fast this core is now; all layouts of Llama-3.1-405B on 16,384 H100, the largest search of the
examples, five instance types in eight sizes, and the start of the command line beside that of the library it is made
with.
"""

from __future__ import annotations

import os
import resource
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
LOOP = "x = 0\nfor i in range(5_000_000): x += i*i%7"
LOOP_SECONDS = 0.30  # of the core that the bars of the commands are for


def main() -> None:
    cluster = cluster_of("p5.48xlarge", 2048)
    machine = machine_of(cluster)
    profile = find_profile("megatron-bridge", machine.gpu)

    def giant() -> int:
        shape = model_preset("llama-3.1-405b")
        model = StepModel(shape, 8192, 2048, machine.rates, machine.network, profile.traits)
        return search(model, machine, profile, cluster.num_gpus, "bf16").evaluated

    for name, bar in (("llama-405b", 0.7), ("llama-8b", 0.6)):
        print_command(name, bar)
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


def print_command(name: str, bar: float) -> None:
    """Print the processor seconds of a whole `craton plan`, each beside the loop, run just before it."""
    command = ("-m", "craton", "plan", str(EXAMPLES / f"{name}.yaml"))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    processor_seconds(*command, environment=environment)  # writes the bytecode, as an installation does
    pairs = [
        (processor_seconds("-c", LOOP, environment=environment), processor_seconds(*command, environment=environment))
        for _ in range(5)
    ]
    loop, whole = (statistics.median(column) for column in zip(*pairs, strict=True))
    scaled = statistics.median(seconds * LOOP_SECONDS / beside for beside, seconds in pairs)
    print(
        f"craton plan {name}.yaml: {whole:.2f} processor seconds beside a loop of {loop:.2f}, "
        f"{scaled:.2f} beside one of {LOOP_SECONDS:.2f} (bar {bar})"
    )


def processor_seconds(*arguments: str, environment: dict[str, str]) -> float:
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=environment)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime


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
