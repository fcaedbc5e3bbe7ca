"""A server from Python: `with craton.serve(model) as server:` starts one, waits until it is ready and stops it."""

from __future__ import annotations

import time
from types import TracebackType

from craton.agent.processes import free_port
from craton.api.run_handle import Run
from craton.formatting import setting
from craton.orchestration import NoAnswerError, ServerWatch, address_of, serve_job, server_name
from craton.orchestration.draft import Progress
from craton.orchestration.start import check_server, check_start, draft_start, submit_start
from craton.orchestration.watching import Follower, wait_for_agents
from craton.telemetry import RunSummary, runs_root

LOOK_SECONDS = 0.2


class Server:
    """A server with an OpenAI-compatible API, and the run that it is."""

    def __init__(self, run: Run, url: str) -> None:
        self.run, self.url = run, url

    def __repr__(self) -> str:
        return f"Server({self.url!r}, {self.run.name}, {self.run.state})"

    def stop(self) -> RunSummary:
        """Let it answer the requests under way, and stop it."""
        return self.run.stop()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def serve(
    model: str,
    name: str | None = None,
    *,
    tp: int | None = None,
    port: int | None = None,
    cluster: str = "local",
    seconds: float | None = None,
    progress: Progress | None = None,
    **settings: object,
) -> Server:
    """Serve a model on this machine and return once it answers; TimeoutError where that takes longer than `seconds`.

    `model` is a folder, a Hub id in the local cache, a run or a preset; `settings` are keys of a job's `serve:`
    section, such as max_length or api_keys. Without a port a free one is taken.
    """
    section = {**settings, "port": free_port() if port is None else port}
    job = serve_job(model, name=name or server_name(model, runs_root()), cluster=cluster, tp=tp, settings=section)
    start = draft_start(job, on="local", progress=progress)
    check_start(start)
    check_server(job)
    server = Server(Run(submit_start(start)[0]), address_of(job).url)
    _wait_until_ready(server, ServerWatch(address_of(job)), seconds)
    return server


def _wait_until_ready(server: Server, watch: ServerWatch, seconds: float | None) -> None:
    follower = Follower(server.run.directory)
    deadline = None if seconds is None else time.monotonic() + seconds
    while not watch.is_ready():
        view = follower.look()
        if not view.is_moving:
            wait_for_agents(server.run.directory)
            raise NoAnswerError(f"{server.run.name} is {view.summary.state} before it answered: {view.summary.message}")
        if deadline is not None and time.monotonic() >= deadline:
            server.run.stop(now=True)
            raise TimeoutError(f"{server.run.name} does not answer after {setting(seconds)}; it is stopped")
        time.sleep(LOOK_SECONDS)
