"""Suites: what a file may say, the built-in ones, and problems as functions of suite and data."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path

import pytest

from craton.errors import CratonError
from craton.job import ContentError, JobError
from craton.job.sections.suites import BUILT_IN_SUITES, load_suite
from craton.ml.evaluation import EvaluationError, open_problems
from craton.ml.evaluation.problems import arithmetic_rows
from craton.ml.verifiers import VerifierPool, VerifierSample


def written(folder: Path, text: str, rows: list[dict[str, object]] | None = None) -> Path:
    if rows is not None:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_mistakes_have_their_line_and_the_nearest_name(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "data: {path: x.jsonl, problms: 3}\nreward: exat\nanswer: boxd\nsampling: {samples: 4, temperature: 0}\n"
        "strategies: [vote:0]\n",
    )
    with pytest.raises(ContentError) as caught:
        load_suite(str(path))
    lines = [problem.partition("mine.yaml:")[2] for problem in caught.value.problems]
    assert [line.split(":")[0] for line in lines] == ["1", "2", "3", "4", "5"]
    assert "did you mean 'problems'" in lines[0]
    assert "did you mean 'exact'" in lines[1]
    assert "did you mean 'boxed'" in lines[2]
    assert "4 samples at temperature 0 are all the same" in lines[3]
    path = written(tmp_path, "data: {path: x.jsonl}\nreward: exact\nstrategies: [vote:4, best_of:8:exakt]\n")
    with pytest.raises(ContentError, match=r"mine.yaml:3: strategies\[1\].score: no verifier .*did you mean 'exact'"):
        load_suite(str(path))
    path = written(tmp_path, "data: {path: x.jsonl}\nreward: exact\nverifiers: {mine: {model: folder}}\n")
    assert load_suite(str(path)).verifiers["mine"].model == str(path.parent / "folder")
    with pytest.raises(JobError, match="built in: arithmetic, code, json, reasoning; did you mean 'arithmetic'"):
        load_suite("arithmetics")
    with pytest.raises(JobError, match=r"sampling.*8 samples at temperature 0"):
        load_suite("arithmetic").sampling.changed(samples=8, temperature=0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('template: "{q} {c}"', r"rows.jsonl:1: has no field 'c', which the template names; its fields: 'q', 'a'"),
        ("", r"rows.jsonl:1: has no prompt .* its fields are 'q', 'a': name the column under columns"),
        ('template: "{q}"', r"rows.jsonl:1: has no field 'answer', which verifier exact compares with; .* columns"),
        ("columns: {answer: b}", r"rows.jsonl:1: has no field 'b', which columns names"),
    ],
)
def test_rows_with_missing_fields_are_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, f"data: {{path: rows.jsonl}}\nreward: exact\n{text}\n", [{"q": "1+1", "a": "2"}])
    with pytest.raises(EvaluationError, match=message) as caught:
        open_problems(load_suite(str(path)))
    assert "\n" not in str(caught.value)


def test_files_without_problems_are_one_clear_line(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    path = written(tmp_path, 'data: {path: rows.jsonl}\ntemplate: "{q}"\nreward: exact\n', [{"q": "1", "answer": None}])
    suite = load_suite(str(path))
    for make, message in (
        (lambda: None, r"rows.jsonl:1: has only null in the field 'answer', which verifier exact compares with"),
        (lambda: rows.write_text(""), r"rows.jsonl is empty; write one problem per line"),
        (lambda: (rows.unlink(), os.mkfifo(rows)), r"rows.jsonl is a device or a pipe"),
    ):
        make()
        with pytest.raises(EvaluationError, match=message):
            open_problems(suite)


def test_problems_are_rows_of_any_column_names(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"q": f"{number}+1", "a": str(number + 1)} for number in range(5)]
    path = written(
        tmp_path,
        'data: {path: rows.jsonl, problems: 4}\ntemplate: {chat: "Solve {{x}}: {q}", system: "Be short."}\n'
        "columns: {answer: a}\nreward: exact\n",
        rows,
    )
    problems = open_problems(load_suite(str(path)), limit=3)
    assert [problem.row["answer"] for problem in problems] == ["1", "2", "3"]
    assert problems[1].content == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Solve {x}: 1+1"},
    ]
    assert len({problem.digest for problem in problems}) == 3


def test_no_two_problems_share_the_seed_of_a_sample() -> None:
    problems = open_problems(load_suite("arithmetic"), limit=200)
    seeds = [problem.seed(suite) + sample for suite in (0, 1, 8191) for problem in problems for sample in range(1024)]
    assert len(seeds) == len(set(seeds))
    assert max(seeds) < 2**53


def test_arithmetic_has_sums_of_each_size() -> None:
    rows = list(islice(arithmetic_rows(0, (1, 3)), 100))
    assert {len(str(row["a"])) for row in rows[1::2]} == {3}
    assert all(int(row["answer"]) == row["a"] + row["b"] for row in rows)
    assert rows[:4] == list(islice(arithmetic_rows(0, (1, 3)), 4)) != list(islice(arithmetic_rows(1, (1, 3)), 4))


@pytest.mark.slow
def test_built_in_problems_are_solvable_and_verified() -> None:
    """Every program passes its tests, every schema accepts its constants, and neither accepts anything."""
    assert BUILT_IN_SUITES == ("arithmetic", "code", "json", "reasoning")
    for name, count in (("code", 30), ("json", 30)):
        suite = load_suite(name)
        problems = open_problems(suite)
        assert len(problems) == count
        rows = [problem.row for problem in problems]
        known = [row.get("solution") or json.dumps(row["schema"]["const"]) for row in rows if _is_known(row)]
        assert len(known) >= 10
        chosen = [problem for problem in problems if _is_known(problem.row)]
        with VerifierPool(suite.reward, suite.verify) as pool:
            pairs = zip(chosen, known, strict=True)
            right = [VerifierSample(problem.content, f"```\n{text}\n```", problem.row) for problem, text in pairs]
            wrong = [VerifierSample(problem.content, "I do not know.", problem.row) for problem in problems[:3]]
            assert {verdict.reward for verdict in pool.verify(right)} == {1.0}
            assert {verdict.reward for verdict in pool.verify(wrong)} == {0.0}


def _is_known(row: object) -> bool:
    assert isinstance(row, dict)
    return "solution" in row or "const" in row["schema"]


def test_reasoning_tasks_need_their_package_or_are_generated() -> None:
    suite = load_suite("reasoning")
    try:
        import reasoning_gym  # noqa: F401
    except ImportError:
        with pytest.raises(CratonError, match=r"needs reasoning_gym, which is not installed; run: .*reasoning"):
            open_problems(suite)
        return
    from craton.ml.evaluation.reasoning import score

    problems = open_problems(suite, limit=16)
    assert {problem.group for problem in problems} == set(suite.data.tasks)
    for problem in problems:
        answer = f"So <answer>no</answer>, no: <answer> {problem.row['answer']} </answer>"
        assert score(problem.content, answer, problem.row) >= suite.threshold
        assert score(problem.content, "<answer>no idea</answer>", problem.row) < suite.threshold
