"""The actions of the web page: `stop`, `resume` and `heal`, by running the commands.

They run as separate commands, so that their checks and output are the same as in a terminal. Each has its own session
and writes to files: neither Ctrl-C in the terminal of `craton ui` nor its end interrupts them, and a slow one finishes
in the background.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from craton.formatting import setting
from craton.telemetry import RunDirectory

ANSWER_SECONDS = 180.0
CRATON = (sys.executable, "-m", "craton")
# The page already asked for confirmation, with the cost per day; `resume` itself would ask in a terminal.
VERBS: Mapping[str, tuple[str, ...]] = {
    "resume": ("resume", "RUN", "--detach", "--yes", "--json"),
    "heal": ("heal", "RUN", "--yes", "--json"),  # without --mode: only what the cluster's policy allows
    "kill": ("stop", "RUN", "--now", "--json"),
}
ACTIONS = ("stop", *VERBS)


@dataclass(frozen=True)
class ActionOutcome:
    is_done: bool
    message: str


def act(action: str, run: RunDirectory, craton: Sequence[str] = CRATON) -> ActionOutcome:
    """Run the action and return its outcome."""
    if action == "stop":
        return _stop(run)
    words = [str(run.path) if word == "RUN" else word for word in VERBS[action]]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as output,
        tempfile.TemporaryFile("w+", errors="replace") as errors,
    ):
        process = subprocess.Popen(
            [*craton, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            code = process.wait(timeout=ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            threading.Thread(target=process.wait, daemon=True).start()  # reap the process
            return ActionOutcome(
                False,
                f"`craton {words[0]} {run.name}` is still running after {setting(ANSWER_SECONDS)} and continues "
                f"(process {process.pid}); see `craton ps` for its result",
            )
        output.seek(0)
        errors.seek(0)
        return _outcome(action, run.name, code, output.read(), errors.read())


def _outcome(action: str, run_name: str, code: int, output: str, errors: str) -> ActionOutcome:
    if action == "heal" and (healing := _last_object(output)) is not None and "decisions" in healing:
        return healed(healing, run_name)  # its exit code is 1 when a node is bad, even after an action
    if code == 0:
        return ActionOutcome(True, {"resume": "the run resumes", "heal": "done", "kill": "the run was killed"}[action])
    return ActionOutcome(False, _error(output, errors) or f"the command exited with code {code}")


def _stop(run: RunDirectory) -> ActionOutcome:
    """Request the stop without waiting for it, unlike the command: it takes as long as a checkpoint."""
    from craton.errors import CratonError
    from craton.orchestration.start import stop_run

    try:
        stop_run(run)
    except CratonError as error:
        return ActionOutcome(False, str(error))
    return ActionOutcome(True, "stop requested: its ranks save a checkpoint and exit")


def healed(healing: Mapping[str, Any], run_name: str) -> ActionOutcome:
    """Summarize `craton heal --json` in a sentence. It succeeded if everything that the policy requires was done."""
    mode = healing.get("mode")
    if mode == "off":
        return ActionOutcome(False, "healing is off for its cluster (`health: {heal: off}` in the cluster file)")
    decisions, failures = healing["decisions"], [str(failure) for failure in healing.get("failures") or ()]
    if not decisions and not failures:
        return ActionOutcome(True, "no node needs an action")
    message = "; ".join([*failures, *map(_need, decisions)])
    numbers = list(dict.fromkeys(str(action["id"]) for action in healing.get("deeds") or ()))
    if numbers:
        undoing = ", ".join(f"`craton heal {run_name} --undo {number}`" for number in numbers)
        message = f"{len(numbers)} done, undo with {undoing}; {message}"
    elif not failures:
        message += ". No action was taken" + ("" if mode == "act" else f": its cluster's policy is {mode}")
    is_held = mode == "act" and any(
        decision.get("why_not") and decision.get("deed") == "none" for decision in decisions
    )
    return ActionOutcome(not failures and not is_held, message)


def _need(decision: Mapping[str, Any]) -> str:
    needs = f"{decision['node']} needs {decision['action']}: {decision['reason']}"
    return f"{needs} (not done: {decision['why_not']})" if decision.get("why_not") else needs


def _error(output: str, errors: str) -> str:
    """Return the error message of a command, from its JSON output or from stderr."""
    document = _last_object(output)
    if document is not None and document.get("error"):
        return str(document["error"])
    lines = [line for line in errors.strip().splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else ""


def _last_object(output: str) -> dict[str, Any] | None:
    """Return the JSON object that a command printed with --json."""
    for line in reversed(output.strip().splitlines()):
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict):
            return document
    return None
