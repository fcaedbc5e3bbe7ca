"""The changes that the page can make: what the verbs `stop`, `resume` and `heal` do, by running them.

They run as commands of their own, so that what they ask, check and print is the same as in a terminal. Each has a
session of its own and writes to files: Ctrl-C in the terminal of `craton ui`, or its end, leaves nothing half done, and
one that takes longer than somebody waits is left to finish.
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
# The page has asked, with the price of a day or that it is unknown; `resume` asks in a terminal, which is not here.
VERBS: Mapping[str, tuple[str, ...]] = {
    "resume": ("resume", "RUN", "--detach", "--yes", "--json"),
    "heal": ("heal", "RUN", "--yes", "--json"),  # without --mode: what the cluster's policy allows, and no more
    "kill": ("stop", "RUN", "--now", "--json"),
}
ACTIONS = ("stop", *VERBS)


@dataclass(frozen=True)
class ActionOutcome:
    is_done: bool
    message: str


def act(action: str, run: RunDirectory, craton: Sequence[str] = CRATON) -> ActionOutcome:
    """Does it, and says what came of it."""
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
            threading.Thread(target=process.wait, daemon=True).start()  # so that its end is taken note of
            return ActionOutcome(
                False,
                f"`craton {words[0]} {run.name}` has not answered for {setting(ANSWER_SECONDS)} and goes on (process "
                f"{process.pid}); `craton ps` tells what comes of it",
            )
        output.seek(0)
        errors.seek(0)
        return _outcome(action, run.name, code, output.read(), errors.read())


def _outcome(action: str, run_name: str, code: int, output: str, errors: str) -> ActionOutcome:
    if action == "heal" and (healing := _last_object(output)) is not None and "decisions" in healing:
        return healed(healing, run_name)  # it ends with 1 where a node is bad, whatever was done about it
    if code == 0:
        return ActionOutcome(True, {"resume": "it goes on", "heal": "done", "kill": "it was ended"}[action])
    return ActionOutcome(False, _error(output, errors) or f"it ended with code {code}")


def _stop(run: RunDirectory) -> ActionOutcome:
    """Asks only: the verb waits for the end, which takes as long as a checkpoint, and which the page shows anyway."""
    from craton.errors import CratonError
    from craton.orchestration.start import stop_run

    try:
        stop_run(run)
    except CratonError as error:
        return ActionOutcome(False, str(error))
    return ActionOutcome(True, "it was asked to stop: its ranks save a checkpoint and leave")


def healed(healing: Mapping[str, Any], run_name: str) -> ActionOutcome:
    """What `craton heal --json` printed, in a sentence. Done is what left nothing undone that the policy asks for."""
    mode = healing.get("mode")
    if mode == "off":
        return ActionOutcome(False, "healing of its cluster is off (`health: {heal: off}` in the cluster file)")
    decisions, failures = healing["decisions"], [str(failure) for failure in healing.get("failures") or ()]
    if not decisions and not failures:
        return ActionOutcome(True, "no node needs anything")
    message = "; ".join([*failures, *map(_need, decisions)])
    numbers = list(dict.fromkeys(str(action["id"]) for action in healing.get("deeds") or ()))
    if numbers:
        undoing = ", ".join(f"`craton heal {run_name} --undo {number}`" for number in numbers)
        message = f"{len(numbers)} done, to be undone by {undoing}; {message}"
    elif not failures:
        message += ". Nothing was done" + ("" if mode == "act" else f": its cluster's policy is {mode}")
    is_held = mode == "act" and any(
        decision.get("why_not") and decision.get("deed") == "none" for decision in decisions
    )
    return ActionOutcome(not failures and not is_held, message)


def _need(decision: Mapping[str, Any]) -> str:
    needs = f"{decision['node']} needs {decision['action']}: {decision['reason']}"
    return f"{needs} (not done: {decision['why_not']})" if decision.get("why_not") else needs


def _error(output: str, errors: str) -> str:
    """A verb's own words, as JSON on its output or as a line on stderr."""
    document = _last_object(output)
    if document is not None and document.get("error"):
        return str(document["error"])
    lines = [line for line in errors.strip().splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else ""


def _last_object(output: str) -> dict[str, Any] | None:
    """What a verb printed with --json."""
    for line in reversed(output.strip().splitlines()):
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict):
            return document
    return None
