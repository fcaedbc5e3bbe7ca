"""The web application: routes, event streams and access checks.

    GET  /                      the runs            GET  /events             their updates, as server-sent events
    GET  /runs/NAME             one run             GET  /runs/NAME/events   its updates
    GET  /runs/NAME/log         a chunk of a log    POST /runs/NAME/ACTION   stop, kill, resume or heal it
    GET  /runs/NAME/members     rows of its members
    POST /login                 exchange the token for a cookie and a secret

NAME of a member is OWNER:NAME: a slash would look like the rest of an address. Only existing runs are read: a name in a
URL is a folder among them, never a path. Pages load nothing from other sites, run no inline script or style, and cannot
be framed.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from craton.observability.web.actions import ACTIONS, act
from craton.observability.web.charts import OWN, RESULT_CHARTS
from craton.observability.web.http.access import Access
from craton.observability.web.http.guard import RequestGuard, about_request, login, refuse
from craton.observability.web.http.static_files import digest, static_file
from craton.observability.web.readers import read_piece, sources
from craton.observability.web.rendering import OF_MEMBER, render
from craton.observability.web.run_page import RunPage, Shown
from craton.observability.web.sources import (
    DEADLINE_SECONDS,
    Answered,
    Background,
    Prometheus,
    RunRow,
    Summaries,
    Verdicts,
    examine,
)
from craton.orchestration.watching import flat, glance_at_members
from craton.telemetry import RunDirectory
from craton.telemetry.members import MAX_DEPTH, MEMBERS_FOLDER

FIRST_SECONDS = 1.0  # parts read by then are in the page; the rest is streamed
FIRST_WIDE_SECONDS = 0.15  # the same for a run with many nodes, whose ranks take too long to wait for
WIDE_NODES = 64
BEAT_SECONDS = 15.0  # keep-alive of a stream without updates
LOOK_SECONDS = 1.0
HURRY_SECONDS = 0.15  # between two messages while runs are still being read
MAX_PAGES = 16
ALERT_SECONDS = 5.0
MAX_DIGITS = 18


@dataclass(frozen=True)
class Opened:
    """The page of a run, and a mark that identifies the run among others with the same name."""

    page: RunPage
    mark: str


@dataclass
class PageSite:
    """State shared by all routes."""

    root: Path
    access: Access
    verdicts: Verdicts
    summaries: Summaries
    prometheus: Prometheus | None
    alerts: Callable[[], Answered]
    do: Callable[[str, RunDirectory], Any] = act
    rows: _RowTexts = field(default_factory=lambda: _RowTexts())
    mark: str = field(default_factory=lambda: secrets.token_hex(4))  # differs for every server process
    _pages: OrderedDict[Path, Opened] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, name: str) -> RunDirectory | None:
        """Find a run by its name, never by a path. Other runs are not read: a page that follows a log asks every
        second."""
        words = name.split(OF_MEMBER)
        if os.sep in name or len(words) > MAX_DEPTH + 1 or any(word in ("", os.curdir, os.pardir) for word in words):
            return None
        found = [
            RunDirectory(self.root / f"{os.sep}{MEMBERS_FOLDER}{os.sep}".join(words)),
            RunDirectory(self.root / name),
        ]
        try:
            return next((run for run in found if run.looks_like_a_run()), None)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return None
            raise

    def open(self, name: str) -> Opened | None:
        """Return the page of a run, shared by all its viewers. A run that was deleted and started again under the same
        name gets a new one."""
        run = self.find(name)
        mark = run_mark(run) if run else ""
        if run is None or not mark:
            return None
        with self._lock:
            opened = self._pages.get(run.path)
            if opened is None or opened.mark != mark:
                page = RunPage(run, self.verdicts, self.alerts, self.prometheus, self.summaries.schedulers)
                opened = self._pages[run.path] = Opened(page, mark)
            self._pages.move_to_end(run.path)
            while len(self._pages) > MAX_PAGES:
                self._pages.popitem(last=False)
            return opened


def run_mark(run: RunDirectory) -> str:
    """Return a mark that stays the same from a run's first generation to its last; empty when the run is gone. A file
    system may reuse the inode of a deleted folder, but not with the same time of the first generation."""
    try:
        folder = os.stat(run.path).st_ino
    except FileNotFoundError:
        return ""
    try:
        began = os.stat(run.generation_path(0)).st_mtime_ns
    except FileNotFoundError:
        began = 0
    return f"{folder:x}-{began:x}"


def make_app(
    root: Path,
    access: Access,
    *,
    prometheus: str | None = None,
    verdicts: Verdicts | None = None,
    do: Callable[[str, RunDirectory], Any] = act,
) -> ASGIApp:
    """Return the application for the runs in a folder."""
    verdicts = verdicts or Verdicts(lambda run: examine(run, prometheus))
    asked = Prometheus(prometheus) if prometheus else None
    alerts = Background(asked.alerts, ALERT_SECONDS, asked.late, DEADLINE_SECONDS).get if asked else Answered
    site = PageSite(root, access, verdicts, Summaries(root, verdicts), asked, alerts, do)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await run_in_threadpool(site.summaries.rows)  # start reading before the first request
        yield
        site.summaries.close()
        verdicts.close()

    routes = [
        Route("/", _runs),
        Route("/events", _runs_events),
        Route("/login", _login, methods=["GET", "POST"]),
        Route("/static/{version}/{file}", static_file),
        Route("/runs/{name}", _run),
        Route("/runs/{name}/events", _run_events),
        Route("/runs/{name}/log", _log),
        Route("/runs/{name}/members", _members),
        Route("/runs/{name}/{action}", _change, methods=["POST"]),
    ]
    # A file system may fail for a while (a stale handle, a server restart): report it, do not crash.
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={OSError: _unreadable})
    app.state.site = site
    return RequestGuard(app, access)


async def _unreadable(request: Request, error: Exception) -> Response:
    return refuse(503, f"cannot read the runs in {_site(request).root}: {error}")


def _site(request: Request) -> PageSite:
    site = request.app.state.site
    assert isinstance(site, PageSite)
    return site


async def _login(request: Request) -> Response:
    return await login(request, _site(request).access)


async def _runs(request: Request) -> Response:
    site = _site(request)
    rows = await run_in_threadpool(site.summaries.rows)
    about = about_request(request, site.access)
    since = f"{site.mark}.{max((row.version for row in rows), default=-1)}"

    def html() -> str:
        with site.summaries.aside():
            return render(
                "runs.html",
                rows=[site.rows.get(row) for row in rows],
                since=since,
                root=str(site.root),
                trouble=site.summaries.trouble,
                **about,
            )

    return HTMLResponse(await run_in_threadpool(html))


async def _runs_events(request: Request) -> Response:
    """`since` is the state of the page: this server's mark and the version of its list."""
    site = _site(request)
    mark, _, version = request.query_params.get("since", "").partition(".")
    return _stream(_runs_news(site, int(version) if mark == site.mark and _is_number(version) else -1))


async def _runs_news(site: PageSite, since: int) -> AsyncIterator[dict[str, Any]]:
    """Yield the rows that changed since the last message, and the order of all rows."""
    rows_before = await run_in_threadpool(site.summaries.rows)
    sent = {row.run.name: row.version for row in rows_before if row.version <= since}
    order = [row.run.name for row in rows_before] if len(sent) == len(rows_before) else []
    trouble = None
    while True:
        rows = await run_in_threadpool(site.summaries.rows)
        changed = [row for row in rows if sent.get(row.run.name) != row.version]
        names = [row.run.name for row in rows]
        if changed or names != order or trouble != site.summaries.trouble:
            message: dict[str, Any] = {"rows": {row.run.name: site.rows.get(row) for row in changed}}
            if trouble != site.summaries.trouble:
                message["trouble"] = trouble = site.summaries.trouble
            if names != order:
                message["order"] = order = names
            sent = {row.run.name: row.version for row in rows}
            yield message
        else:
            yield {}
        is_reading = any(row.state == "reading" for row in rows)
        await asyncio.sleep(HURRY_SECONDS if is_reading else LOOK_SECONDS)


@dataclass
class _RowTexts:
    """Cache of the rows' HTML, shared by all viewers."""

    known: dict[Path, tuple[int, str]] = field(default_factory=dict)

    def get(self, row: RunRow) -> str:
        kept = self.known.get(row.run.path)
        if kept is None or kept[0] != row.version:
            is_unread = row.summary is None and not row.trouble
            text = (
                render("parts/row_unread.html", name=row.run.name) if is_unread else render("parts/row.html", row=row)
            )
            kept = self.known[row.run.path] = (row.version, text)
        return kept[1]


async def _run(request: Request) -> Response:
    site = _site(request)
    name = request.path_params["name"]
    opened = await run_in_threadpool(site.open, name)
    if opened is None:
        html = render("missing.html", name=name, root=str(site.root), **about_request(request, site.access))
        return HTMLResponse(html, status_code=404)
    page = opened.page
    shown = await _first(site, page)
    fragments = {key: text for entry in shown.values() for key, text in entry.fragments.items()}
    charts = {key: data for item in shown.values() for key, data in item.charts.items()}
    logs = await run_in_threadpool(sources, page.run)
    html = render(
        "run.html",
        name=page.run.name,
        owners=[owner.name for owner in reversed(list(page.run.owners()))],
        mark=opened.mark,
        serves=page.serves,
        is_command=page.is_command,
        fragments=fragments,
        newest={key: data.get("newest", "") for key, data in charts.items()},
        own=[key for key in charts if key.startswith(OWN)],
        own_prefix=OWN,
        result_charts=RESULT_CHARTS,
        parts=list(page.parts),
        unread=[part for part in page.parts if part not in shown],
        # Escaped as JSON, "<" cannot end the script element.
        charts=json.dumps(charts, separators=(",", ":")).replace("<", "\\u003c"),
        logs=logs,
        **about_request(request, site.access),
    )
    return HTMLResponse(html)


async def _first(site: PageSite, page: RunPage) -> dict[str, Shown]:
    """Return the parts that are ready within FIRST_SECONDS; the others are streamed when they are."""
    shown: dict[str, Shown] = {}

    def collect() -> None:
        for name in page.parts:
            shown[name] = _shown(site, page, name)

    task = asyncio.ensure_future(run_in_threadpool(collect))
    is_wide = await run_in_threadpool(page.num_nodes) > WIDE_NODES
    await asyncio.wait([task], timeout=FIRST_WIDE_SECONDS if is_wide else FIRST_SECONDS)
    return dict(shown)


async def _run_events(request: Request) -> Response:
    """`mark` is the run that the page shows, which may have been replaced by another with the same name since."""
    site = _site(request)
    opened = await run_in_threadpool(site.open, request.path_params["name"])
    if opened is None:
        return refuse(404, "no such run")
    return _stream(_run_news(site, opened, request.query_params.get("mark", opened.mark)))


async def _run_news(site: PageSite, opened: Opened, held: str) -> AsyncIterator[dict[str, Any]]:
    """Yield the changes of each part as soon as they are known, or that the page's run was replaced."""
    sent: dict[str, str] = {}
    page, mark = opened.page, opened.mark
    while True:
        if mark != held:
            if mark:  # else it is gone: the browser gets a 404 when it reconnects
                yield {"replaced": True}
            return
        is_silent = True
        for name in page.parts:
            shown = await run_in_threadpool(_shown, site, page, name)
            message: dict[str, dict[str, Any]] = {"fragments": {}, "charts": {}}
            for kind, items in (("fragments", shown.fragments), ("charts", shown.charts)):
                for key, value in items.items():
                    fingerprint = digest(value if isinstance(value, str) else json.dumps(value))
                    if sent.get(f"{kind} {key}") != fingerprint:
                        sent[f"{kind} {key}"] = fingerprint
                        message[kind][key] = value
            if message["fragments"] or message["charts"]:
                is_silent = False
                yield message
        if is_silent:
            yield {}
        await asyncio.sleep(LOOK_SECONDS)
        with suppress(OSError):  # a temporary file system error does not mean that the run is gone
            mark = await run_in_threadpool(run_mark, page.run)


def _shown(site: PageSite, page: RunPage, part: str) -> Shown:
    """Return a part, or an error in its place: one broken file must not break the page."""
    try:
        with site.summaries.aside():
            shown = page.parts[part].get()
        whole = {"late": ""} if part == list(page.parts)[-1] else {}  # after the last part everything was read
        return Shown({**shown.fragments, f"trouble-{part}": "", **whole}, shown.charts)
    except Exception as error:  # noqa: BLE001 - shown in place of the part; the others stay
        return Shown(
            {f"trouble-{part}": render("parts/trouble.html", part=part, error=f"{type(error).__name__}: {error}")}
        )


def _stream(messages: AsyncIterator[dict[str, Any]]) -> Response:
    async def lines() -> AsyncIterator[str]:
        yield "retry: 1000\n\n"
        silence = 0.0
        loop = asyncio.get_running_loop()
        async for message in messages:
            if message:
                yield f"data: {json.dumps(message, separators=(',', ':'), allow_nan=False)}\n\n"
                silence = loop.time()
            elif loop.time() - silence > BEAT_SECONDS:
                yield ": alive\n\n"
                silence = loop.time()

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})


async def _members(request: Request) -> Response:
    """Return the members of a run as rows of the list."""
    site = _site(request)
    run = await run_in_threadpool(site.find, request.path_params["name"])
    if run is None:
        return refuse(404, "no such run")

    def html() -> str:
        with site.summaries.aside():
            return render("parts/member_rows.html", rows=list(flat(glance_at_members(run, asks_scheduler=False))))

    return HTMLResponse(await run_in_threadpool(html))


async def _log(request: Request) -> Response:
    run = await run_in_threadpool(_site(request).find, request.path_params["name"])
    begin = request.query_params.get("begin", "")
    if begin and not _is_number(begin):
        return refuse(400, "begin must be a number of bytes")
    source = request.query_params.get("source", "")
    piece = await run_in_threadpool(read_piece, run, source, int(begin) if begin else None) if run else None
    if piece is None:
        return refuse(404, "no such log")
    return JSONResponse(
        {"text": piece.text, "rest": piece.rest, "begin": piece.begin, "end": piece.end, "size": piece.size}
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS


async def _change(request: Request) -> Response:
    """Run an action; the guard has already checked that the request may change runs."""
    site = _site(request)
    run = await run_in_threadpool(site.find, request.path_params["name"])
    action = request.path_params["action"]
    if run is None or action not in ACTIONS:
        return refuse(404, "no such run or action; actions are stop, kill, resume and heal")
    outcome = await run_in_threadpool(site.do, action, run)
    status = 200 if outcome.is_done else 409
    return JSONResponse({"message" if outcome.is_done else "error": outcome.message}, status_code=status)
