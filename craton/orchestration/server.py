"""A server from outside: the job of `craton serve`, its port, and its state.

A server is observed as by its users, over HTTP: `/health` for readiness, `/metrics` for load, with vLLM's metric names.
Its startup stages are in the run's `serving` events.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import re
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from craton.agent.processes import free_port
from craton.errors import CratonError
from craton.http_guard import is_loopback
from craton.job import Job, load_job, make_job
from craton.job.document import is_name
from craton.orchestration.backend import read_submission
from craton.orchestration.errors import RunStateError, StartError
from craton.orchestration.histograms import LatencyHistogram, histogram_quantile, read_latencies
from craton.orchestration.local import living_agents
from craton.orchestration.watching import is_server
from craton.printable import printable_line
from craton.telemetry import RunDirectory, list_runs, read_json
from craton.telemetry.files import paths_in, read_lines
from craton.telemetry.members import with_members
from craton.telemetry.node import read_heartbeat

ANSWER_SECONDS = 2.0  # a server that takes longer counts as not responding
RATE_SECONDS = 5.0  # window of tokens per second
MEDIAN_SECONDS = 60.0  # window of the median time to first token
RESTING = ("paused", "asleep", "without weights")  # states of a loaded server that computes nothing
MAX_REFUSAL = 200  # characters
EVENT, READY = "serving", "ready"  # the event of startup stages; the last stage

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # wildcard address → address on this machine

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
GENERATED, FIRST_TOKEN = "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_bucket"
KV_SHARE, PREEMPTIONS = "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"
REFUSED = "craton_serve_recently_refused"
STALL = "craton_serve_longest_stall_seconds"
ADMIN = "craton_serve_admin_request_seconds"

Buckets = tuple[tuple[float, float], ...]  # (upper bound in seconds, cumulative requests), the last bound infinite


def serve_job(
    model: str,
    *,
    name: str,
    cluster: str = "local",
    tp: int | None = None,
    ep: int | None = None,
    settings: Mapping[str, object] | None = None,
    folder: Path | str = ".",
) -> Job:
    """Return a job of kind serve for a model; `settings` are keys of its `serve:` section."""
    sizes = {name: size for name, size in {"tp": tp, "ep": ep}.items() if size is not None}
    layout: object = sizes or "auto"
    section = dict(settings or {})
    return make_job(
        {"name": name, "kind": "serve", "model": model, "serve": section, "cluster": cluster, "layout": layout}, folder
    )


def server_name(model: str, root: Path) -> str:
    """Return an unused run name for this model's server: serve-llama-3.1-8b, then serve-llama-3.1-8b-2."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", model.rstrip("/").rpartition("/")[2])[:50].strip("-._")
    name = f"serve-{stem}" if stem else "serve"
    assert is_name(name), name
    number, result = 2, name
    while (root / result).exists():
        result, number = f"{name}-{number}", number + 1
    return result


@dataclass(frozen=True)
class ServerAddress:
    """The address that a server listens on."""

    host: str
    port: int

    @property
    def reached_at(self) -> str:
        """The host to connect to from this machine; a wildcard address becomes loopback."""
        return EVERYWHERE.get(self.host, self.host)

    @property
    def url(self) -> str:
        host = self.reached_at
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def address_of(job: Job) -> ServerAddress:
    assert job.serve is not None, f"kind {job.kind} does not serve"
    return ServerAddress(job.serve.host, job.serve.port)


def server_of(run: RunDirectory) -> ServerAddress:
    """Return the address at which this machine reaches a run's server, on the node with a live agent. RunStateError
    says why it is unreachable from here."""
    listens = address_of(load_job(run.job_path))
    beats = [read_heartbeat(run, str(node)) for node in read_json(run.launch_path).get("nodes") or []]
    alive = next((beat for beat in beats if beat and beat.state == "running" and not beat.is_lost()), None)
    if alive is None and read_submission(run).on != "local":
        raise RunStateError("its server cannot be reached: none of its nodes has a recent heartbeat")
    if alive is None or alive.host in ("", socket.gethostname()):
        return listens
    if is_loopback(listens.host):
        raise RunStateError(
            f"its server listens only on {listens.host} of {alive.host} and cannot be reached from here; "
            "`serve: {host: 0.0.0.0}` in its job file opens it to the network"
        )
    if listens.host not in EVERYWHERE:
        return listens
    node = alive.address.rpartition(":")[0].strip("[]")
    return ServerAddress(alive.host if not node or is_loopback(node) else node, listens.port)


def check_port(job: Job) -> None:
    """Refuse an unusable host or port before a model is loaded."""
    address, where = address_of(job), job.where("serve", "port")
    try:
        kind, _, _, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen()
    except socket.gaierror as error:
        raise StartError(f"{where}host {address.host!r} cannot be resolved: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            owner = _run_at(address.port)
            whose = f" by the run {owner.name} (`craton stop {owner.name}` ends it)" if owner else ""
            raise StartError(
                f"{where}port {address.port} of {address.host} is in use{whose}; a free port is {free_port()} "
                "(serve.port, or --port)"
            ) from None
        raise StartError(
            f"{where}cannot listen on {address.host}:{address.port}: {error.strerror}; set another serve.host or "
            "serve.port"
        ) from None


def _run_at(port: int) -> RunDirectory | None:
    """Return the run whose server uses this port, or None."""
    for run in with_members(list_runs()):
        try:
            if is_server(run) and living_agents(run) and address_of(load_job(run.job_path)).port == port:
                return run
        except (CratonError, OSError):  # skip a broken run
            continue
    return None


@dataclass(frozen=True)
class ServerState:
    """A server's state at one moment; None: no data."""

    running: int
    waiting: int
    tokens_per_second: float | None  # generated
    first_token_seconds: float | None  # recent median, else since the start
    kv_share: float | None = None  # KV cache usage of the fullest engine
    preemptions: int = 0  # since the start
    refused: int = 0  # requests that it answered with 429 in the last half minute
    stall_seconds: float = 0.0  # for which a running request has got no token
    admin_seconds: float = 0.0  # for which its engine has worked on an admin request; 0: there is none
    latencies: dict[str, LatencyHistogram] = field(default_factory=dict)  # of LATENCY_METRICS, since the start


@dataclass(frozen=True)
class _Look:
    moment: float
    running: int
    waiting: int
    generated: float
    first_tokens: Buckets
    kv_share: float | None
    preemptions: int
    refused: int
    stall_seconds: float
    admin_seconds: float
    latencies: dict[str, LatencyHistogram]


class ServerWatch:
    """Poll one server."""

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        self._looks: deque[_Look] = deque()

    def is_ready(self) -> bool:
        """Whether the server accepts requests."""
        return _get(self.address, "/health")[0] == http.client.OK

    def refusal(self) -> str:
        """Return why the server computes nothing although it is loaded: it is paused, asleep or has no weights."""
        status, text = _get(self.address, "/health")
        if status in (0, http.client.OK):
            return ""
        with contextlib.suppress(ValueError):
            document = json.loads(text)
            if isinstance(document, dict) and document.get("status") in RESTING:
                return printable_line(str(document.get("reason") or document["status"]))[:MAX_REFUSAL]
        return ""

    def responds(self) -> bool:
        """Whether the server answers at all, ready or not."""
        return _get(self.address, "/health")[0] != 0

    def look(self) -> ServerState | None:
        """Return the server's state; None if it does not respond."""
        status, text = _get(self.address, "/metrics")
        if status != http.client.OK:
            return None
        return self.take(text, time.monotonic())

    def take(self, metrics: str, moment: float) -> ServerState:
        """Compute the state from metrics read at this moment and those read before."""
        new = _read_metrics(metrics, moment)
        if self._looks and new.generated < self._looks[-1].generated:  # it was restarted
            self._looks.clear()
        self._looks.append(new)
        while moment - self._looks[0].moment > MEDIAN_SECONDS:
            self._looks.popleft()
        recent = next(look for look in self._looks if moment - look.moment <= RATE_SECONDS)
        seconds = moment - recent.moment
        return ServerState(
            running=new.running,
            waiting=new.waiting,
            tokens_per_second=(new.generated - recent.generated) / seconds if seconds > 0 else None,
            first_token_seconds=histogram_quantile(_since(self._looks[0].first_tokens, new.first_tokens), 0.5)
            or histogram_quantile(new.first_tokens, 0.5),
            kv_share=new.kv_share,
            preemptions=new.preemptions,
            refused=new.refused,
            stall_seconds=new.stall_seconds,
            admin_seconds=new.admin_seconds,
            latencies=new.latencies,
        )


class Stages:
    """A server's startup stages, from the run's events since its last launch."""

    LAST = READY

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._first = int(read_json(run.launch_path).get("generation") or 0)
        self._offsets: dict[Path, int] = {}
        self.newest: dict[str, Any] = {}  # the newest event with its `stage`; empty before the first

    def look(self) -> list[str]:
        """Return the stages since the last call."""
        result = []
        for path in paths_in(self._run.path / "events", "*.jsonl"):
            lines, self._offsets[path] = read_lines(path, self._offsets.get(path, 0))
            for line in lines:
                if line.get("event") == EVENT and line.get("generation", 0) >= self._first:
                    if not line.get("rank") and _moment(line) >= _moment(self.newest):  # rank 0 says when all are ready
                        self.newest = line
                    result.append(str(line.get("stage")))
        return result

    @property
    def is_ready(self) -> bool:
        return self.newest.get("stage") == READY


def _moment(event: Mapping[str, Any]) -> tuple[int, float]:
    return int(event.get("generation") or 0), float(event.get("time") or 0.0)


def _get(address: ServerAddress, path: str) -> tuple[int, str]:
    """Return (status, body); status 0 without a response. No proxy: the address is this machine's or a node's."""
    connection = http.client.HTTPConnection(address.reached_at, address.port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", errors="replace")
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()


def _read_metrics(text: str, moment: float) -> _Look:
    from prometheus_client.parser import text_string_to_metric_families

    totals: dict[str, float] = {}
    buckets: dict[float, float] = {}
    shares: list[float] = []
    samples: list[tuple[str, float, str]] = []
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.append((sample.name, sample.value, sample.labels.get("le", "")))
            if sample.name == FIRST_TOKEN:
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
            elif sample.name == KV_SHARE:
                shares.append(sample.value)
            else:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return _Look(
        moment,
        int(totals.get(RUNNING, 0)),
        int(totals.get(WAITING, 0)),
        totals.get(GENERATED, 0.0),
        tuple(sorted(buckets.items())),
        max(shares, default=None),
        int(totals.get(PREEMPTIONS, 0)),
        int(totals.get(REFUSED, 0)),
        totals.get(STALL, 0.0),
        totals.get(ADMIN, 0.0),
        read_latencies(samples),
    )


def _since(before: Buckets, now: Buckets) -> Buckets:
    counts = dict(before)
    return tuple((bound, count - counts.get(bound, 0.0)) for bound, count in now)
