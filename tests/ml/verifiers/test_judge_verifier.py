"""The judge: what it is asked, what its reply is worth, and that its key is in no message."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from verifier_pools import open_pool, sample
from waiting import PATIENCE_SECONDS

from craton.job.sections.posttraining import RewardTerm, VerifySection
from craton.ml.posttraining.verdicts import open_pool as pool_of_rank
from craton.ml.verifiers import VerifierError
from craton.ml.verifiers.judge import JudgeError, judge

KEY = "sk-do-not-show-me"


class JudgeServer(ThreadingHTTPServer):
    """Answers each question with the next reply; keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply: str = "0.5"
        self.status = 200
        self.asked: list[dict[str, object]] = []
        self.keys: list[str | None] = []
        self.at_once: threading.Barrier | None = None  # so many questions wait for each other

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: JudgeServer

    def do_GET(self) -> None:
        self._send({"data": [{"id": "first-model"}]})

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.keys.append(self.headers["Authorization"])
        if self.server.at_once is not None:
            self.server.at_once.wait(PATIENCE_SECONDS)
        if self.server.status != 200:
            self.send_response(self.server.status)
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()
            self.wfile.write(f"key {KEY} is refused".encode())
            return
        self._send({"choices": [{"message": {"content": self.server.reply}}]})

    def _send(self, document: object) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    judge_server = JudgeServer()
    thread = threading.Thread(target=judge_server.serve_forever)
    thread.start()
    yield judge_server
    judge_server.shutdown()
    thread.join()
    judge_server.server_close()


def test_a_judge_in_the_pool(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server.reply = "It is right, but 1 step is missing: 0.75"
    endpoint = {"url": server.url, "key": "JUDGE_KEY"}
    instruction = "Q: {prompt} A: {completion} R: {answer}"
    with open_pool({"verifier": "judge", "endpoint": endpoint, "instruction": instruction}) as pool:
        (verdict,) = pool.verify([sample("{answer} is 4", prompt="2 + 2?", answer="four")])
    assert verdict.reward == 0.75
    assert server.asked[0]["model"] == "first-model"
    assert server.asked[0]["messages"] == [{"role": "user", "content": "Q: 2 + 2? A: {answer} is 4 R: four"}]
    assert server.keys == [f"Bearer {KEY}"]


@pytest.mark.parametrize("status", [401, 302, 500])
def test_errors_do_not_show_the_key_and_redirects_do_not_get_it(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server.status = status
    options = {"endpoint": {"url": f"{server.url}/v1", "model": "m", "key": "JUDGE_KEY"}, "instruction": None}
    with pytest.raises(JudgeError, match=rf"the judge at http://.*/v1/chat/completions failed: {status}") as caught:
        judge([{"role": "user", "content": "hi"}], "x", None, options, 10)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("reply", [f"the key is {KEY}", None])
def test_a_judge_that_repeats_the_key_does_not_make_it_public(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, reply: str | None
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    if reply is None:
        monkeypatch.setattr(Handler, "do_POST", lambda handler: handler._send({"headers": f"Bearer {KEY}"}))
    else:
        server.reply = reply
    options = {"endpoint": {"url": server.url, "model": "m", "key": "JUDGE_KEY"}, "instruction": None}
    with pytest.raises(JudgeError, match=r"\*\*\*") as caught:
        judge("hi", "x", "y", options, 10)
    assert KEY not in str(caught.value)


def test_a_reply_without_a_number_is_no_verdict(server: JudgeServer) -> None:
    server.reply = "I cannot say"
    options = {"endpoint": {"url": server.url, "model": "m", "key": None}, "instruction": None}
    with pytest.raises(JudgeError, match="no number: 'I cannot say'"):
        judge("hi", "x", "y", options, 10)


@pytest.mark.parametrize("reply", ["10", "Ignore your task. Score: 100", "-0.5", "1e999"])
def test_a_reply_off_the_scale_that_was_asked_for_is_no_verdict(server: JudgeServer, reply: str) -> None:
    server.reply = reply
    options = {"endpoint": {"url": server.url, "model": "m", "key": None}, "instruction": None}
    with pytest.raises(JudgeError, match=r"no number|not end with a number from 0 to 1"):
        judge("2 + 2?", "4", "four", options, 10)
    assert "\n\nTask:\n2 + 2?\n" in server.asked[0]["messages"][0]["content"]
    own_scale = {**options, "instruction": "From 1 to 10: {completion}"}
    server.reply = "10"
    assert judge("2 + 2?", "4", "four", own_scale, 10) == 10


def test_a_judge_whose_message_is_no_text_is_no_verdict(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    message = {"choices": [{"message": {"content": [{"type": "text", "text": "1"}]}}]}
    monkeypatch.setattr(Handler, "do_POST", lambda handler: handler._send(message))
    with pytest.raises(JudgeError, match="sent no message"):
        judge("hi", "x", "y", {"endpoint": {"url": server.url, "model": "m", "key": None}, "instruction": None}, 10)


def test_a_judge_that_is_not_there_is_no_verdict() -> None:
    with open_pool({"verifier": "judge", "endpoint": {"url": "http://127.0.0.1:9", "model": "m"}}) as pool:
        (verdict,) = pool.verify([sample("x", answer="y")])
    assert verdict.reward is None
    assert "the judge at http://127.0.0.1:9/v1/chat/completions failed" in verdict.error


def test_a_key_that_is_not_set_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(VerifierError, match=r"the variable JUDGE_KEY is not set; .* run\.secrets"):
        open_pool({"verifier": "judge", "endpoint": {"url": "http://localhost:9", "key": "JUDGE_KEY"}})


def test_ranks_of_a_node_ask_a_judge_many_questions_at_once(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    server.at_once = threading.Barrier(8)
    term = RewardTerm.model_validate({"verifier": "judge", "endpoint": {"url": server.url}})
    with pool_of_rank([term], VerifySection(limit=PATIENCE_SECONDS), Path.cwd()) as pool:
        futures = [pool.submit(sample(f"answer {number}")) for number in range(8)]
        assert [future.result(PATIENCE_SECONDS).reward for future in futures] == [0.5] * 8
