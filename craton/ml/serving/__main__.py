"""One rank of a server: `python -m craton.ml.serving RUN`, started by the node's agent.

Rank 0 runs the engine and starts the HTTP front end, which listens at once and reports that the model is loading. The
other ranks of a tensor-parallel engine execute the orders of rank 0. Exit status 0: drained. An error that a restart
cannot fix (a missing model, too little memory, a port in use) ends the run with its reason.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist

from craton.agent import newest_generation
from craton.agent.coordination import run_secret
from craton.agent.processes import EXIT_FINAL
from craton.errors import CratonError
from craton.job import Job, load_job
from craton.ml.serving.device import Adapters, EngineRank, Runner, Served, TensorParallelGroup, follow, load_served
from craton.ml.serving.engine import (
    EngineProcess,
    Latencies,
    PlannedSteps,
    Rates,
    build_runner,
    join_engine,
    measured_machine,
    tell_failure,
)
from craton.ml.serving.forked_front import FRONT_MODULE, ForkedFront
from craton.ml.serving.grammar import Grammars
from craton.ml.serving.heartbeat import EngineHeartbeat, patience_of
from craton.ml.serving.messages import Stats
from craton.ml.serving.settings import EngineSettings
from craton.ml.serving.wire import MessageLine, WireError
from craton.ml.store import join_group_of_environment, leave_group
from craton.planning.serving import ServedModel, draft_steps, own_steps, speculation_costs
from craton.telemetry import RunDirectory
from craton.telemetry.error_reports import report_exception
from craton.telemetry.files import protect_output
from craton.telemetry.rank import Recorder, own_page

TOOL_STYLES = {"off": "none", "llama3": "llama3_json", "qwen3": "hermes", "qwen3-coder": "qwen3_coder"}
REASONING_STYLES = {"off": "none"}
# Of `serve:`, for the front end.
FRONT_KEYS = ("host", "strategy", "strategies", "verifiers", "verify", "memory", "reward_memory", "precision")
FRONT_EXIT_SECONDS = 10.0
RANK_BYTES = 4  # size of the rank number that a rank sends first
PORT_SECONDS = 10.0  # that a front end waits for its port after a restart: the one before it ends in its own time
FRONT_REFUSES = 2  # exit status of a front end that cannot start


@dataclass
class LoadProgress:
    """Whether the server was ready once: an error before that is final, a later one is worth a restart."""

    is_ready: bool = False


@dataclass(frozen=True)
class Front:
    """The front end's process and the connection to it."""

    process: subprocess.Popen[bytes] | ForkedFront
    line: MessageLine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this rank; return the exit status."""
    (folder,) = sys.argv[1:] if arguments is None else arguments
    run = RunDirectory(folder)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    recorder = Recorder.from_environment(run)
    front: Front | None = None
    signal.signal(signal.SIGTERM, _stop_loading)
    progress = LoadProgress()
    try:
        job = load_job(run.job_path)
        front = start_front(job, run) if rank == 0 else None
        return serve(job, run, rank, world, recorder, front, progress)
    except SystemExit:  # of `_stop_loading`
        return 0
    except (CratonError, torch.OutOfMemoryError) as error:
        reason = _in_words(error)
        recorder.event("failed", step=0, reason=reason, error=report_exception(error).to_fields())
        print(f"error: {reason}", file=sys.stderr, flush=True)
        if front is not None:
            tell_failure(front.line, reason)
        return 1 if progress.is_ready else EXIT_FINAL
    except Exception as error:  # noqa: BLE001 -- report any error to waiting clients; the agent restarts the rank
        report = report_exception(error)
        recorder.event("failed", step=0, reason=report.line, error=report.to_fields())
        traceback.print_exc()
        if front is not None:
            tell_failure(front.line, f"the engine failed: {type(error).__name__}: {error}")
        return 1
    finally:
        gc.unfreeze()  # frozen objects are not collected at exit, and extension modules report them as leaked
        if front is not None:
            _end(front)


def serve(
    job: Job,
    run: RunDirectory,
    rank: int,
    world: int,
    recorder: Recorder,
    front: Front | None,
    progress: LoadProgress,
) -> int:
    """Load the model and serve it until the front end is drained."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else _cpu()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        recorder.event("serving", stage="connecting", ranks=world)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        join_group_of_environment(backend, run_secret(run), rank, world)
    recorder.event("serving", stage="loading weights")
    served = load_served(job, device)
    planned = _planned_steps(job, served, device)  # before the KV cache takes the memory that the measurement needs
    if front is not None and front.process.poll() is not None:
        return _status(front)
    recorder.event("serving", stage="preparing the engine")
    settings = settings_of(job, world)
    adapters = None
    if settings.adapter_slots:
        adapters = Adapters(served.model, settings.adapter_slots, settings.adapter_rank)
    runner, settings, max_length = build_runner(served.model, settings, served.peers, adapters, served.draft)
    secret = run_secret(run)
    this = EngineRank(runner, adapters, rank, secret)
    slots = {name: this.load_adapter(name, path) for name, path in settings.adapters.items()}
    tokens = (len(runner.past.cache) - 1) * settings.page
    patience_seconds = patience_of(planned.model, settings, tokens)
    if rank:
        line = _line_to_first(secret)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on it ends with rank 0, which drains
        if follow(this, line, EngineHeartbeat(own_page(), patience_seconds)):
            _leave_group(runner)
        else:
            print("rank 0 of the tensor-parallel group is lost; this rank ends with it", file=sys.stderr, flush=True)
        return 0
    assert front is not None
    group = TensorParallelGroup(this, _lines_to_others(world, secret))
    grammars = _grammars(served, runner.vocabulary)
    costs = None
    if planned.draft is not None:
        costs = speculation_costs(planned.model, planned.draft, is_cpu=device.type == "cpu")
    rates = Rates(planned)
    engine = join_engine(group, runner, settings, max_length, served.stop_tokens, grammars, slots, rates, costs)
    group.watch(lambda number: _lost(number, front))
    recorder.event("serving", stage="ready", kv_tokens=tokens, max_length=max_length)
    # These objects live as long as the process: freezing them keeps garbage collection during decode short.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGTERM, lambda _number, _frame: front.process.terminate())
    progress.is_ready = True
    heartbeat = EngineHeartbeat(own_page(), patience_seconds)
    EngineProcess(job.served_name, engine, group, front.line, heartbeat, _recording(recorder, run)).run()
    group.close()
    _leave_group(runner)
    if grammars is not None:
        grammars.close()
    return _status(front)


def settings_of(job: Job, world: int = 1) -> EngineSettings:
    serve = job.serve
    assert serve is not None
    return EngineSettings(
        max_length=serve.max_length or 0,
        max_running=serve.running,
        chunk_tokens=serve.step_tokens,
        page=serve.page,
        memory=serve.memory,
        host_bytes=serve.host_memory // world,
        kv_precision=serve.kv_precision,
        backend=serve.backend,
        shared_prefix=serve.shared_prefix,
        draft_tokens=serve.draft_tokens,
        draft_auto=serve.draft_auto,
        adapters=serve.adapters,
        adapter_slots=serve.adapter_slots,
        adapter_rank=serve.max_adapter_rank or EngineSettings.adapter_rank,
    )


def start_front(job: Job, run: RunDirectory) -> Front:
    """Start the front end, which listens at once and answers that the model is loading."""
    serve = job.serve
    assert serve is not None
    ours, theirs = socket.socketpair()
    tokenizer = _front_folder(job)
    command = [
        *(sys.executable, "-m", "craton.ml.serving.server", "--connection", str(theirs.fileno())),
        *("--host", serve.host, "--port", str(serve.port), "--served-name", job.served_name),
        *("--tool-parser", TOOL_STYLES.get(serve.tool_parser, serve.tool_parser)),
        *("--reasoning-parser", REASONING_STYLES.get(serve.reasoning_parser, serve.reasoning_parser)),
        *("--drain-seconds", str(serve.drain)),
    ]
    command += ["--strategies", json.dumps(serve.model_dump(mode="json", include=set(FRONT_KEYS)))]
    if int(os.environ.get("CRATON_GENERATION", "0")):
        command += ["--port-seconds", str(PORT_SECONDS)]
    if tokenizer is not None:
        command += ["--model-folder", str(tokenizer)]
    if serve.max_waiting is not None:
        command += ["--max-waiting", str(serve.max_waiting)]
    environment = dict(os.environ)
    if serve.admin:
        command.append("--admin")
        if serve.admin_key is None:
            command += ["--admin-key-file", str(run.admin_key_path)]
        else:
            environment["CRATON_ADMIN_KEY"] = os.environ.get(serve.admin_key, "")
            command += ["--admin-key-of", serve.admin_key]
    if serve.api_keys is not None:
        environment["CRATON_API_KEYS"] = os.environ.get(serve.api_keys, "")
        command += ["--keys-of", serve.api_keys]
    if FRONT_MODULE in sys.modules:  # of the fork server
        forked = ForkedFront.start(command[3:], environment, ours)
        theirs.close()
        return Front(forked, MessageLine(Connection(ours.detach())))
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
    theirs.close()
    return Front(process, MessageLine(Connection(ours.detach())))


def _front_folder(job: Job) -> Path | None:
    from craton.ml.export import open_run

    with contextlib.suppress(CratonError):
        if job.trained_run is not None:
            return open_run(str(job.trained_run)).tokenizer_folder()
    return None if job.trained_run is not None else job.weights_folder


def _stop_loading(_number: int, _frame: FrameType | None) -> None:
    """Exit at once: there is nothing to drain yet."""
    raise SystemExit(0)


def _status(front: Front) -> int:
    """Return the rank's exit status for the front end's: bad options or a port in use are final."""
    code = front.process.wait(FRONT_EXIT_SECONDS)
    return EXIT_FINAL if code == FRONT_REFUSES else int(code != 0)


def _end(front: Front) -> None:
    front.line.close()
    front.process.terminate()
    try:
        front.process.wait(FRONT_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        front.process.kill()
        front.process.wait()


def _lost(number: int, front: Front) -> None:
    """Report the lost rank and exit: this rank may hang in a collective."""
    reason = f"rank {number} of the tensor-parallel group is lost; the server restarts"
    print(f"error: {reason}", file=sys.stderr, flush=True)
    tell_failure(front.line, reason)
    with contextlib.suppress(subprocess.TimeoutExpired):
        front.process.wait(FRONT_EXIT_SECONDS)
    front.process.kill()
    os._exit(1)


def _leave_group(runner: Runner) -> None:
    """Leave the process group. NCCL waits until all CUDA graphs that captured its collectives are gone."""
    runner.drop_graphs()
    leave_group()


def _exit(status: int) -> NoReturn:
    """Exit. A rank that has not left its process group, after an error, does not destroy it: NCCL would wait for ranks
    that are gone, and for CUDA graphs that captured its collectives."""
    if dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _lines_to_others(world: int, secret: bytes) -> list[Connection]:
    if world == 1:
        return []
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with Listener((host, 0), authkey=secret) as listener:
        address = listener.address
        assert isinstance(address, tuple)
        dist.broadcast(torch.tensor([address[1]]), src=0)
        lines: dict[int, Connection] = {}
        while len(lines) < world - 1:
            try:
                line = listener.accept()
            except (AuthenticationError, EOFError, ConnectionError):  # a client without the key
                continue
            number = int.from_bytes(line.recv_bytes(RANK_BYTES), "little")
            if not 0 < number < world or number in lines:
                raise WireError(f"unexpected connection from rank {number} in a tensor-parallel group of {world}")
            lines[number] = line
    return [lines[number] for number in sorted(lines)]


def _line_to_first(secret: bytes) -> Connection:
    port = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(port, src=0)
    line = Client((os.environ.get("MASTER_ADDR", "127.0.0.1"), int(port)), authkey=secret)
    line.send_bytes(dist.get_rank().to_bytes(RANK_BYTES, "little"))
    return line


def _planned_steps(job: Job, served: Served, device: torch.device) -> PlannedSteps:
    """Return the step times of this job on this machine, by the profile of Craton's engine."""
    serve = job.serve
    assert serve is not None
    ranks = 1 if served.peers is None else served.peers.size
    machine = measured_machine(device, next(served.model.norm.parameters()).dtype, ranks)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    ep = job.served_layout.ep
    model = ServedModel(served.model.config.shape, serve.precision, serve.kv_precision, ranks, ep)
    steps = own_steps(model, machine, step_tokens=serve.step_tokens, max_running=serve.running)
    draft = None
    if served.draft is not None:
        draft = draft_steps(ServedModel(served.draft.config.shape, job.draft_precision, serve.kv_precision), machine)
    return PlannedSteps(steps, draft)


def _grammars(served: Served, vocabulary: int) -> Grammars | None:
    if served.tokenizer_folder is None:
        return None
    return Grammars(served.tokenizer_folder, vocabulary, served.stop_tokens)


def _recording(recorder: Recorder, run: RunDirectory) -> Callable[[Stats, Latencies], None]:
    """Return the callback that records the engine's statistics as run metrics, beside the plan's.

    Steps continue from the generation before: a server that computes again has recovered from its failure."""
    newest = newest_generation(run)
    before = newest.reached if newest is not None else 0
    page = own_page()
    recorded = -1

    def record(stats: Stats, latencies: Latencies) -> None:
        nonlocal recorded
        if stats.steps == recorded:
            return
        recorded = stats.steps
        if page is not None:
            page.step, page.step_seconds = before + stats.steps, stats.step_seconds
        recorder.metrics(
            before + stats.steps,
            run_step_seconds=stats.step_seconds,
            plan_step_seconds=stats.plan_step_seconds,
            run_tokens_per_second=stats.tokens_per_second,
            serve_roofline=stats.roofline,
            serve_running=stats.running,
            serve_waiting=stats.waiting,
            serve_kv_share=stats.blocks_used / stats.blocks if stats.blocks else 0.0,
            serve_preemptions=stats.preemptions,
            serve_ended=stats.ended,
            serve_aborted=stats.aborted,
            serve_failed=stats.failed,
            **_draft_metrics(stats),
            **({"serve_prefix_hit_share": stats.prefix_hits / stats.prefix_queries} if stats.prefix_queries else {}),
            **_latency_metrics(latencies),
        )

    return record


def _draft_metrics(stats: Stats) -> dict[str, float]:
    if not stats.drafts:
        return {}
    metrics = {
        "serve_draft_accepted_share": stats.accepted / stats.drafted,
        "serve_draft_mean_length": 1 + stats.accepted / stats.drafts,
        "serve_draft_tokens": stats.draft_tokens,
    }
    if stats.draft_acceptance:
        metrics |= {"serve_draft_acceptance": stats.draft_acceptance, "serve_draft_speedup": stats.draft_speedup}
    return metrics


def _latency_metrics(latencies: Latencies) -> dict[str, float]:
    result: dict[str, float] = {}
    for name, (median, p95) in latencies.quantiles(time.monotonic()).items():
        result |= {f"serve_{name}_seconds": median, f"serve_{name}_seconds_p95": p95}
    return result


def _in_words(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"out of device memory ({str(error).splitlines()[0]}); lower serve.max_running, serve.chunk_tokens or "
            "serve.memory, serve in fp8, or use more GPUs (tp)"
        )
    return str(error)


def _cpu() -> torch.device:
    return torch.device("cpu")


if __name__ == "__main__":
    protect_output()
    _exit(main())
