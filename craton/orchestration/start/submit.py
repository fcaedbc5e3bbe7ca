"""Step 6 of a start: write the run directory, and start the agents or submit the run to a scheduler."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from craton.agent.coordination import AVOID_FILE, forget_avoided
from craton.agent.processes import free_port
from craton.orchestration.backend import BACKEND_FILE, read_submission, write_submission
from craton.orchestration.backends import backend_of
from craton.orchestration.changes import remove_run
from craton.orchestration.draft import Draft, find_code, keep_code
from craton.orchestration.local import kill_agents
from craton.orchestration.run_files import disarm, write_whole
from craton.orchestration.start.checks import check_server, failed_at_start, taken_text
from craton.orchestration.watching import launching
from craton.telemetry import MARKERS, RunDirectory, RunExistsError
from craton.telemetry.files import paths_in, read_regular


def start_run(draft: Draft, root: Path) -> RunDirectory:
    """Create and fill the run directory, and start the agents or submit the run to a scheduler."""
    if draft.on == "local":
        check_server(draft.job)
    code = find_code(draft.job, root)
    before = RunDirectory(root / draft.job.name)
    if before.path.exists() and failed_at_start(before):
        remove_run(before)
    try:
        run = RunDirectory.create(root, draft.job.name)
    except RunExistsError:
        raise RunExistsError(taken_text(root, draft.job.name)) from None
    with launching(run):
        try:
            if code is not None:
                keep_code(code, run)
            launch(run, draft)
        except BaseException:  # Ctrl-C too
            if _is_only_here(run, draft):
                shutil.rmtree(run.path)  # nothing has run: the name is free again
            raise
    return run


def launch(run: RunDirectory, draft: Draft) -> None:
    """Write the files of the next generation and submit it; on an error, restore everything."""
    backend = backend_of(draft.on)
    ready = replace(draft, launch=replace(draft.launch, master_port=free_port()))
    texts = {**ready.files(), **backend.files(ready, run)}
    orders = [f"{run.chaos_folder.name}/{path.name}" for path in paths_in(run.chaos_folder, "*.json")]
    with _put_back(run, [*MARKERS, run.resize_path.name, AVOID_FILE, *orders, *texts]):
        disarm(run)
        for marker in MARKERS:
            run.unmark(marker)
        run.resize_path.unlink(missing_ok=True)
        forget_avoided(run)
        for name, text in texts.items():
            write_whole(run.path / name, text)
        submission = backend.submit(ready, run)
    if submission != read_submission(run):
        write_submission(run, submission)


def _is_only_here(run: RunDirectory, draft: Draft) -> bool:
    """Whether no scheduler can have a run whose start was aborted; local agents are killed."""
    if draft.on == "local":
        kill_agents(run)
    return draft.on == "local" or not (run.path / BACKEND_FILE).exists()


@contextmanager
def _put_back(run: RunDirectory, names: Iterable[str]) -> Iterator[None]:
    """Restore these files if the body fails before the run is submitted: the reason of its last stop or failure stays
    readable, and the next resume starts from the same state."""
    handed_to = read_submission(run)
    before = {name: _text_of(run.path / name) for name in names}
    try:
        yield
    except BaseException:  # Ctrl-C too
        if read_submission(run) == handed_to:  # else a scheduler may have it
            for name, text in before.items():
                if text is None:
                    (run.path / name).unlink(missing_ok=True)
                else:
                    write_whole(run.path / name, text)
        raise


def _text_of(path: Path) -> str | None:
    try:
        return read_regular(path).decode(errors="surrogateescape")
    except FileNotFoundError:
        return None
