"""Who may look and who may change: tokens, cookies, names, origins; asked with the headers an attacker would send."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import shutil
import socket
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from page_server import TOKEN, PageServer, all_is_well
from simulated_runs import write_run
from waiting import wait_until

from craton.cli.ui import ui
from craton.http_guard import AccessError, read_token
from craton.observability.web.actions import ActionOutcome
from craton.observability.web.http import application
from craton.observability.web.http.access import SESSION_SECONDS, Access, public_origin
from craton.observability.web.http.application import PageSite
from craton.observability.web.http.guard import PageConnection
from craton.observability.web.http.static_files import address_of_file
from craton.observability.web.run_page import Shown
from craton.observability.web.sources import Answered, Summaries, Verdicts
from craton.telemetry import RunDirectory

Serve = Callable[..., PageServer]


def test_anybody_on_this_machine_may_look_and_nobody_may_change_without_the_token(
    page: PageServer, changes: list[tuple[str, str]]
) -> None:
    assert page.ask("GET", "/")[0] == 200
    assert page.ask("GET", "/runs/one")[0] == 200
    status, _, body = page.ask("POST", "/runs/one/stop")
    assert status == 403
    assert "token" in json.loads(body)["error"]
    assert page.ask("POST", "/runs/one/stop", authorization="Bearer wrong")[0] == 403
    assert changes == []
    assert page.ask("POST", "/runs/one/stop", authorization=f"Bearer {TOKEN}")[0] == 200
    assert changes == [("stop", "one")]


def test_a_change_is_made_by_post_only(page: PageServer, changes: list[tuple[str, str]]) -> None:
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        assert page.ask(method, "/runs/one/stop", authorization=f"Bearer {TOKEN}")[0] in (404, 405)
    assert changes == []


def test_a_page_that_logged_in_changes_and_other_websites_cannot_use_its_cookie(
    page: PageServer, changes: list[tuple[str, str]]
) -> None:
    known = page.log_in()
    assert page.ask("POST", "/runs/one/resume", **known)[0] == 200
    for wrong in (
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": f"http://localhost:{page.port}"},  # another origin than the one it was asked by
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"x-craton-secret": "guessed"},
        {"x-craton-secret": ""},
        {"x-craton-secret": page.log_in()["x-craton-secret"]},  # of another login
        {"cookie": f"craton-{page.port}=9999999999.{'0' * 64}.{'0' * 64}"},
        {"cookie": f"craton-{page.port}=9999999999.{'0' * 64}"},
        {"cookie": ""},
    ):
        assert page.ask("POST", "/runs/one/stop", **{**known, **wrong})[0] == 403, wrong
    without_origin = {name: value for name, value in known.items() if name != "origin"}
    assert page.ask("POST", "/runs/one/stop", **without_origin)[0] == 403
    assert changes == [("resume", "one")]


def test_a_cookie_alone_which_every_port_of_the_host_is_sent_changes_nothing(
    page: PageServer, changes: list[tuple[str, str]]
) -> None:
    known = page.log_in()
    value = known["cookie"].partition("=")[2]
    for path in ("/", "/runs/one", "/login"):
        _, _, body = page.ask("GET", path, cookie=known["cookie"], accept="text/html")
        assert known["x-craton-secret"] not in body
        assert all(piece not in body for piece in value.split("."))
    for piece in (value, *value.split(".")):
        stolen = {"cookie": known["cookie"], "origin": known["origin"], "x-craton-secret": piece}
        assert page.ask("POST", "/runs/one/kill", **stolen)[0] == 403
    assert changes == []


@pytest.mark.parametrize("beyond", [False, True])
def test_a_host_that_is_no_host_opens_nothing(
    serve: Serve, tmp_path: Path, changes: list[tuple[str, str]], beyond: bool
) -> None:
    """Addresses that are put together from it would be those of what nobody needs a token for."""
    write_run(tmp_path / "runs", "one", steps=3)

    def note(action: str, run: RunDirectory) -> ActionOutcome:
        changes.append((action, run.name))
        return ActionOutcome(True, "noted")

    page = serve(beyond=beyond, do=note)
    for host in (
        "127.0.0.1/login?",
        "127.0.0.1/static/x?",
        "127.0.0.1/static/x#",
        "a@127.0.0.1",
        "127.0.0.1:",
        "[::1",
        "::1",
    ):
        assert page.ask("POST", "/runs/one/kill", host=host)[0] == 403, host
        assert page.ask("GET", "/runs/one/log?source=rank-00000.log", host=host)[0] == 403, host
    for path in ("/static/../runs/one/kill", "/static/%2e%2e/runs/one/kill", "//login", "/login/../runs/one/kill"):
        assert page.ask("POST", path)[0] in (401, 403, 404, 405), path
    assert changes == []


def test_what_no_page_sends_is_refused_and_breaks_nothing(page: PageServer) -> None:
    origin, kind = page.address.rstrip("/"), "application/json"
    for body in (b'{"token": "\\ud800"}', b"[" * 4000, b'{"token": ' + b"9" * 4000 + b"}"):
        assert page.ask("POST", "/login", body, origin=origin, content_type=kind)[0] == 403, body[:20]
    for begin in ("9" * 5000, "-1", "x", "%C2%B2", "%D9%A3"):
        assert page.ask("GET", f"/runs/one/log?source=rank-00000.log&begin={begin}")[0] == 400, begin
    assert page.ask("GET", "/runs/one/log?source=rank-00000.log&begin=" + "9" * 18)[0] == 200


def test_files_are_kept_by_browsers_only_under_the_version_they_are_of(page: PageServer) -> None:
    address = address_of_file("common.js")
    assert address.rpartition("/")[0] == address_of_file("run.js").rpartition("/")[0]  # they import each other
    assert "immutable" in page.ask("GET", address)[1]["cache-control"]
    status, headers, _ = page.ask("GET", "/static/0123456789abcdef/common.js")
    assert (status, headers["cache-control"]) == (200, "no-cache")
    assert page.ask("GET", "/static/common.js")[0] == 404


def test_logging_in_needs_the_token_and_a_page_of_this_server(page: PageServer) -> None:
    right, origin = json.dumps({"token": TOKEN}).encode(), page.address.rstrip("/")
    kind = "application/json"
    status, headers, _ = page.ask("POST", "/login", right, origin=origin, content_type=kind)
    assert status == 200
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(headers["set-cookie"].split("; "))
    assert page.ask("POST", "/login", right, origin="http://evil.example", content_type=kind)[0] == 403
    assert page.ask("POST", "/login", right, content_type=kind)[0] == 403
    assert page.ask("POST", "/login", right, origin=origin, content_type="text/plain")[0] == 403
    for body in (b'{"token": "wrong"}', b'{"token": 7}', b"[]", b"not json"):
        status, headers, _ = page.ask("POST", "/login", body, origin=origin, content_type=kind)
        assert status == 403
        assert "set-cookie" not in headers
    assert page.ask("POST", "/login", b" " * 5000, origin=origin, content_type=kind)[0] == 413


def test_a_name_pointed_at_this_machine_is_refused(page: PageServer) -> None:
    """DNS rebinding: the website's own name stands in Host, and is the same origin to its browser."""
    for host in (f"evil.example:{page.port}", "127.0.0.1.evil.example", "192.0.2.1", "", "localhost.evil.example"):
        assert page.ask("GET", "/", host=host)[0] == 403, host
        assert page.ask("POST", "/runs/one/stop", host=host, authorization=f"Bearer {TOKEN}")[0] == 403, host
    for host in ("localhost", f"localhost:{page.port}", "[::1]:9000", "127.0.0.2", "LOCALHOST."):
        assert page.ask("GET", "/", host=host)[0] == 200, host


def test_beyond_loopback_even_looking_needs_the_token(serve: Serve, tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "one", steps=3)
    page = serve(beyond=True)
    host = {"host": "trainer.example:8080"}
    for path in ("/", "/runs/one", "/events", "/runs/one/events", "/runs/one/log?source=rank-00000.log", "/none"):
        status, _, body = page.ask("GET", path, **host)
        assert status == 401, path
        assert "one" not in body or path == "/none"
    status, _, body = page.ask("GET", "/", accept="text/html", **host)
    assert status == 401
    assert "Token required" in body
    assert page.ask("GET", "/runs/one", authorization=f"Bearer {TOKEN}", **host)[0] == 200
    assert page.ask("GET", "/", cookie=page.log_in()["cookie"], **host)[0] == 200


def test_every_answer_forbids_what_a_page_does_not_need(page: PageServer) -> None:
    for path in ("/", "/runs/one", "/runs/none", address_of_file("ui.css"), "/login"):
        _, headers, _ = page.ask("GET", path)
        policy = headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
    assert page.ask("GET", "/")[1]["cache-control"] == "no-store"


def test_nothing_outside_the_runs_is_read(page: PageServer, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the secret")
    logs = tmp_path / "runs" / "one" / "logs"
    (logs / "rank-00009.log").symlink_to(tmp_path / "secret")
    for path in (
        "/runs/..%2f..",
        "/runs/%2e%2e",
        "/static/x/..%2faccess.py",
        "/static/..%2faccess.py",
        "/static/%2e%2e%2f%2e%2e%2faccess.py",
        "/runs/one/log?source=../../../secret",
        "/runs/one/log?source=..%2f..%2f..%2fsecret",
        "/runs/one/log?source=rank-00009.log",
        "/runs/one/log?source=/etc/passwd",
        "/runs/one/log?source=rank-00000.log%00",
    ):
        status, _, body = page.ask("GET", path)
        assert status in (404, 405), path
        assert "the secret" not in body


def test_a_run_is_found_by_its_name_without_a_look_at_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "runs", "one", steps=3)
    (tmp_path / "runs" / "folder").mkdir()
    verdicts = Verdicts(all_is_well)
    site = PageSite(tmp_path / "runs", Access(TOKEN, False, 1), verdicts, Summaries(tmp_path, verdicts), None, Answered)
    monkeypatch.setattr(Path, "iterdir", lambda folder: pytest.fail(f"{folder} was listed"))
    assert site.find("one") == run
    for name in ("", ".", "..", "../runs/one", "one/", "/one", "none", "folder", "one\0", "x" * 5000):
        assert site.find(name) is None, name


def test_a_run_begun_anew_is_not_shown_as_the_one_before(page: PageServer, tmp_path: Path) -> None:
    def mark_of(body: str) -> str:
        return body.partition('data-mark="')[2].partition('"')[0]

    page_before = page.ask("GET", "/runs/one")[2]
    assert mark_of(page_before) == mark_of(page.ask("GET", "/runs/one")[2]) != ""
    assert "3 / 400" in page_before
    shutil.rmtree(tmp_path / "runs" / "one")
    assert page.ask("GET", "/runs/one/events")[0] == 404
    write_run(tmp_path / "runs", "one", steps=2)
    stream = page.ask("GET", f"/runs/one/events?mark={mark_of(page_before)}")[2]  # and it has ended
    assert '{"replaced":true}' in stream
    page_after = page.ask("GET", "/runs/one")[2]
    assert "2 / 400" in page_after
    assert mark_of(page_after) != mark_of(page_before)


def test_a_folder_that_cannot_be_looked_at_once_loads_no_page_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system whose server is restarted says nothing about the run."""
    write_run(tmp_path / "runs", "one", steps=3)
    verdicts = Verdicts(all_is_well)
    site = PageSite(tmp_path / "runs", Access(TOKEN, False, 1), verdicts, Summaries(tmp_path, verdicts), None, Answered)
    opened = site.open("one")
    assert opened is not None

    def fails(run: RunDirectory) -> str:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(application, "run_mark", fails)
    monkeypatch.setattr(application, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(application, "_shown", lambda site, page, part: Shown({part: "text"}))

    async def told() -> list[dict[str, Any]]:
        news, found = application._run_news(site, opened, opened.mark), []
        while {} not in found:  # every part is told of once, then there is nothing new
            found.append(await anext(news))
        return found

    found = asyncio.run(told())
    assert len(found) == len(opened.page.parts) + 1
    assert {"replaced": True} not in found


def begun(page: PageServer, text: str, receive_bytes: int = 0) -> socket.socket:
    """A connection on which a request has begun to come."""
    connection = socket.socket()
    connection.settimeout(20)
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect(("127.0.0.1", page.port))
    connection.sendall(text.encode())
    return connection


HALF = "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"


def test_who_does_not_send_or_take_is_not_waited_for(
    page: PageServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    brief = replace(PageConnection.limits, head_seconds=0.1, body_seconds=0.1, write_seconds=0.1)
    monkeypatch.setattr(PageConnection, "limits", brief)
    monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
    login = f"POST /login HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nOrigin: {page.address[:-1]}\r\n"
    login += 'Content-Type: application/json\r\nContent-Length: 40\r\n\r\n{"token": '
    with contextlib.ExitStack() as opened:
        stream = opened.enter_context(begun(page, f"GET /events{HALF[5:]}\r\n"))
        file = f"GET {address_of_file('charts.js')}{HALF[5:]}\r\n"
        opened.enter_context(begun(page, file * 600, receive_bytes=4096))
        for half in [opened.enter_context(begun(page, text)) for text in ("", HALF, login)]:
            assert half.recv(1) == b""
        # the one that takes nothing gets its answer only when it takes
        wait_until(lambda: page.num_connections <= 1, lambda: page.num_connections)
        assert page.num_connections == 1
        assert stream.recv(15) == b"HTTP/1.1 200 OK"
    assert caplog.messages == []


def test_many_half_sent_requests_make_room_for_whole_ones(page: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageConnection, "limits", replace(PageConnection.limits, per_peer=4))
    with contextlib.ExitStack() as opened:
        halves = [opened.enter_context(begun(page, HALF)) for _ in range(12)]
        assert page.ask("GET", "/")[0] == 200
        assert [half.recv(1) for half in halves[:8]] == [b""] * 8
        halves[-1].sendall(b"\r\n")
        assert halves[-1].recv(15) == b"HTTP/1.1 200 OK"


def test_behind_a_proxy_the_public_address_is_known_and_all_need_the_token(serve: Serve, tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "one", steps=3)
    public = "https://runs.example.org"
    page = serve(public=public, do=lambda action, run: ActionOutcome(True, "noted"))
    body, kind = json.dumps({"token": TOKEN}).encode(), "application/json"
    for host in ("runs.example.org", "Runs.example.org:443", f"127.0.0.1:{page.port}"):  # as the proxy sets it
        assert page.ask("GET", "/", host=host)[0] == 401
        status, headers, told = page.ask("POST", "/login", body, host=host, origin=public, content_type=kind)
        assert status == 200
        assert "Secure" in headers["set-cookie"].split("; ")
        known = {"host": host, "cookie": headers["set-cookie"].partition(";")[0], "origin": public}
        known["x-craton-secret"] = json.loads(told)["secret"]
        assert page.ask("GET", "/", **known)[0] == 200
        assert page.ask("POST", "/runs/one/stop", **known)[0] == 200
        assert page.ask("POST", "/runs/one/stop", **{**known, "origin": "https://evil.example"})[0] == 403
    assert page.ask("GET", "/", host="evil.example", authorization=f"Bearer {TOKEN}")[0] == 403


def test_a_public_address_is_one_that_browsers_name() -> None:
    assert public_origin("https://Runs.example.org:443/") == "https://runs.example.org"
    assert public_origin("https://[2001:DB8::1]:8443") == "https://[2001:db8::1]:8443"
    for wrong in (
        "runs.example.org",
        "http://runs.example.org",
        "https://",
        "https://h/runs",
        "https://h:x",
        "https://a@h",
    ):
        with pytest.raises(AccessError, match="give https://HOST"):
            public_origin(wrong)


def test_the_verb_ui_tells_the_public_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CRATON_RUNS", str(tmp_path))
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: sockets[0].close())
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    ui(port=0, public_url="https://runs.example.org", as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["address"] == "https://runs.example.org/"
    assert told["link"].startswith("https://runs.example.org/#token=")
    with pytest.raises(AccessError, match="--public-url"):
        ui(port=0, public_url="http://runs.example.org", as_json=True)


def test_what_is_not_an_action_changes_nothing(page: PageServer, changes: list[tuple[str, str]]) -> None:
    known = {"authorization": f"Bearer {TOKEN}"}
    assert page.ask("POST", "/runs/one/delete", **known)[0] == 404
    assert page.ask("POST", "/runs/none/stop", **known)[0] == 404
    assert changes == []


def test_a_session_ends_and_belongs_to_its_port_and_token() -> None:
    access = Access(TOKEN, False, 8080)
    cookie = access.new_session("secret", now=1000.0)
    assert access.is_session(cookie, now=1000.0 + SESSION_SECONDS - 1)
    assert not access.is_session(cookie, now=1001.0 + SESSION_SECONDS)
    assert not Access(TOKEN, False, 8081).is_session(cookie, now=1000.0)
    assert not Access("another-token-of-some-length", False, 8080).is_session(cookie, now=1000.0)
    longer = str(int(cookie.partition(".")[0]) + 10**9) + "." + cookie.partition(".")[2]
    assert not access.is_session(longer, now=1000.0)
    assert not access.is_session("", now=0.0)


def test_a_token_file_is_made_for_its_owner_only_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = read_token(path)
    assert len(token) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_token(path) == token
    assert read_token(None) != read_token(None)


def test_a_token_file_that_others_can_read_or_that_holds_little_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    read_token(path)
    path.chmod(0o640)
    with pytest.raises(AccessError, match="chmod 600"):
        read_token(path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(AccessError, match="the minimum is 16"):
        read_token(path)
    with pytest.raises(AccessError, match="cannot write the token file"):
        read_token(tmp_path / "none" / "token")
