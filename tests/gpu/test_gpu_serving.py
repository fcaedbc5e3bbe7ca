"""Tensor-parallel servers over NCCL: 2 and 4 ranks that share one GPU answer as one rank does, also where they split
the experts of a mixture.

Agents, ranks and front ends are real. `observed_rank.py` puts all ranks on one GPU and prints what their CUDA graphs
do. Where ranks are killed, they take turns on the GPU (no MPS: after a kill, its other clients stay slow).
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
import torch
from listeners import listeners_of, processes_with
from rehearsed import events, wait_until

from craton.agent import Launch, newest_generation, write_launch
from craton.agent.coordination import run_secret
from craton.agent.processes import free_port
from craton.job import dump_job, parse_job
from craton.job.model import ModelShape
from craton.ml.data import load_tokenizer
from craton.ml.data.tokenizer import train_bpe
from craton.ml.models import Decoder, DecoderConfig, config_from_huggingface, load_weights, save_folder
from craton.ml.serving.device.graphs import graph_sizes
from craton.ml.serving.device.prompt_graphs import token_counts
from craton.ml.serving.device.weights import send_weights
from craton.orchestration import agent_command, kill_agents, living_agents, start_agents
from craton.telemetry import RunDirectory

RANK_PROGRAM = Path(__file__).with_name("observed_rank.py")
VOCABULARY = 512
LAYERS = 2
LAYER_COLLECTIVES = 4  # two all-gathers and two reduce-scatters
MAX_LENGTH = 256
MAX_RUNNING = 16
CHUNK_TOKENS = 128  # shorter than some prompts: their prefill is chunked
SHAPE = ModelShape("tiny", LAYERS, 256, 512, 8, 4, 64, VOCABULARY, max_sequence=MAX_LENGTH)
MIXTURE = replace(SHAPE, name="tiny-moe", experts=8, top_k=2, moe_ffn_hidden=256)
PROMPT_LENGTHS = (3, 17, 26, 40, 64, 90, 121, 150, 180, 9, 33, 77)
WRITTEN, FEW = 48, 8  # tokens of an answer
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
DRAIN_SECONDS = 5
START_SECONDS = 120.0  # a server needs a quarter of this
REQUEST_SECONDS = 120.0
FAILURE_SECONDS = 30.0  # for clients to get an error and old processes to end: less than PyTorch's watchdog waits
CAPTURED = re.compile(r"captured (\d+) CUDA graphs with (\d+) collectives")
REPLAYED = "replayed a CUDA graph"

_draw = random.Random(0)
PROMPTS = [[_draw.randrange(VOCABULARY) for _ in range(length)] for length in PROMPT_LENGTHS]


@dataclass(frozen=True)
class Graphs:
    """What a rank's CUDA graphs have done so far."""

    captured: int
    collectives: int  # in the captured ones
    replayed: int


@dataclass(frozen=True)
class Server:
    run: RunDirectory
    port: int
    tp: int

    def wait_ready(self) -> None:
        what = f"{self.run.name} is ready"
        wait_until(lambda: self._is_ready() or self.run.has("FATAL"), what, self.run, START_SECONDS)
        assert not self.run.has("FATAL"), self.run.marker_text("FATAL")

    def complete(self, prompts: list[list[int]], count: int = WRITTEN) -> list[list[int]]:
        """Return the greedy tokens after each prompt; all prompts are one batch."""
        reply = self._read(self.post("/v1/completions", {"prompt": prompts, "max_tokens": count, **GREEDY}))
        return [choice["token_ids"] for choice in reply["choices"]]

    def admin(self, path: str, **body: Any) -> Any:
        key = self.run.admin_key_path.read_text(encoding="ascii").strip()
        return self._read(self.post(path, body, {"Authorization": f"Bearer {key}"}))

    def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> HTTPResponse:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_SECONDS)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
        return connection.getresponse()

    def graphs(self) -> list[Graphs]:
        """Return what the graphs of each rank have done, from their logs."""
        found = []
        for rank in range(self.tp):
            text = self.run.log_path(rank).read_text(encoding="utf-8", errors="replace")
            captures = CAPTURED.findall(text)
            graphs, collectives = (sum(int(numbers[index]) for numbers in captures) for index in (0, 1))
            found.append(Graphs(graphs, collectives, text.count(REPLAYED)))
        return found

    def rank_pids(self) -> dict[int, int]:
        return {event["rank"]: event["pid"] for event in events(self.run, "rank_started")}

    def processes(self) -> set[int]:
        """Return its ranks and front end."""
        return set(processes_with(self.run.path)) - {agent.pid for agent in living_agents(self.run)}

    def _is_ready(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_SECONDS)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def _read(self, response: HTTPResponse) -> Any:
        text = response.read().decode()
        assert response.status == 200, text
        return json.loads(text)


class Stream(threading.Thread):
    """A client that reads an answer while it is generated, to its end or to an error."""

    def __init__(self, server: Server, prompt: list[int]) -> None:
        super().__init__(daemon=True)
        self.chunks: list[str] = []
        self._server = server
        self._body = {"prompt": prompt, "max_tokens": MAX_LENGTH - len(prompt), "stream": True, **GREEDY}
        self.start()

    def run(self) -> None:
        with suppress(OSError, HTTPException):  # the connection breaks if the front end is killed
            for line in self._server.post("/v1/completions", self._body):
                if line.startswith(b"data: {"):
                    self.chunks.append(line.decode())

    @property
    def is_complete(self) -> bool:
        return any('"finish_reason":"length"' in chunk for chunk in self.chunks)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two sets of weights of one small model, and of another one with experts."""
    root = tmp_path_factory.mktemp("models")
    train_bpe(Path(__file__).read_text(encoding="utf-8").splitlines(), VOCABULARY, root / "tokenizer")
    assert load_tokenizer(root / "tokenizer").get_vocab_size() == VOCABULARY
    found = {}
    kinds = {"old": (SHAPE, 0), "new": (SHAPE, 1), "experts": (MIXTURE, 0), "new experts": (MIXTURE, 1)}
    for name, (shape, seed) in kinds.items():
        # Wide enough that greedy answers do not end in one repeated token.
        model = Decoder(DecoderConfig(shape, initializer_range=0.1)).requires_grad_(False)
        model.initialize(seed)
        found[name] = save_folder(model.state_dict(), model.config, root / name, root / "tokenizer", torch.float32)
    return found


@pytest.fixture(scope="module")
def servers(
    mps: bool, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """Servers that all start at the same time: one rank with either weights, 2 and 4 ranks with the old ones."""
    root = tmp_path_factory.mktemp("runs")
    wanted = {"one": ("old", 1), "one-new": ("new", 1), "tp-2": ("old", 2), "tp-4": ("old", 4)}
    with ExitStack() as stack:
        found = {
            name: stack.enter_context(serving(root, name, models[weights], tp))
            for name, (weights, tp) in wanted.items()
        }
        for server in found.values():
            server.wait_ready()
        yield found


@pytest.fixture(scope="module")
def answers(servers: dict[str, Server]) -> dict[str, list[list[int]]]:
    """What one rank answers with the old and with the new weights."""
    found = {"old": servers["one"].complete(PROMPTS), "new": servers["one-new"].complete(PROMPTS)}
    for tokens in found.values():
        assert [len(answer) for answer in tokens] == [WRITTEN] * len(PROMPTS)
        assert len({tuple(answer) for answer in tokens}) > len(PROMPTS) // 2, "answers depend on their prompts"
    assert found["old"] != found["new"]
    return found


@contextmanager
def serving(root: Path, name: str, folder: Path, tp: int, ep: int = 1, precision: str = "fp32") -> Iterator[Server]:
    """Start a server of one node whose ranks share the first GPU. Return at once; kill it at the end of the block."""
    port = free_port()
    job = parse_job(
        f"name: {name}\nkind: serve\nmodel: {folder}\ncluster: local\nlayout: {{tp: {tp}, ep: {ep}}}\n"
        f"serve: {{port: {port}, precision: {precision}, max_length: {MAX_LENGTH}, max_running: {MAX_RUNNING}, "
        f"chunk_tokens: {CHUNK_TOKENS}, admin: true, drain: {DRAIN_SECONDS}s}}\n"
    )
    run = RunDirectory.create(root, name)
    launch = Launch(
        generation=0,
        nodes=["node-0"],
        ranks_per_node=tp,
        command=[sys.executable, str(RANK_PROGRAM), str(run.path)],
        # NCCL takes ranks with different values for different hosts: they may share a GPU, and use loopback.
        env={"CUDA_VISIBLE_DEVICES": "0", "NCCL_HOSTID": "rank-{rank}", "NCCL_NET": "Socket"},
        master_port=free_port(),
        gpus=True,
        gpus_per_node=1,
        stop_grace_seconds=DRAIN_SECONDS + 15.0,  # as for every server
        early_seconds=0.0,
        tries=job.recover.tries,
        agent_command=agent_command(run.path),
    )
    run.job_path.write_text(dump_job(job), encoding="utf-8")
    write_launch(run, launch)
    start_agents(run, launch)
    try:
        yield Server(run, port, tp)
    finally:
        kill_agents(run)


def graphs_of_a_server(tp: int) -> int:
    """Each decode step also with shared prefixes, and the steps with prompts."""
    return 2 * len(graph_sizes(MAX_RUNNING, tp)) + len(token_counts(CHUNK_TOKENS, tp))


def expect_replays(server: Server, before: list[Graphs], steps: int) -> None:
    """Expect that every rank has replayed its graphs at least `steps` times since, and captured no others."""

    def is_done() -> bool:
        now = server.graphs()  # logs of other ranks may be a moment behind
        return len(set(now)) == 1 and now[0].replayed - before[0].replayed >= steps

    wait_until(is_done, f"all ranks replay {steps} graphs; before: {before}", server.run, FAILURE_SECONDS)
    now = server.graphs()[0]
    assert (now.captured, now.collectives) == (before[0].captured, before[0].collectives)


def break_and_wait(server: Server, victim: int, prompts: list[list[int]]) -> tuple[list[Stream], str]:
    """Kill a rank while clients read streams, and wait until the server is back. Return the streams and a line with
    the times."""
    old = server.processes()
    assert len(old) > server.tp, "its ranks and its front end"
    streams = [Stream(server, prompt) for prompt in prompts]
    wait_until(lambda: all(stream.chunks for stream in streams), "answers begin", server.run, REQUEST_SECONDS)
    began = time.monotonic()
    os.kill(server.rank_pids()[victim], signal.SIGKILL)
    wait_until(lambda: not any(stream.is_alive() for stream in streams), "streams end", server.run, FAILURE_SECONDS)
    streams_end = time.monotonic() - began
    wait_until(lambda: not old & server.processes(), "the old processes end", server.run, FAILURE_SECONDS)
    processes_end = time.monotonic() - began
    server.wait_ready()
    return streams, (
        f"tp {server.tp}, rank {victim} killed: clients had an error after {streams_end:.2f} s, the old processes were "
        f"gone after {processes_end:.2f} s, the server was ready after {time.monotonic() - began:.2f} s"
    )


def send(server: Server, folder: Path, version: int) -> None:
    """Send the weights of a folder to every rank of a server over the network, as a trainer does."""
    model = Decoder(config_from_huggingface(folder))
    load_weights(model, folder)
    weights = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    ports = free_ports(server.tp)
    with ThreadPoolExecutor(1) as pool:
        arguments = {"address": f"127.0.0.1:{ports[0]}", "wait_seconds": FAILURE_SECONDS}
        reply = pool.submit(server.admin, "/update_weights", **arguments)
        wait_until(
            lambda: set(ports) <= {port for _, port in listeners_of(server.processes())},
            "all ranks wait for weights",
            server.run,
            FAILURE_SECONDS,
        )
        send_weights([f"127.0.0.1:{port}" for port in ports], run_secret(server.run), weights, version)
        assert reply.result()["result"]["version"] == version


def free_ports(count: int) -> range:
    """Return consecutive ports that nothing listens on."""
    while True:
        first = free_port()
        with suppress(OSError), ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return range(first, first + count)


# First, so that no MPS daemon runs yet.
def test_a_killed_rank_ends_its_requests_and_the_server_comes_back(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, summary: Callable[[str], None]
) -> None:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    prompts = PROMPTS[:4]
    with serving(tmp_path, "killed", models["old"], tp=4) as server:
        server.wait_ready()
        expected = server.complete(prompts, FEW)
        for victim in (2, 0):
            streams, times = break_and_wait(server, victim, prompts)
            summary(times)
            assert not any(stream.is_complete for stream in streams)
            if victim:  # with rank 0 the front end is killed too, mostly before it can report anything
                reason = f"rank {victim} of the tensor-parallel group is lost"
                assert all(reason in stream.chunks[-1] for stream in streams), [stream.chunks[-1] for stream in streams]
            newest = newest_generation(server.run)
            assert newest is not None
            assert f"rank {victim} on node-0 was killed by SIGKILL" in newest.reason
            assert server.complete(prompts, FEW) == expected


@pytest.mark.parametrize("tp", [2, 4])
def test_tokens_are_those_of_one_rank(
    servers: dict[str, Server], answers: dict[str, list[list[int]]], summary: Callable[[str], None], tp: int
) -> None:
    server = servers[f"tp-{tp}"]
    before = server.graphs()
    num_graphs = graphs_of_a_server(tp)
    for graphs in before:
        assert graphs.captured == num_graphs
        assert graphs.collectives >= num_graphs * LAYERS * LAYER_COLLECTIVES
    began = time.monotonic()
    assert server.complete(PROMPTS) == answers["old"]
    summary(f"tp {tp}: {len(PROMPTS)} answers of {WRITTEN} tokens in {time.monotonic() - began:.2f} s")
    assert server.complete(PROMPTS[:1]) == answers["old"][:1], "alone, in the smallest graph"
    expect_replays(server, before, 2 * (WRITTEN - 1))


def test_weights_are_updated_in_place(
    servers: dict[str, Server], answers: dict[str, list[list[int]]], models: dict[str, Path]
) -> None:
    server = servers["tp-2"]
    before = server.graphs()
    assert server.admin("/update_weights", folder=str(models["new"]))["result"]["version"] == 1
    assert server.complete(PROMPTS) == answers["new"]
    send(server, models["old"], version=7)
    assert server.complete(PROMPTS) == answers["old"]
    expect_replays(server, before, 2 * (WRITTEN - 1))


def test_a_server_that_slept_captures_its_graphs_again(
    servers: dict[str, Server], answers: dict[str, list[list[int]]]
) -> None:
    server = servers["tp-4"]
    before = server.graphs()
    server.admin("/sleep")
    server.admin("/wake_up")
    captured = [graphs.captured + graphs_of_a_server(server.tp) for graphs in before]
    wait_until(
        lambda: [graphs.captured for graphs in server.graphs()] == captured,
        "every rank captures its graphs again",
        server.run,
        FAILURE_SECONDS,
    )
    awake = server.graphs()
    assert server.complete(PROMPTS) == answers["old"]
    expect_replays(server, awake, WRITTEN - 1)


def test_a_stop_ends_every_rank(servers: dict[str, Server]) -> None:
    """The last test of the servers that the tests above share."""
    for server in servers.values():
        server.run.mark("STOP", "the test stops it")
    for server in servers.values():
        _expect_stopped(server)


SPLITS = {"ep-2": (2, 2), "ep-4": (4, 4), "tp-4-ep-2": (4, 2)}  # tp, ep


@pytest.fixture(scope="module")
def splitting(
    mps: bool, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """Servers of a mixture: one rank with either weights, and ranks that split its experts."""
    root = tmp_path_factory.mktemp("splitting")
    wanted = {"one": ("experts", 1, 1), "one-new": ("new experts", 1, 1)}
    wanted |= {name: ("experts", *sizes) for name, sizes in SPLITS.items()}
    with ExitStack() as stack:
        found = {
            name: stack.enter_context(serving(root, name, models[weights], tp, ep))
            for name, (weights, tp, ep) in wanted.items()
        }
        for server in found.values():
            server.wait_ready()
        yield found


@pytest.mark.parametrize("name", SPLITS)
def test_ranks_that_split_experts_answer_as_one_rank(splitting: dict[str, Server], name: str) -> None:
    wanted = splitting["one"].complete(PROMPTS)
    assert len({tuple(answer) for answer in wanted}) > len(PROMPTS) // 2, "answers depend on their prompts"
    assert splitting[name].complete(PROMPTS) == wanted
    assert splitting[name].complete(PROMPTS[:1]) == wanted[:1], "alone: most ranks have no row"


def test_split_experts_sleep_and_are_updated(splitting: dict[str, Server], models: dict[str, Path]) -> None:
    old, new = splitting["one"].complete(PROMPTS), splitting["one-new"].complete(PROMPTS)
    assert old != new
    server = splitting["ep-4"]
    server.admin("/sleep")
    server.admin("/wake_up")
    assert server.complete(PROMPTS) == old
    server.admin("/update_weights", folder=str(models["new experts"]))
    assert server.complete(PROMPTS) == new
    send(server, models["experts"], version=7)
    assert server.complete(PROMPTS) == old


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_decode_with_split_experts_is_a_cuda_graph(
    mps: bool, models: dict[str, Path], tmp_path: Path, precision: str
) -> None:
    """In fp32 the grouped matmuls of experts are not captured. Sums of two ranks round otherwise than a sum on one, so
    the likeliest token may differ; first tokens mostly agree."""
    with ExitStack() as stack:
        whole, split = (
            stack.enter_context(serving(tmp_path, f"{precision}-{ep}", models["experts"], 2, ep, precision))
            for ep in (1, 2)
        )
        whole.wait_ready()
        split.wait_ready()
        before = split.graphs()
        num_graphs = graphs_of_a_server(2)
        for graphs in before:
            assert graphs.captured == num_graphs
            assert graphs.collectives >= num_graphs * LAYERS * LAYER_COLLECTIVES
        wanted, found = (server.complete(PROMPTS) for server in (whole, split))
        expect_replays(split, before, WRITTEN - 1)
        same = sum(answer[0] == expected[0] for answer, expected in zip(found, wanted, strict=True))
        assert same > len(PROMPTS) // 2


def _expect_stopped(server: Server) -> None:
    run = server.run
    wait_until(lambda: not living_agents(run), f"{run.name} stops", run, FAILURE_SECONDS)
    assert not run.has("FATAL"), run.marker_text("FATAL")
    codes = {event["rank"]: event["code"] for event in events(run, "rank_ended")}
    assert codes == dict.fromkeys(range(server.tp), 0)
    assert not server.processes()
