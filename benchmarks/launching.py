"""Time of quick commands: `python benchmarks/launching.py [RUNS]`.

Measures `craton ps` as a command, over runs that have ended here and over runs that wait on a real Slurm (that of the
tests, which needs root), and the submission of a run to it without sbatch's own time, without code and with the code of
this repository. Prints medians of five and, separately, the first submission, which must store all code.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from craton.agent.processes import free_port
from craton.job import Job, parse_job
from craton.orchestration.draft import draft_run
from craton.orchestration.slurm import SCRIPT_FILE
from craton.orchestration.start import start_run
from craton.orchestration.start.copies import start_copies
from craton.telemetry import RunDirectory

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS / "orchestration"), str(TESTS)]
from slurm_lab import NODES, SlurmLab  # noqa: E402

TIMES = 5
STEPS = 600  # of a run that has ended, one a second
PLAN = {"steps": STEPS, "step_seconds": 1.0, "tokens_per_second": 8192.0, "cost": {"dollars_per_day": 2400.0}}


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    with tempfile.TemporaryDirectory(prefix="launching-") as folder:
        root = Path(folder) / "ended"
        for number in range(count):
            make_ended_run(root, f"ended-{number:03d}")
        print(f"craton ps, {count} runs that have ended: {timed_ps(root)}")
        lab = SlurmLab()
        try:
            lab.start()
            os.environ["SLURM_CONF"] = str(lab.config)
            lab.occupy(*NODES)
            start_waiting_runs(Path(folder) / "waiting", count)
            print(f"craton ps, {count} runs that wait on Slurm: {timed_ps(Path(folder) / 'waiting')}")
            print(f"submitting no code to Slurm: {timed_submissions(Path(folder) / 'bare', Path(folder) / 'job')}")
            code = Path(folder) / "code"
            print(f"submitting {copy_repository(code)} to Slurm: {timed_submissions(Path(folder) / 'new', code)}")
        finally:
            lab.stop()


def make_ended_run(root: Path, name: str, steps: int = STEPS) -> None:
    """Write a run as the agent of one node leaves it: one metrics line per step, one ledger line per second."""
    run = RunDirectory.create(root, name)
    begin = time.time() - steps
    run.launch_path.write_text(json.dumps({"generation": 0, "nodes": ["node-0"], "ranks_per_node": 1}))
    run.plan_path.write_text(json.dumps(PLAN))
    metrics, ledger = [], []
    for step in range(1, steps + 1):
        labels = {"time": begin + step, "step": step, "generation": 0, "node": "node-0", "rank": 0}
        measured = {"run_loss": 10.0 / step, "run_step_seconds": 1.0, "run_tokens_per_second": 8000.0}
        metrics.append(json.dumps({**labels, **measured}))
        ledger.append(json.dumps({**labels, "seconds": {"productive": 1.0}}))
    run.metrics_path("node-0").write_text("\n".join(metrics) + "\n")
    run.ledger_path("node-0").write_text("\n".join(ledger) + "\n")
    run.mark("DONE")


def small_job(folder: Path, name: str, copies: int = 1) -> Job:
    """Write a job whose code folder is stored with each of its runs."""
    what = f"name: {name}\nkind: command\ncommand: [sleep, '60']\ncluster: local x 2\n"
    folder.mkdir(parents=True, exist_ok=True)
    return parse_job(f"{what}run: {{on: slurm, copies: {copies}}}\n", folder=folder)


def start_waiting_runs(root: Path, count: int) -> None:
    job = small_job(root.parent / "job", "waits", count)
    start_copies(draft_run(job, root / job.name), root)


def copy_repository(folder: Path) -> str:
    """Copy the files that git lists in this repository to a working directory; return their number and size."""
    here = Path(__file__).parent.parent
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=here, check=True, capture_output=True, text=True).stdout
    files = [name for name in listed.split("\0") if (here / name).is_file()]
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(here / name, folder / name)
    size = sum((folder / name).stat().st_size for name in files)
    return f"{len(files):,} files, {size / 1e6:.1f} MB,"


def timed_submissions(root: Path, code: Path) -> str:
    """Return medians of wall time and CPU time, without sbatch's own time."""
    found = [submit(root, code, number) for number in range(TIMES + 1)]
    (first_clock, first_processors), *again = [(1e3 * clock, 1e3 * processors) for clock, processors in found]
    clock, processors = (statistics.median(values) for values in zip(*again, strict=True))
    return (
        f"{clock:.0f} ms without sbatch ({processors:.0f} ms of CPU time), "
        f"the first time {first_clock:.0f} ms ({first_processors:.0f} ms)"
    )


def submit(root: Path, code: Path, number: int) -> tuple[float, float]:
    """Return the wall time from a draft to a run with a job ID, minus that of sbatch alone with the same script, and
    the CPU time of this process."""
    job = small_job(code, f"new-{number}")
    draft = draft_run(job, root / job.name, port=free_port())
    begin, used = time.perf_counter(), time.process_time()
    run = start_run(draft, root)
    started, spent = time.perf_counter(), time.process_time() - used
    subprocess.run(["sbatch", "--parsable", run.path / SCRIPT_FILE], check=True, capture_output=True)
    return 2 * started - begin - time.perf_counter(), spent


def timed_ps(root: Path) -> str:
    """Return medians of wall time and CPU time, which depends less on other load, and the first time, when the ledgers
    of ended runs are summed up."""
    first, *others = (ps_seconds(root) for _ in range(TIMES + 1))
    clock, processors = (statistics.median(times) for times in zip(*others, strict=True))
    return f"{clock:.2f} s ({processors:.2f} s of CPU time), the first time {first[0]:.2f} s"


def ps_seconds(root: Path) -> tuple[float, float]:
    """Return wall time and CPU time of one `craton ps`."""
    environment = {**os.environ, "CRATON_RUNS": str(root)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed command has its bytecode
    used, begin = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "craton", "ps"], check=True, capture_output=True, env=environment)
    clock, now = time.perf_counter() - begin, os.times()
    return clock, now.children_user + now.children_system - used.children_user - used.children_system


if __name__ == "__main__":
    main()
