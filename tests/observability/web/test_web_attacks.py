"""What an attacker may send to the page, or write into a run directory that somebody looks at, one test a class.

| class | where it is tested |
|---|---|
| change without the token, with a wrong one, by another verb than POST | test_web_access |
| cross-site request forgery; a stolen or forged cookie; a session that ended | test_web_access, test_web_browser |
| DNS rebinding; a Host header that is not a host | test_web_access |
| looking beyond loopback without the token | test_web_access |
| path traversal in runs, logs and static files; a link or a FIFO as a log | test_web_access, test_web_readers |
| login bodies that are too long, nested, or not JSON; numbers that are none | test_web_access |
| half-sent requests, answers that are not taken | test_web_access |
| another website that reads, posts or frames the page | test_web_access (headers), test_web_browser (a browser) |
| script in names of runs, verdicts, alerts and logs | test_web_browser, test_web_sources |
| the token on a command line or in a file that others can read | test_web_sources, test_web_access |
| script in names of metrics and nodes, in events, markers, tiers and kinds | here, in a browser |
| metric values that are not numbers, or larger than any | here |
| the token in the query of an address, or sent on by it | here |
| verbs that no page uses, a verb in a header | here |
| cross-origin preflight | here |
| WebSocket upgrade | here |
| header injection and response splitting | here |
| open redirects | here |
| forwarded headers | here |
| heads and addresses that are too long | here |
| two lengths of one body (request smuggling) | here |
| a header that decides, twice; a Host that is odd or folded | here |
| bytes that are not HTTP; an address of another server | here |
| addresses that are not text; errors that show the insides | here |
| a flood of streams | here |
| stored answers: caches, types that are guessed | here |
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import Browser
from page_server import TOKEN, PageServer
from raw_http import ambiguous_heads, foreign_heads, raw_answer
from simulated_runs import write_run

from craton.observability.web.http import application
from craton.observability.web.sources import CachedVerdict, Verdicts
from craton.telemetry import RunDirectory

Serve = Callable[..., PageServer]
SCRIPT = "</script><script>alert(1)</script><img src=x onerror=alert(1)>'\"&{{7*7}}"
STREAMS_OF_ONE_ADDRESS = 128  # as docs/ui.md says


def raw(page: PageServer, request: bytes, source: str = "127.0.0.1") -> bytes:
    return raw_answer(page.port, request, source)


def is_well(page: PageServer) -> bool:
    return page.ask("GET", "/runs/one")[0] == 200


# -- what somebody writes into a run directory ------------------------------------------------------------------------


def write_hostile_run(root: Path) -> RunDirectory:
    """Every text that the page shows of a run is a script."""
    run = write_run(root, "hostile", nodes=2, ranks_per_node=1, steps=6, state="failed")
    stamp = {"time": 1e9, "generation": 0, "node": "node-0", "rank": 0, "step": 6}
    metrics = [{**stamp, SCRIPT: 1.5, "run_loss": 2.0, f"run_{SCRIPT}": 3}]
    _append(run.metrics_path("node-0"), metrics)
    event = {"event": f"broken {SCRIPT}", "reason": SCRIPT, "text": SCRIPT, SCRIPT: SCRIPT}
    saved = {"event": "checkpoint_saved", "tier": SCRIPT, "bytes": 1, "seconds": 1.0}
    failed = {"event": "checkpoint_failed", "tier": SCRIPT}
    _append(run.events_path("node-0"), [{**stamp, **each} for each in (event, saved, failed)])
    (run.path / "FATAL").write_text(f"rank 0 on node-0 exited with code 1 (generation 0): {SCRIPT}\n")
    plan = json.loads(run.plan_path.read_text())
    run.plan_path.write_text(json.dumps({**plan, "kind": SCRIPT, "layout": {"tp": SCRIPT}}))
    launch = json.loads(run.launch_path.read_text())
    leaves = dict.fromkeys(launch["nodes"], SCRIPT)
    run.launch_path.write_text(json.dumps({**launch, "leaves": leaves}))
    return run


def _append(path: Path, lines: list[dict[str, object]]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def test_a_script_in_any_text_of_a_run_is_text(
    serve: Serve, tmp_path: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "FIRST_SECONDS", 60.0)
    write_hostile_run(tmp_path / "runs")
    page = serve(
        verdicts=Verdicts(lambda run: CachedVerdict("dead", f"{run.name} has failed: {SCRIPT}", evidence=(SCRIPT,)))
    )
    body = page.ask("GET", "/runs/hostile")[2]
    assert "<img" not in body
    assert body.count("<script") == body.count("</script>") == 3  # two files and the data of charts
    assert "{{7*7}}" in body  # and not 49
    tab = browser.open(f"{page.address}runs/hostile")
    try:
        tab.wait_for("document.querySelectorAll('#own canvas[data-drawn]').length === 2")
        text = tab.evaluate("document.querySelector('main').innerText")
        assert text.count(SCRIPT) >= 6  # metrics, events, the marker, a tier, the kind
        tab.go(page.address)
        tab.wait_for("document.querySelector('td.why').textContent.includes('<script>alert(1)')")
        assert tab.evaluate("document.querySelectorAll('img, td script').length") == 0
        assert tab.errors == []
    finally:
        tab.close()


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "1e999", "9" * 400, "true", "null", '"text"', "[1]", '{"a": 1}', "-0.0", "1e-320"]
)
def test_a_metric_that_is_not_a_number_breaks_no_chart(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setattr(application, "FIRST_SECONDS", 60.0)
    run = write_run(tmp_path / "runs", "one", nodes=1, ranks_per_node=1, steps=3)
    with open(run.metrics_path("node-0"), "a", encoding="utf-8") as file:
        stamp = '"time":1e9,"step":4,"generation":0,"node":"node-0"'
        file.write(f'{{{stamp},"run_loss":{value},"own":{value},"run_step_seconds":1.0,"rank":0}}\n')
    body = serve().ask("GET", "/runs/one")[2]
    assert "cannot be shown" not in body
    held = body.partition('id="charts">')[2].partition("</script>")[0]
    charts = json.loads(held, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert charts["step"]["x"][-1] == 4
    assert len(charts["loss"]["series"][0]["values"]) == 4


# -- what somebody sends ----------------------------------------------------------------------------------------------


def test_the_token_in_an_address_opens_nothing(serve: Serve, tmp_path: Path, page: PageServer) -> None:
    assert page.ask("POST", f"/runs/one/stop?token={TOKEN}")[0] == 403
    beyond = serve(tmp_path / "runs", beyond=True)
    for path in (f"/?token={TOKEN}", f"/runs/one?token={TOKEN}&secret={TOKEN}", f"/login?token={TOKEN}"):
        status, headers, body = beyond.ask("GET", path)
        assert status == (200 if path.startswith("/login") else 401)
        assert "set-cookie" not in headers
        assert TOKEN not in body
        assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "CONNECT", "PATCH", "PUT", "DELETE", "PROPFIND", "X" * 100])
def test_a_verb_that_no_page_uses_changes_nothing(
    page: PageServer, changes: list[tuple[str, str]], method: str
) -> None:
    known = {"authorization": f"Bearer {TOKEN}"}
    for path in ("/", "/runs/one", "/runs/one/stop", "/login"):
        status, headers, body = page.ask(method, path, **known)
        assert status in (400, 404, 405), (method, path)
        assert TOKEN not in body  # TRACE would send it back
        assert "access-control-allow-origin" not in headers
    assert changes == []


def test_a_verb_in_a_header_is_not_one(page: PageServer, changes: list[tuple[str, str]]) -> None:
    known = {"authorization": f"Bearer {TOKEN}"}
    for name in ("x-http-method-override", "x-http-method", "x-method-override"):
        assert page.ask("GET", "/runs/one/stop", **known, **{name: "POST"})[0] in (404, 405)
    assert changes == []


def test_no_other_origin_is_ever_allowed(page: PageServer) -> None:
    asked = {"origin": "http://evil.example", "access_control_request_method": "POST"}
    asked["access_control_request_headers"] = "authorization, x-craton-secret"
    for method, path in (("OPTIONS", "/runs/one/stop"), ("GET", "/"), ("GET", "/runs/one"), ("GET", "/login")):
        headers = page.ask(method, path, **asked)[1]
        assert not [name for name in headers if name.startswith("access-control-")], path


def test_a_connection_does_not_become_a_websocket(page: PageServer) -> None:
    for path in ("/", "/events", "/runs/one/events"):
        answer = raw(
            page,
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode(),
        )
        assert answer.startswith(b"HTTP/1.1 ")
        assert not answer.startswith(b"HTTP/1.1 101")


def test_no_header_is_injected(page: PageServer) -> None:
    injected = "%0d%0aSet-Cookie:%20stolen=1%0d%0a%0d%0a<script>"
    for path in (f"/runs/{injected}", f"/runs/one/log?source={injected}", f"/static/x/{injected}", f"/{injected}"):
        status, headers, _ = page.ask("GET", path)
        assert status in (400, 404), path
        assert "set-cookie" not in headers
    for line in ("X: a\r\n b: folded", "X\x00: a", "X: a\nSet-Cookie: stolen=1", "Host: evil.example"):
        answer = raw(page, f"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n{line}\r\n\r\n".encode())
        assert b"stolen" not in answer
        assert b"evil.example" not in answer
    assert is_well(page)


def test_nobody_is_redirected_elsewhere(page: PageServer) -> None:
    for path in (
        "//evil.example",
        "//evil.example/",
        "/%2fevil.example/",
        "/\\evil.example/",
        "/runs/one/",
        "/runs//evil.example/",
        "/login?next=http://evil.example",
        "/login/",
        "/static//evil.example/",
    ):
        status, headers, _ = page.ask("GET", path)
        assert status < 500, path
        if "location" in headers:
            assert headers["location"].startswith(f"http://127.0.0.1:{page.port}/"), path


def test_forwarded_headers_are_not_believed(page: PageServer, changes: list[tuple[str, str]]) -> None:
    local = {"x-forwarded-host": "localhost", "x-forwarded-for": "127.0.0.1", "forwarded": "host=localhost"}
    assert page.ask("GET", "/", host="evil.example", **local)[0] == 403
    known = {**page.log_in(), "origin": "http://evil.example", "x-forwarded-host": "evil.example"}
    assert page.ask("POST", "/runs/one/stop", **known)[0] == 403
    assert changes == []


def test_heads_and_addresses_that_are_too_long_are_refused(page: PageServer) -> None:
    for head in (
        f"GET /{'a' * 200_000} HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        f"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {'a' * 200_000}\r\n",
        "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + "".join(f"X-{number}: a\r\n" for number in range(20_000)),
    ):
        assert raw(page, f"{head}\r\n".encode())[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431", b"")
    assert page.ask("GET", f"/runs/{'a' * 5000}")[0] == 404
    assert page.ask("GET", f"/runs/one/log?source={'a' * 5000}")[0] == 404
    assert is_well(page)


def test_a_request_inside_another_is_not_carried_out(page: PageServer, changes: list[tuple[str, str]]) -> None:
    """Two parsers that disagree where a body ends would let one request carry another past a proxy."""
    inner = (
        f"POST /runs/one/stop HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 0\r\n\r\n"
    )
    for lengths in (
        f"Content-Length: {len(inner) + 5}\r\nContent-Length: 0\r\n",
        f"Content-Length: {len(inner) + 5}\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        "Transfer-Encoding: xchunked\r\nContent-Length: 0\r\n",
        "Content-Length: +5\r\n",
        "Content-Length: -1\r\n",
    ):
        answer = raw(page, f"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n{lengths}\r\n0\r\n\r\n{inner}".encode())
        assert answer[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 501", b""), lengths
    assert changes == []
    assert is_well(page)


def test_a_request_is_not_judged_by_half_of_its_headers(page: PageServer, changes: list[tuple[str, str]]) -> None:
    known = page.log_in()
    login = f"Cookie: {known['cookie']}\r\nX-Craton-Secret: {known['x-craton-secret']}\r\nContent-Length: 0\r\n"
    for head in ambiguous_heads(page.port):
        answer = raw(page, f"POST /runs/one/stop HTTP/1.1\r\n{head}{login}\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 400"), head
    for head in foreign_heads(page.port):
        answer = raw(page, f"GET / HTTP/1.1\r\n{head}\r\n".encode("latin-1"))
        assert answer[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 403"), head
    assert changes == []
    assert is_well(page)


def test_bytes_that_are_not_http_and_addresses_of_others_are_refused(page: PageServer) -> None:
    tls_hello = bytes.fromhex("160301020001000001fc0303") + bytes(500)
    http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for request in (
        tls_hello,
        http2,
        b"\x00" * 4096,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\r\n" * 100 + b"x\r\n\r\n",
    ):
        assert raw(page, request)[:10] in (b"HTTP/1.1 4", b""), request[:20]
    for target in ("http://evil.example/", "evil.example:443", "*"):
        answer = raw(page, f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        assert answer[:10] in (b"HTTP/1.1 4", b""), target
    assert is_well(page)


def test_addresses_that_are_not_text_show_no_insides(page: PageServer, tmp_path: Path) -> None:
    for path in (
        "/runs/%00",
        "/runs/%ff%fe",
        "/runs/%ed%a0%80",
        "/runs/%",
        "/runs/%zz",
        "/runs/one/log?source=%ff",
        "/runs/one/log?source=rank-00000.log&begin=%00",
        "/static/%00/%ff",
        "/%c0%ae%c0%ae/%c0%af",
        "/runs/one%2fstop",
    ):
        status, _, body = page.ask("GET", path)
        assert status in (400, 404, 405), path
        assert "Traceback" not in body
        assert str(tmp_path) not in body or status == 404  # the page of no run names the folder of runs
    assert is_well(page)


@pytest.mark.parametrize("since", ["", "x", ".", "1.2.3", "." + "9" * 5000, "%00.%ff", "-1"])
def test_a_stream_begins_whatever_it_is_asked_for(page: PageServer, since: str) -> None:
    for path in (f"/events?since={since}", f"/runs/one/events?mark={since}"):
        answer = raw(page, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 200"), path


def test_a_flood_of_streams_keeps_nobody_else_out(page: PageServer) -> None:
    """Streams are open for long, so that none of them can be closed for being waited for."""
    stream = b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with contextlib.ExitStack() as opened:
        for _ in range(STREAMS_OF_ONE_ADDRESS):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", page.port), timeout=60))
            connection.sendall(stream)
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
        assert raw(page, stream) == b""  # one more of the same address
        answer = raw(page, b"GET /runs/one HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", source="127.0.0.2")
        assert answer.startswith(b"HTTP/1.1 200")


def test_answers_are_neither_kept_nor_guessed(page: PageServer) -> None:
    known = page.log_in()
    for path, kind in (
        ("/", "text/html"),
        ("/runs/one", "text/html"),
        ("/runs/one/log?source=rank-00000.log", "application/json"),  # which holds <b>, and is not a page
        ("/runs/none/log", "application/json"),
    ):
        headers = page.ask("GET", path, **known)[1]
        assert headers["cache-control"] == "no-store", path
        assert headers["content-type"].startswith(kind), path
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["cross-origin-opener-policy"] == "same-origin"
