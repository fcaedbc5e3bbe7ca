"""`craton think` against a foreign endpoint: what it prints, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from openai_like_server import Behaviour, openai_like_server
from waiting import PATIENCE_SECONDS

from craton.cli import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["craton", "think", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_a_vote_and_what_it_cost(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = "{kind: vote, n: 5, answer: text}"
    with openai_like_server() as server:
        asked = ["--prompt", "Hello", "--strategy", strategy, "--sample-tokens", "3", "--price", "1,1000000"]
        assert run(monkeypatch, server.url, *asked) == 0
        text = capsys.readouterr().out
        assert run(monkeypatch, server.url, *asked, "--json", "--system", "Be short.") == 0
        found = json.loads(capsys.readouterr().out)
        sent = server.behaviour.received[-1]["messages"]
    assert text.startswith('wör"d wör"d wör"d\n')
    assert "answer" in text
    assert "stopped after 2 of 5 samples" in text
    assert "tokens chosen" in text
    assert found["report"]["votes"] == {'wör"d wör"d wör"d': 2}
    assert (found["usage"]["completion_tokens"], found["usage"]["num_samples"]) == (6, 2)
    assert found["dollars"] == pytest.approx(6.0, rel=1e-3)
    assert found["limited_by"] == ""
    assert [message["role"] for message in sent] == ["system", "user"]


def test_a_verifier_scores(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "verifiers.yaml"
    file.write_text("verifiers: {word: {verifier: regex, pattern: 'w.r'}}\nverify: {workers: 1}\n")
    (tmp_path / "prompt.txt").write_text("Hello")
    with openai_like_server() as server:
        asked = [server.url, "--file", str(tmp_path / "prompt.txt"), "--sample-tokens", "2", "--verifier", str(file)]
        assert run(monkeypatch, *asked, "--strategy", "best_of:2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["report"]["scores"] == [1.0, 1.0]
    assert found["strategy"]["score"] == "word"


def test_a_judge_that_answers_nonsense(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its reply is a stream of events, or a completion in place of a chat."""
    with openai_like_server() as server, openai_like_server() as judge:
        file = tmp_path / "judge.yaml"
        file.write_text(f"verifiers: {{judge: {{verifier: judge, endpoint: {{url: {judge.url}}}}}}}\n")
        asked = [server.url, "--prompt", "Hello", "--strategy", "best_of:2:judge", "--sample-tokens", "2"]
        assert run(monkeypatch, *asked, "--verifier", str(file)) == 2
        streamed = capsys.readouterr().err
        judge.behaviour.streams = False
        assert run(monkeypatch, *asked, "--verifier", str(file)) == 2
        other = capsys.readouterr().err
    assert "error: none of 2 samples got a score; first errors: judge: the judge at" in streamed
    assert "its reply is not JSON; the URL must be that of an OpenAI-compatible server" in streamed
    assert "error: none of 2 samples got a score; first errors: judge: the judge" in other
    assert (streamed.count("\n"), other.count("\n")) == (1, 1)


TREE = "{kind: tree, n: 6, width: 2, depth: 3, step: {tokens: 2}}"


def test_a_tree_continues_the_message_of_a_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "verifiers.yaml"
    file.write_text("verifiers: {word: {verifier: regex, pattern: 'w.r'}}\nverify: {workers: 1}\n")
    asked = ["--prompt", "Hello", "--strategy", TREE, "--sample-tokens", "6", "--verifier", str(file)]
    with openai_like_server(Behaviour(continues_messages=True)) as server:
        assert run(monkeypatch, server.url, *asked, "--json") == 0
        sent = [body for body in server.behaviour.received if body["max_tokens"] == 2 and "seed" in body]
    found = json.loads(capsys.readouterr().out)
    assert found["report"]["branches"] == 7, "6, and the best one to its end"
    assert found["answer"] == 'wör"d ' * 6
    first, last = sent[0], sent[-1]
    assert [message["role"] for message in first["messages"]] == ["user"]
    assert "continue_final_message" not in first
    assert last["messages"][-1] == {"role": "assistant", "content": 'wör"d ' * 2}
    assert (last["continue_final_message"], last["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize(
    ("behaviour", "strategy", "line"),
    [
        ({}, TREE, "cannot continue the message of a chat, as every step of a search does"),
        ({"continues_messages": True, "usage": False}, TREE, "or use vLLM, SGLang or a Craton server"),
        (
            {"continues_messages": True, "keeps_white_space": False},
            "tree:4",
            "removes white space at the end of the message that it continues, and each step ends with '\\n\\n'; give",
        ),
    ],
)
def test_a_search_says_why_an_endpoint_cannot_continue(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    behaviour: dict[str, bool],
    strategy: str,
    line: str,
) -> None:
    file = tmp_path / "verifiers.yaml"
    file.write_text("verifiers: {word: {verifier: regex, pattern: 'w.r'}}\nverify: {workers: 1}\n")
    with openai_like_server(Behaviour(**behaviour)) as server:  # type: ignore[arg-type]
        asked = ["--prompt", "Hello", "--strategy", strategy, "--sample-tokens", "77", "--verifier", str(file)]
        assert run(monkeypatch, server.url, *asked) == 2
        assert not [body for body in server.behaviour.received if body["max_tokens"] in (2, 77) and "seed" in body]
    errors = capsys.readouterr().err
    assert line in errors
    assert errors.count("\n") == 1


def test_a_vote_without_answers_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with openai_like_server() as server:
        assert run(monkeypatch, server.url, "--prompt", "Hello", "--strategy", "vote:2", "--sample-tokens", "2") == 0
    assert "no sample has an answer to count, so this is the first" in capsys.readouterr().out


def test_the_limit_in_seconds_holds_for_trials_of_an_endpoint_that_hangs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with openai_like_server(Behaviour(first_seconds=PATIENCE_SECONDS)) as server:
        asked = [server.url, "--prompt", "Hello", "--strategy", "best_of:2", "--max-seconds", "0.2s"]
        assert run(monkeypatch, *asked) == 0
        assert len(server.behaviour.received) == 1
    assert "ended by the limit in seconds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--strategy", "vote:0"], "--strategy.n: '0' is not a whole number from 1 to 1024"),
        (["--strategy", "{kind: vote"], "--strategy:"),
        (["--strategy", "best_of:2:math"], "--strategy: 'math' is not known; name it with --verifier"),
        (["--max-dollars", "1"], "--max-dollars needs the endpoint's prices; add --price IN,OUT"),
        (["--price", "1"], "--price: '1' is not IN,OUT"),
        (["--max-seconds", "soon"], "--max-seconds: 'soon' is not a duration"),
        (["--verifier", "mth"], "--verifier: 'mth' is not a verifier"),
        (["--verifier", "judge"], "--verifier: 'judge' is not a verifier"),
        (["--key", "NO_SUCH_KEY"], "--key: the variable NO_SUCH_KEY is not set"),
        (["--file", "x"], "give the prompt with either --prompt or --file"),
        (["--completion", "--system", "x"], "--system is a message of a chat"),
        (["--strategy", "best_of:2"], "does not give logprobs"),
        (["--strategy", "budget:3"], "does not give token ids"),
    ],
)
def test_mistakes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], line: str
) -> None:
    with openai_like_server(Behaviour()) as server:
        assert run(monkeypatch, server.url, "--prompt", "Hello", "--sample-tokens", "77", *options) == 2
        assert not [body for body in server.behaviour.received if body["max_tokens"] == 77]
    assert line in capsys.readouterr().err


def test_a_server_that_is_gone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with openai_like_server(Behaviour(lists_models=False)) as server:
        assert run(monkeypatch, server.url, "--prompt", "Hello") == 2
    assert "error: " in capsys.readouterr().err


def test_a_reward_model_that_cannot_score(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The folder is no reward model, or has no chat template; a real one is tested with a server."""
    folder, file = tmp_path / "reward", tmp_path / "verifiers.yaml"
    folder.mkdir()
    file.write_text("verifiers: {rm: {model: reward}}\n")
    with openai_like_server() as server:
        asked = [server.url, "--prompt", "Hello", "--strategy", "best_of:2", "--verifier", str(file)]
        assert run(monkeypatch, *asked) == 2
        assert f"error: {folder}: has no config.json; give a folder" in capsys.readouterr().err
        config = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
        (folder / "config.json").write_text(json.dumps(config))
        for name in ("model.safetensors", "tokenizer.json"):
            (folder / name).touch()
        assert run(monkeypatch, *asked) == 2
        assert f"error: --verifier: {folder} has no chat template; put a chat_template.jinja" in capsys.readouterr().err
