"""`evaluate(model, suite)` starts an evaluation as a run; its results are those of its directory."""

from __future__ import annotations

from typing import Any

from craton.api.run_handle import Run
from craton.api.start_steps import StartWatch, Unwatched, ready_start
from craton.job import Job
from craton.orchestration import evaluation_job, evaluation_name
from craton.orchestration.draft import Progress
from craton.orchestration.start import RunStart, draft_start, submit_start
from craton.telemetry import RunDirectory, runs_root


def evaluate(
    model: str,
    suite: str,
    name: str | None = None,
    *,
    cluster: str = "local",
    on: str | None = None,
    key: str | None = None,
    served_name: str | None = None,
    progress: Progress | None = None,
    watch: StartWatch | None = None,
    **settings: object,
) -> Run:
    """Start an evaluation and return its run, which goes on without this process: `wait` for it, then read it with
    `evaluation_of`.

    `model` is a folder, a Hub id, a training run, a run of kind serve or the URL of an OpenAI endpoint; `suite` a YAML
    file or the name of a built-in suite; `settings` are keys of a job's `eval:` section, such as samples or strategies.
    """
    job = eval_job(model, suite, name, cluster=cluster, key=key, served_name=served_name, **settings)

    def draft(report: Progress | None) -> RunStart:
        return draft_start(job, on=on, progress=report)

    return Run(submit_start(ready_start(draft, watch or Unwatched(progress)))[0])


def eval_job(
    model: str,
    suite: str,
    name: str | None = None,
    *,
    cluster: str = "local",
    key: str | None = None,
    served_name: str | None = None,
    **settings: object,
) -> Job:
    """Return the job that `evaluate` starts."""
    chosen = name or evaluation_name(model, suite, runs_root())
    return evaluation_job(
        model, suite, name=chosen, cluster=cluster, key=key, served_name=served_name, settings=settings
    )


def evaluation_of(run: Run) -> dict[str, Any]:
    """Return the results of an evaluation so far, as in its evaluation.json."""
    from craton.ml.evaluation import read_evaluation

    return read_evaluation(run.directory)


def comparison_of(first: RunDirectory, second: RunDirectory) -> list[dict[str, Any]]:
    """Compare two evaluations of one suite, problem by problem."""
    from craton.ml.evaluation import compare_runs

    return compare_runs(first, second)
