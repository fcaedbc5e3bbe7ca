"""An evaluation in this process: a real engine, real verifiers, and a run directory that is read again."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path

import pytest
from openai_like_server import Server, openai_like_server
from tiny_models import opened, write_model, write_reward_model, write_suite
from waiting import PATIENCE_SECONDS

from craton.job import ContentError, check_here, load_job
from craton.ml.data import PromptEncoder
from craton.ml.evaluation import EvaluationError, compare_runs, read_evaluation, read_results
from craton.ml.posttraining import RewardModel
from craton.ml.serving.clients import MissingCapabilityError
from craton.telemetry import RunDirectory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


def evaluated(run: Path, model: Path, suite: Path, **section: object) -> dict[str, object]:
    asyncio.run(opened(run, model, suite, **section).run())
    return read_evaluation(RunDirectory(run))


NUMBERS = ("accuracy", "low", "high", "pass_at", "majority_at", "num_scored", "completion_tokens_mean")


def test_an_evaluation_that_was_killed_ends_with_the_same_numbers(tmp_path: Path, model: Path) -> None:
    suite = write_suite(tmp_path)
    whole = evaluated(tmp_path / "whole", model, suite)["strategies"][0]
    assert 0.2 < whole["accuracy"] < 0.8, "so that differences would show"
    assert whole["num_problems"] == whole["num_scored"] == 40
    assert whole["low"] < whole["accuracy"] < whole["high"]
    assert whole["pass_at"]["1"] == pytest.approx(whole["accuracy"])
    assert whole["pass_at"]["1"] < whole["pass_at"]["2"] < whole["pass_at"]["4"]
    lines = (tmp_path / "whole" / "problems.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 40
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "problems.jsonl").write_bytes(b"".join(lines[3:20]) + lines[20][:50])
    ended = evaluated(killed, model, suite)["strategies"][0]
    assert {name: ended[name] for name in NUMBERS} == {name: whole[name] for name in NUMBERS}
    results = list(read_results(killed / "problems.jsonl"))
    assert len(results) == 40, "the half line is evaluated again, the others are not"
    texts = {result.problem: [sample.text for sample in result.samples] for result in results}
    assert texts == {
        result.problem: [sample.text for sample in result.samples]
        for result in read_results(tmp_path / "whole" / "problems.jsonl")
    }
    assert all(len(set(samples)) > 1 for samples in texts.values())
    (comparison,) = compare_runs(RunDirectory(tmp_path / "whole"), RunDirectory(killed))
    assert (comparison["difference"], comparison["p_value"], comparison["num_problems"]) == (0.0, 1.0, 40)


@pytest.mark.slow
def test_a_reward_model_chooses_the_answers(tmp_path: Path, model: Path) -> None:
    reward = write_reward_model(tmp_path / "reward", model)
    rest = "strategies: [best_of:4:liked]\nverifiers: {liked: {model: reward}}\nverify: {limit: 3m}\n"
    run = tmp_path / "run"
    suite = write_suite(tmp_path, problems=6, rest=rest)
    _, best = evaluated(run, model, suite)["strategies"]
    assert best["num_scored"] == 6
    results = [result for result in read_results(run / "problems.jsonl") if result.settings == best["settings"]]
    scorer, encode = RewardModel(reward), PromptEncoder(reward)
    for result in results:
        scores = result.report["scores"]
        prompt = f"What is {result.problem}?"
        (score,) = scorer.score([encode.answered(prompt, result.samples[0].text)])
        assert score == pytest.approx(max(scores), abs=1e-4)
        assert len(set(scores)) > 1
    job = load_job(RunDirectory(run).job_path)
    check_here(job)
    (reward / "tokenizer.json").unlink()
    with pytest.raises(ContentError, match=r"eval\.strategies\[0\]\.score: .*reward has no tokenizer\.json"):
        check_here(job)


def test_a_strategy_chooses_among_the_samples_that_are_evaluated(tmp_path: Path, model: Path) -> None:
    """With the suite's own verifier best-of-n is right where one of the samples is; with its opposite only
    where all are."""
    strategies = "[best_of:4:regex, best_of:2:opposite, {kind: vote, n: 4, answer: text, stop: 'off'}]"
    suite = write_suite(
        tmp_path, rest=f"strategies: {strategies}\nverifiers: {{opposite: {{verifier: regex, field: wrong}}}}\n"
    )
    rows = [json.loads(line) for line in (tmp_path / "problems.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "wrong": r"[^\x00-\x50]$"}) + "\n" for row in rows]
    (tmp_path / "problems.jsonl").write_text("".join(lines))
    run = tmp_path / "run"
    plain, best, worst, vote = evaluated(run, model, suite)["strategies"]
    assert (best["words"], vote["words"]) == ("best_of:4", "vote:4")
    assert best["accuracy"] == pytest.approx(plain["pass_at"]["4"])
    results = list(read_results(run / "problems.jsonl"))
    assert len(results) == 4 * len(rows)
    sampled = {result.problem: result for result in results if result.settings == plain["settings"]}
    all_right = [all(sample.is_right for sample in result.samples[:2]) for result in sampled.values()]
    assert any(all_right)
    assert worst["accuracy"] == pytest.approx(sum(all_right) / len(all_right))
    for entry in (best, worst, vote):
        assert entry["num_evaluated"] == len(rows)
        for result in (result for result in results if result.settings == entry["settings"]):
            same = sampled[result.problem]
            samples = same.samples[: result.num_samples]
            assert result.num_samples == entry["n"] == result.report["n"]
            assert result.completion_tokens == sum(sample.tokens for sample in samples)
            assert result.samples[0].text in [sample.text for sample in samples]
    texts = {result.problem: result.samples[0].text for result in results if result.settings == vote["settings"]}
    for problem, text in texts.items():
        counts = [sample.text.strip() for sample in sampled[problem].samples]
        assert counts.count(text.strip()) == max(map(counts.count, counts))


def test_an_endpoint_without_seeds_is_evaluated_without_them(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, problems=3, samples=2, rest="strategies: [{kind: vote, n: 4, answer: text}]\n")
    with openai_like_server() as server:
        asyncio.run(opened(tmp_path / "run", None, suite, endpoint={"url": server.url}).run())
        sent = [body for body in server.behaviour.received if body.get("prompt") == "What is 1?"]
    found = read_evaluation(RunDirectory(tmp_path / "run"))
    assert not found["has_seeds"]
    plain, vote = found["strategies"]
    assert plain["accuracy"] == vote["accuracy"] == 1.0, "each answer ends with a blank"
    assert vote["completion_tokens_mean"] == 6
    assert len({body["seed"] for body in sent}) == len(sent) == 4, "two samples, and two of a vote, none with its own"


@pytest.mark.parametrize(
    ("strategy", "missing"),
    [
        ("best_of:2", "does not give logprobs"),
        ("budget:10-20", "does not give token ids"),
        ({"kind": "tree", "n": 4, "score": "regex"}, None),
    ],
)
def test_what_an_endpoint_lacks_for_a_strategy_is_found_before_the_plain_samples(
    tmp_path: Path, strategy: object, missing: str | None
) -> None:
    suite = write_suite(tmp_path, problems=3, samples=1)
    with openai_like_server() as server:
        evaluation = opened(tmp_path / "run", None, suite, endpoint={"url": server.url}, strategies=[strategy])
        if missing is None:
            asyncio.run(evaluation.run())
        else:
            with pytest.raises(MissingCapabilityError, match=missing):
                asyncio.run(evaluation.run())
        prompts = [str(body.get("prompt")) for body in server.behaviour.received]  # also those of trials
    asked = [prompt for prompt in prompts if prompt.startswith("What is")]
    assert bool(asked) == (missing is None)


def test_results_of_other_settings_or_problems_are_not_reused(tmp_path: Path, model: Path) -> None:
    suite = write_suite(tmp_path, problems=6, samples=2)
    run = tmp_path / "run"
    evaluated(run, model, suite)
    other = evaluated(run, model, suite, seed=1)["strategies"][0]
    assert other["num_evaluated"] == 6
    assert len(list(read_results(run / "problems.jsonl"))) == 12
    evaluated(tmp_path / "third", model, write_suite(tmp_path / "b", problems=6, rest="threshold: 0.5\n"))
    with pytest.raises(EvaluationError, match="no problem in common"):
        compare_runs(RunDirectory(run), RunDirectory(tmp_path / "third"))


def test_a_verifier_that_fails_is_counted_and_not_scored(tmp_path: Path, model: Path) -> None:
    suite = write_suite(tmp_path, problems=8, samples=2)
    rows = [json.loads(line) for line in (tmp_path / "problems.jsonl").read_text().splitlines()]
    for row in rows[:3]:
        row["answer"] = "["
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = evaluated(tmp_path / "some", model, suite)["strategies"][0]
    assert (entry["num_failures"], entry["num_scored"], entry["num_evaluated"]) == (6, 5, 8)
    assert "not a regular expression" in entry["errors"][0]["error"]
    for row in rows:
        row["answer"] = "["
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for _ in range(2):  # resumed, with the reason still there
        with pytest.raises(EvaluationError, match=r"16 of 16 samples \(100%\) got no verdict; first errors: .*regular"):
            evaluated(tmp_path / "all", model, suite)


def test_what_got_no_verdict_is_asked_again_by_a_resumed_evaluation(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, problems=40, samples=1)
    run, endpoint = tmp_path / "run", {}
    with openai_like_server() as server:
        asyncio.run(
            opened(tmp_path / "trial", None, write_suite(tmp_path / "a", 1, 1), endpoint={"url": server.url}).run()
        )
        trials = len(server.behaviour.received)
        server.behaviour.received.clear()
        endpoint["url"] = server.url
        server.behaviour.fails = {trials + number: "500" for number in range(-1, 40)}
        with pytest.raises(EvaluationError, match=r"got no verdict; first errors: .*HTTP 500"):
            asyncio.run(opened(run, None, suite, endpoint=endpoint).run())
        server.behaviour.fails = {}
        asyncio.run(opened(run, None, suite, endpoint=endpoint).run())
    (entry,) = read_evaluation(RunDirectory(run))["strategies"]
    assert (entry["num_failures"], entry["num_scored"], entry["accuracy"]) == (0, 40, 1.0)


def test_a_full_disk_holds_an_evaluation_back_and_loses_nothing(tmp_path: Path, small_disk: Path) -> None:
    suite = write_suite(tmp_path, problems=10, samples=2)
    filler = small_disk / "filler"

    def asked(server: Server) -> int:
        return sum(str(body.get("prompt")).startswith("What is") for body in server.behaviour.received)  # no trials

    async def work(server: Server) -> None:
        evaluation = opened(small_disk / "run", None, suite, endpoint={"url": server.url}, concurrency=4)
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        run = asyncio.create_task(evaluation.run())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while evaluation._num_done < 2 and not run.done():
                await asyncio.sleep(0.05)
            assert not run.done()
            assert asked(server) == 4, "two problems at once, and no third one"
            filler.unlink()
            await run

    with openai_like_server() as server:
        asyncio.run(work(server))
        assert asked(server) == 20, "no sample was asked again"
    (entry,) = read_evaluation(RunDirectory(small_disk / "run"))["strategies"]
    assert (entry["num_evaluated"], len(list(read_results(small_disk / "run" / "problems.jsonl")))) == (10, 10)


def test_the_interval_that_is_shown_is_of_this_setting_and_of_half_of_its_problems_or_more(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = write_suite(tmp_path, problems=9, samples=1, rest="strategies: [{kind: vote, n: 2, answer: text}]\n")
    evaluation, entries = opened(tmp_path / "run", model, suite), []
    monkeypatch.setattr(evaluation._recorder, "metrics", lambda step, **entry: entries.append((step, entry)))
    asyncio.run(evaluation.run())
    with_interval = {step for step, entry in entries if "run_evaluation_accuracy_low" in entry}
    assert with_interval >= {1, 2, 4, 8, 9, 9 + 1, 9 + 2, 9 + 4, 9 + 8, 9 + 9}
