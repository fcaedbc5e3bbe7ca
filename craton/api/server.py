"""A server from Python: `with craton.serve(model) as server:` starts one, waits until it is ready, and stops it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from craton.agent.processes import free_port
from craton.api.run_handle import LOOK_SECONDS, Run
from craton.api.start_steps import StartWatch, Unwatched, ready_start
from craton.formatting import setting
from craton.job import Job, load_job
from craton.orchestration import NoAnswerError, ServerWatch, address_of, serve_job, server_name
from craton.orchestration.draft import Progress
from craton.orchestration.start import RunStart, check_server, draft_start, submit_start
from craton.orchestration.watching import View, wait_for_agents
from craton.telemetry import RunSummary, runs_root


class Server:
    """A server with an OpenAI-compatible API, and its run."""

    def __init__(self, run: Run) -> None:
        self.run, self.address = run, address_of(load_job(run.directory.job_path))

    @property
    def url(self) -> str:
        return self.address.url

    def __repr__(self) -> str:
        return f"Server({self.url!r}, {self.run.name}, {self.run.state})"

    def wait_until_ready(
        self,
        seconds: float | None = None,
        look: Callable[[View], None] | None = None,
        *,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        """Return once the server is ready; NoAnswerError if it ends before, TimeoutError after `seconds`.

        `look` is called with every view of its run, including the last one.
        """
        watch = ServerWatch(self.address)

        def is_settled(view: View) -> bool:
            return not view.is_moving or (view.summary.state != "stopping" and watch.is_ready())

        try:
            view = self.run.follow(is_settled, seconds, look, look_seconds)
        except TimeoutError:
            raise TimeoutError(f"{self.run.name} is not ready after {setting(seconds)}") from None
        if not view.is_moving:
            wait_for_agents(self.run.directory)
            raise NoAnswerError(
                f"{self.run.name} ended ({view.summary.state}) before it was ready: {view.summary.message}"
            )

    def stop(self) -> RunSummary:
        """Drain the open requests and stop the server."""
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
    ep: int | None = None,
    port: int | None = None,
    cluster: str = "local",
    seconds: float | None = None,
    wait: bool = True,
    progress: Progress | None = None,
    watch: StartWatch | None = None,
    **settings: object,
) -> Server:
    """Serve a model on this machine and return once it is ready, or without `wait` once it is started. If that takes
    longer than `seconds`, stop it and raise TimeoutError.

    `model` is a folder, a Hub id in the local cache, a run or a preset; `settings` are keys of a job's `serve:`
    section, such as max_length or api_keys. Without a port a free one is used. `watch` sees every step of the start
    and may refuse.
    """
    job = server_job(model, name, tp=tp, ep=ep, port=port, cluster=cluster, **settings)

    def draft(report: Progress | None) -> RunStart:
        return draft_start(job, on="local", progress=report)

    server = Server(Run(submit_start(ready_start(draft, watch or Unwatched(progress), check_server))[0]))
    if wait:
        try:
            server.wait_until_ready(seconds)
        except TimeoutError as error:
            server.run.stop(now=True)
            raise TimeoutError(f"{error}; it was stopped") from None
    return server


def server_job(
    model: str,
    name: str | None = None,
    *,
    tp: int | None = None,
    ep: int | None = None,
    port: int | None = None,
    cluster: str = "local",
    **settings: object,
) -> Job:
    """Return the job that `serve` starts; `preview` shows its files and commands."""
    section = {**settings, "port": free_port() if port is None else port}
    name = name or server_name(model, runs_root())
    return serve_job(model, name=name, cluster=cluster, tp=tp, ep=ep, settings=section)
