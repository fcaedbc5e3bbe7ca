"""What the member manager sees: the files and processes of its owner and of its members."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field

from craton.errors import CratonError
from craton.orchestration.member_places import MemberPlace
from craton.orchestration.members.decision import MemberView, OwnerView
from craton.orchestration.run_files import stopped_by_user
from craton.orchestration.watching import is_server
from craton.telemetry import RunDirectory, RunSummary, Summarizer, read_json
from craton.telemetry.members import MEMBERS_FOLDER, MemberAddress

SUMMARY_SECONDS = 1.0  # between two summaries of a member: they read its newest metrics
START_SUMMARY_SECONDS = 0.3  # the same before its ranks run: others may wait for that
READY_SECONDS = 0.5  # between two questions to a server


def look_at_owner(run: RunDirectory, place: MemberPlace) -> OwnerView:
    launched = read_json(run.launch_path).get("generation")
    generation = launched if type(launched) is int else 0
    ending = next((marker for marker in ("FATAL", "DONE", "STOP") if run.has(marker)), "")
    state = {"FATAL": "has failed", "DONE": "is done", "STOP": "stops", "": ""}[ending]
    is_over = bool(ending) and not place.owner_lives(run)
    return OwnerView(generation, bool(ending), is_over, f"its owner {run.name} {state}")


@dataclass
class MemberLook:
    """Looks at one member; expensive looks happen at most once in a while."""

    run: RunDirectory
    place: MemberPlace
    _summary: RunSummary | None = None
    _summarizer: Summarizer | None = None
    _next_summary: float = 0.0
    _server: ReadinessLook | None = None
    _was_alive: bool = field(default=False)

    @classmethod
    def of(cls, owner: RunDirectory, name: str, place: MemberPlace) -> MemberLook:
        return cls(RunDirectory(owner.path / MEMBERS_FOLDER / name), place)

    def view(self) -> MemberView:
        run = self.run
        if not run.launch_path.exists():
            return MemberView()
        is_alive = self.place.member_lives(run)
        is_stopping = run.has("STOP")
        if not is_alive:
            self._end_server()
            self._next_summary = 0.0 if self._was_alive else self._next_summary  # its last step
            self._was_alive = False
            step = self._newest().step
            if run.has("FATAL"):
                return MemberView("failed", step=step, message=_first_line(run.marker_text("FATAL")))
            if run.has("DONE"):
                return MemberView("done", step=step)
            if is_stopping:
                message = _first_line(run.marker_text("STOP"))
                return MemberView("stopped", by_user=stopped_by_user(run), step=step, message=message)
            return MemberView("lost", step=step, is_asked=self.place.is_asked(run))
        if not self._was_alive:  # a summary from before its start shows another end
            self._next_summary, self._was_alive = 0.0, True
        summary = self._newest()
        serves = is_server(run)
        return MemberView(
            "alive",
            has_begun=summary.state not in ("waiting", "starting", "lost"),
            serves=serves,
            is_ready=serves and not is_stopping and self._is_ready(),
            is_stopping=is_stopping,
            step=summary.step,
            steps=summary.steps,
        )

    @property
    def address(self) -> MemberAddress | None:
        """Where its loaded server answers, also one that has no weights yet; None if it does not."""
        return self._server.address if self._server is not None else None

    def _newest(self) -> RunSummary:
        now = time.monotonic()
        if self._summary is None or now >= self._next_summary:
            self._summarizer = self._summarizer or Summarizer(self.run)
            self._summary = self._summarizer.summary()
            has_begun = self._summary.state == "running"
            self._next_summary = now + (SUMMARY_SECONDS if has_begun else START_SUMMARY_SECONDS)
        return self._summary

    def _is_ready(self) -> bool:
        if self._server is None:
            self._server = ReadinessLook(self.run)
        return self._server.is_ready

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class ReadinessLook:
    """Asks the server of a member, in a thread, whether it is ready: a hanging server must not delay the manager."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._closed = threading.Event()
        self.address: MemberAddress | None = None
        self.is_ready = False
        threading.Thread(target=self._ask, name=f"ready {run.name}", daemon=True).start()

    def close(self) -> None:
        self.address, self.is_ready = None, False
        self._closed.set()

    def _ask(self) -> None:
        from craton.orchestration.server import ServerWatch, server_of  # imports the job package

        while not self._closed.is_set():
            try:
                server = server_of(self._run)
                watch = ServerWatch(server)
                is_ready = watch.is_ready()
                # The owner may be what sends the missing weights, so it must find the server.
                is_loaded = is_ready or bool(watch.refusal())
                address = MemberAddress(server.url, self._key()) if is_loaded else None
            except (CratonError, OSError):
                address, is_ready = None, False
            if not self._closed.is_set():
                self.address, self.is_ready = address, is_ready
            self._closed.wait(READY_SECONDS)

    def _key(self) -> str:
        """Return the first API key of the server, from the variable that its job names."""
        from craton.job import load_job

        serve = load_job(self._run.job_path).serve
        keys = os.environ.get(serve.api_keys, "") if serve is not None and serve.api_keys else ""
        return keys.partition(",")[0].strip()


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
