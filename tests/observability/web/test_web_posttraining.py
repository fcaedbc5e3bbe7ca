"""What the page and `top` show of a run of reinforcement learning or on preferences, and what of any other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from page_server import PageServer
from rich.console import Console
from simulated_runs import write_run

from craton.observability.web.charts import RESULT_CHARTS, training_charts
from craton.observability.web.readers import History
from craton.observability.web.terminal import TopView, frame, frame_json
from craton.telemetry import RunDirectory
from craton.telemetry.rank import SampleRecorder


def page_of(serve: Callable[..., PageServer], name: str) -> str:
    server = serve()
    status, _, html = server.ask("GET", f"/runs/{name}", **server.log_in())
    assert status == 200
    return html


def test_the_page_shows_rewards_samples_and_their_verdicts(serve: Callable[..., PageServer], tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "math", kind="grpo", steps=40)
    html = page_of(serve, "math")
    for title in ("Reward", "KL divergence from the reference", "Idle share of the step", "Rollout tokens per second"):
        assert title in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in html
    assert "<script>alert(1)" not in html
    assert "timeout after 10 s" in html
    assert "characters …" in html  # of the long completion
    assert html.index(">rollout<") < html.index(">compute<")  # phases in the order of a step


@pytest.mark.parametrize(("kind", "shown"), [("pretrain", set()), ("dpo", {"accuracy", "margin", "pair"})])
def test_a_run_shows_only_what_its_kind_has(
    serve: Callable[..., PageServer], tmp_path: Path, kind: str, shown: set[str]
) -> None:
    run = write_run(tmp_path / "runs", "other", kind=kind, steps=40)
    assert set(training_charts(History(run).look(), {})) & RESULT_CHARTS.keys() == shown
    html = page_of(serve, "other")
    assert '<section data-optional hidden aria-labelledby="h-samples">' in html
    assert ">rollout<" not in html


def test_the_page_shows_each_term_of_the_reward(serve: Callable[..., PageServer], tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs", "math", kind="grpo", steps=40)
    lines = run.metrics_path("node-0").read_text(encoding="utf-8").splitlines()
    shown = [
        json.dumps({**line, "run_term_reward/math": 0.25, "run_term_reward/my:reward": 0.5,
                    "run_term_failure_share/math": 0, "run_term_failure_share/my:reward": 0.125})
        for line in map(json.loads, lines)
    ]  # fmt: skip
    run.metrics_path("node-0").write_text("\n".join([*shown, ""]), encoding="utf-8")
    charts = training_charts(History(run).look(), {})
    assert [line["name"] for line in charts["terms"]["series"]] == ["math", "my:reward"]
    assert charts["terms"]["newest"] == "math 0.25 · my:reward 0.50"
    assert charts["failures"]["newest"] == "math 0% · my:reward 12%"
    assert not [name for name in charts if name.startswith("own ")], "they are no custom metrics"
    html = page_of(serve, "math")
    assert "Reward by term" in html
    assert "0.50 (12% failed)" in html


def test_a_training_shows_the_evaluations_of_its_suite(serve: Callable[..., PageServer], tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs", "tuned", kind="sft", steps=40)
    chart = training_charts(History(run).look(), {})["suite"]
    assert [line["name"] for line in chart["series"]] == ["accuracy", "95% interval, low", "95% interval, high"]
    assert sum(value is not None for value in chart["series"][0]["values"]) == 2
    table = page_of(serve, "tuned").partition("Evaluations of the suite")[2].partition("</table>")[0]
    rows = [re.sub(r"<[^>]+>", " ", row).split() for row in table.split("<tr>")[2:]]
    assert [row[0] for row in rows] == ["40", "20"], "the newest first"
    assert rows[1] == ["20", "37%", "32%", "to", "42%", "200", "51.2k", "12.0", "s", "1%"]
    write_run(tmp_path / "runs", "plain", steps=40)
    assert '<section data-optional hidden aria-labelledby="h-suite">' in page_of(serve, "plain")


def test_top_shows_the_accuracy_on_a_suite_with_its_interval(tmp_path: Path) -> None:
    run = write_run(tmp_path, "tuned", kind="sft", steps=40)
    console = Console(width=200, record=True)
    look = TopView(run, examine=lambda run, prometheus: None).look()  # type: ignore[arg-type, return-value]
    console.print(frame(look, 160, rows=None, has_color=False))
    assert "suite accuracy 0.47 (0.42 to 0.52)" in console.export_text()


def test_samples_that_anyone_may_have_written_do_not_break_the_page(
    serve: Callable[..., PageServer], tmp_path: Path
) -> None:
    run = write_run(tmp_path / "runs", "math", kind="grpo", steps=5)
    run.samples_path("node-0").unlink()
    run.samples_path("node-0").symlink_to("/etc/passwd")
    run.samples_path("node-1").write_text('{"step": 1, "prompt": [], "completion": "x"}\n{"step": 2, "pro')
    assert "passwd" not in page_of(serve, "math").partition("h-samples")[2].partition("h-phases")[0]


def test_top_shows_the_results_and_the_phases_of_rollouts(tmp_path: Path) -> None:
    run = write_run(tmp_path, "math", kind="grpo", steps=20)
    look = TopView(run, examine=lambda run, prometheus: None).look()  # type: ignore[arg-type, return-value]
    console = Console(width=200, record=True)
    console.print(frame(look, 160, rows=None, has_color=False))
    text = console.export_text()
    assert "reward 0." in text
    assert "· loss " not in text
    assert "staleness 1.00" in text
    assert "trainer idle 31%" in text
    assert "r rollout" in text
    assert frame_json(look)["results"]["staleness"] == 1.0
    assert frame_json(look)["ranks"][0]["phases"]["rollout"] == pytest.approx(1.0, rel=0.1)


def test_top_of_another_run_has_no_rollouts(tmp_path: Path) -> None:
    run = write_run(tmp_path, "plain", steps=20)
    console = Console(width=200, record=True)
    look = TopView(run, examine=lambda run, prometheus: None).look()  # type: ignore[arg-type, return-value]
    console.print(frame(look, 160, rows=None, has_color=False))
    text = console.export_text()
    assert "rollout" not in text
    assert "· loss " in text


def test_curves_of_validation_data_stay_in_a_long_run(tmp_path: Path) -> None:
    run = write_run(tmp_path, "math", kind="grpo", nodes=1, ranks_per_node=1, steps=3000)
    curves = History(RunDirectory(run.path)).look()
    assert sum(value is not None for value in curves.values["run_validation_reward"]) > 100


def test_a_recorder_of_samples_needs_no_folder(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "fresh")
    recorder = SampleRecorder(run, "node-0", 0)
    recorder.record(1, "p", "c", 1.0)
    recorder.close()
    assert run.samples_path("node-0").is_file()
