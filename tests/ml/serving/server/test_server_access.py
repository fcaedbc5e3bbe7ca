"""Who may send which request: Host, Origin and keys, sent to a real front end as an attacker would send them."""

from __future__ import annotations

import http.client
import stat
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests
from raw_http import ambiguous_heads, foreign_heads, raw_answer
from scripted_engine import ADMIN, ADMIN_KEY, SECONDS, Served
from waiting import wait_until

from craton.ml.serving.messages import Control, EngineReply, Stats
from craton.ml.serving.server.access import ADMIN_VARIABLE, KEYS_VARIABLE
from craton.ml.serving.server.front import main

Start = Callable[..., Served]


def ask(served: Served, method: str, path: str, **headers: str) -> tuple[int, str]:
    """One request with exactly these headers; `host` replaces the right one."""
    address = urlsplit(served.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=SECONDS)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"host": address.netloc, **headers}.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


@pytest.mark.parametrize(
    "host", ["attacker.example", "attacker.example:8000", "127.0.0.1.attacker.example", "10.0.0.1"]
)
def test_on_loopback_other_names_are_refused_everywhere(served: Served, host: str) -> None:
    for method, path in (("GET", "/health"), ("GET", "/metrics"), ("GET", "/v1/models"), ("POST", "/pause")):
        assert ask(served, method, path, host=host, authorization=ADMIN["Authorization"])[0] == 403
    assert not [message for message in served.engine.received if isinstance(message, Control)]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:8000"])
def test_on_loopback_its_own_names_are_known(served: Served, host: str) -> None:
    assert ask(served, "GET", "/v1/models", host=host)[0] == 200


def test_a_request_is_not_judged_by_half_of_its_headers(served: Served) -> None:
    port = urlsplit(served.url).port or 0
    own, other = f"127.0.0.1:{port}", "attacker.example"
    key = f"Authorization: {ADMIN['Authorization']}\r\nContent-Length: 0\r\n"
    for head in ambiguous_heads(port):
        answer = raw_answer(port, f"POST /pause HTTP/1.1\r\n{head}{key}\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 400"), head
    for head in [*foreign_heads(port), ""]:
        answer = raw_answer(port, f"POST /pause HTTP/1.1\r\n{head}{key}\r\n".encode("latin-1"))
        assert answer[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 403"), head
    for target, host, status in (
        (f"http://{other}/pause", own, 403),  # the target counts, as RFC 9112 has it
        (f"http://{own}@{other}/pause", own, 403),
        (f"HTTP://{other}?/pause", own, 400),
        (f"http://{own}/live", other, 200),
    ):
        method = "GET" if status == 200 else "POST"
        answer = raw_answer(port, f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n{key}\r\n".encode())
        assert answer.startswith(f"HTTP/1.1 {status}".encode()), target
    assert not [message for message in served.engine.received if isinstance(message, Control)]


FOREIGN: list[dict[str, str]] = [
    {"origin": "https://attacker.example"},
    {"origin": "http://localhost:3000"},
    {"origin": "null"},
    {"origin": "file://"},
    {"sec_fetch_site": "cross-site"},
    {"sec_fetch_site": "same-site"},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
@pytest.mark.parametrize("path", ["/sleep?level=2", "/v1/completions", "/tokenize", "/reset_prefix_cache"])
def test_what_a_page_of_another_site_sends_is_refused(served: Served, path: str, headers: dict[str, str]) -> None:
    status, said = ask(served, "POST", path, authorization=ADMIN["Authorization"], **headers)
    assert (status, "foreign_origin" in said) == (403, True)
    assert served.engine.received == []


def test_a_page_of_its_own_and_a_program_may_send(served: Served) -> None:
    own = {"origin": served.url, "sec_fetch_site": "same-origin"}
    assert ask(served, "POST", "/reset_prefix_cache", authorization=ADMIN["Authorization"], **own)[0] == 200
    assert ask(served, "POST", "/reset_prefix_cache", authorization=ADMIN["Authorization"])[0] == 200


@pytest.mark.parametrize("key", ["", "Bearer", "Bearer ", "Bearer wrong", f"Basic {ADMIN_KEY}", ADMIN_KEY])
def test_no_admin_endpoint_opens_without_the_admin_key(served: Served, key: str) -> None:
    described = requests.get(f"{served.url}/openapi.json", timeout=SECONDS).json()["paths"]
    tagged = [
        (method.upper(), path)
        for path, methods in described.items()
        for method, operation in methods.items()
        if "admin" in operation.get("tags", ())
    ]
    assert ("POST", "/sleep") in tagged
    for method, path in tagged:
        for variant in (path, path.replace("s", "%73", 1), f"{path}?level=2"):
            status, said = ask(served, method, variant, authorization=key)
            assert (status, "invalid_admin_key" in said) == (401, True), (method, variant)
    assert not [message for message in served.engine.received if isinstance(message, Control)]


def test_what_would_be_open_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*options: str, **environment: str) -> str:
        """What a front end says that does not begin."""
        for name in (KEYS_VARIABLE, ADMIN_VARIABLE):
            monkeypatch.setenv(name, environment.get(name, ""))
        assert main(["--connection", "0", "--port", "0", *options]) == 2
        return capsys.readouterr().err

    assert "clients need an API key" in refused("--host", "0.0.0.0")
    assert "--admin needs a key" in refused("--admin")
    long = "k" * 20
    assert "also an API key" in refused("--admin", CRATON_ADMIN_KEY=long, CRATON_API_KEYS=f"other,{long}")
    assert "the minimum is 16" in refused("--admin", CRATON_ADMIN_KEY="short")
    readable = tmp_path / "admin.key"
    readable.write_text("a-key-that-others-can-read\n")
    readable.chmod(0o644)
    assert "chmod 600" in refused("--admin", "--admin-key-file", str(readable))


def test_an_admin_key_is_made_once_and_kept_to_its_owner(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "admin.key"
    served = start("--admin", "--admin-key-file", str(path), environment={"CRATON_ADMIN_KEY": ""})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = path.read_text().strip()
    assert ask(served, "POST", "/pause", authorization=f"Bearer {key}")[0] == 200
    command = Path(f"/proc/{served.process.pid}/cmdline").read_bytes().decode()
    assert key not in command
    served.signal()
    status, said = served.wait()
    assert (status, key in said) == (0, False)


def test_beyond_loopback_probes_are_open_and_the_rest_needs_the_key(start: Start) -> None:
    served = start("--host", "0.0.0.0", environment={"CRATON_API_KEYS": "the-key"})
    served.url = served.url.replace("0.0.0.0", "127.0.0.1")
    wait_until(lambda: ask(served, "GET", "/health")[0] == 200)
    for path in ("/health", "/ping", "/live", "/metrics"):
        assert ask(served, "GET", path, host="any.name.example")[0] == 200
    for path in ("/v1/models", "/version", "/openapi.json", "/docs"):
        assert ask(served, "GET", path)[0] == 401
        assert ask(served, "GET", path, host="any.name.example", authorization="bearer the-key")[0] == 200


@pytest.mark.parametrize(
    ("stats", "status"),
    [
        (Stats(state="asleep"), "asleep"),
        (Stats(state="paused"), "paused"),
        (Stats(refusal="sleep level 2 discarded the weights"), "without weights"),
    ],
)
def test_a_server_that_cannot_answer_is_alive_and_not_ready(served: Served, stats: Stats, status: str) -> None:
    served.engine.send(stats)
    wait_until(lambda: requests.get(f"{served.url}/health", timeout=SECONDS).status_code == 503)
    for path, expected in (("/health", 503), ("/ping", 503), ("/live", 200)):
        answer = requests.get(served.url + path, timeout=SECONDS)
        assert (answer.status_code, answer.json()["status"]) == (expected, status)
        assert answer.json()["reason"]
    served.engine.send(Stats())
    wait_until(lambda: requests.get(f"{served.url}/health", timeout=SECONDS).status_code == 200)


def test_waking_says_what_is_missing_and_health_knows_at_once(served: Served) -> None:
    missing = {"state": "running", "missing": {"weights": "discarded; POST /update_weights"}}
    served.engine.control = lambda control: EngineReply(control.id, missing)
    woken = requests.post(f"{served.url}/wake_up", headers=ADMIN, timeout=SECONDS).json()
    assert (woken["status"], woken["missing"]) == ("without weights", missing["missing"])
    assert requests.get(f"{served.url}/health", timeout=SECONDS).json()["status"] == "without weights"
    update = {"folder": "/weights"}
    assert requests.post(f"{served.url}/update_weights", json=update, headers=ADMIN, timeout=SECONDS).status_code == 200
    assert requests.get(f"{served.url}/health", timeout=SECONDS).status_code == 200


def test_one_model_by_name(served: Served) -> None:
    for name in ("scripted", "painter"):
        assert served.client().models.retrieve(name).id == name
    answer = requests.get(f"{served.url}/v1/models/none/such", timeout=SECONDS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
