"""The job of `craton eval`: a model, a run or a server, and a suite."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from craton.errors import CratonError
from craton.job import Job, load_job, make_job
from craton.job.sections.suites import BUILT_IN_SUITES, load_suite, suite_name
from craton.orchestration.errors import StartError
from craton.orchestration.server import server_of
from craton.remote import is_url
from craton.telemetry import RunDirectory, find_run


def evaluation_job(
    model: str,
    suite: str,
    *,
    name: str,
    cluster: str = "local",
    key: str | None = None,
    served_name: str | None = None,
    settings: Mapping[str, object] | None = None,
) -> Job:
    """Return a job of kind eval. `key`: the environment variable with the API key of an endpoint; `served_name`: the
    model's name there; `settings`: keys of its `eval:` section."""
    load_suite(suite)
    where = suite if suite in BUILT_IN_SUITES else os.path.abspath(Path(suite).expanduser())
    section: dict[str, Any] = {"suite": where, **(settings or {})}
    data: dict[str, Any] = {"name": name, "kind": "eval", "cluster": cluster, "eval": section}
    url = endpoint_of(model)
    if url is None:
        if key is not None or served_name is not None:
            option = "--key" if key is not None else "--served-name"
            raise StartError(f"{option} is for a server, and {model} is none; remove it, or give a URL as MODEL")
        data["model"] = _trained(model)
    else:
        section["endpoint"] = {
            "url": url,
            **({"key": key} if key else {}),
            **({"model": served_name} if served_name else {}),
        }
        data |= {"run": {"secrets": [key]}} if key else {}
    return make_job(data)


def endpoint_of(model: str) -> str | None:
    """Return the URL of a server: as given, or that of a run of kind serve; None for anything else."""
    if re.match(r"https?://", model):
        return model
    run = _run_named(model)
    if run is None or load_job(run.job_path).kind != "serve":
        return None
    return server_of(run).url


def evaluation_name(model: str, suite: str, root: Path) -> str:
    """Return an unused run name: eval-llama-3.1-8b-arithmetic, then eval-llama-3.1-8b-arithmetic-2."""
    last = re.sub(r"^https?://", "", model).rstrip("/").rpartition("/")[2]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{last[:32]}-{suite_name(suite)[:20]}").strip("-._")
    name = f"eval-{stem}"
    number, result = 2, name
    while (root / result).exists():
        result, number = f"{name}-{number}", number + 1
    return result


def _trained(model: str) -> str:
    """Return a run as the path of its directory, and anything else as it is."""
    run = _run_named(model)
    return model if run is None else str(run.path)


def _run_named(name: str) -> RunDirectory | None:
    if is_url(name) or (Path(name).expanduser() / "config.json").is_file():
        return None
    try:
        return find_run(name)
    except CratonError:
        return None
