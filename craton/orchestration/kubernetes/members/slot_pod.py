"""`python -m craton.orchestration.kubernetes.members.slot_pod RUN`: the program in a pod of a slot; RUN owns members.

It waits until the member manager hands its slot a member, runs the agent of its node of that member until it ends, and
waits for the next. It ends with RUN, or when no member is left for its slot. A pod that is recreated goes on with the
member of its slot. The end of a member is not the end of the pod.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":
    # As in a pod of the run itself: nothing is to save during the imports below.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(os.EX_TEMPFAIL))  # EXIT_AGAIN

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from craton.agent import LaunchError, read_launch
from craton.orchestration.kubernetes.gathering import node_of
from craton.orchestration.kubernetes.members.slot_files import Hand, SlotName, handed_in, read_hand, read_slots
from craton.orchestration.kubernetes.pod import (
    Pod,
    PodWaiting,
    Signals,
    is_healthy,
    read_secrets,
    say,
    supervise,
    verdict,
)
from craton.orchestration.kubernetes.podfile import submission_of
from craton.orchestration.kubernetes.pods import EXIT_AGAIN, EXIT_DONE, EXIT_FAILED, EXIT_FATAL, SLOT_NUMBER
from craton.orchestration.kubernetes.target import SLOT_VARIABLE, SUBMISSION_VARIABLE
from craton.orchestration.local import LocalBackend
from craton.telemetry import MARKERS, RunDirectory, RunError
from craton.telemetry.members import MEMBERS_FOLDER

LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class SlotPod:
    """The settings of a pod in a slot."""

    owner: RunDirectory
    slot: SlotName
    index: int  # of the pod in its slot: the number of its node in each member
    submission: str
    host: str = ""

    @classmethod
    def of(cls, owner: RunDirectory, environment: Mapping[str, str]) -> SlotPod:
        names = (SLOT_VARIABLE, SLOT_NUMBER, "JOB_COMPLETION_INDEX")
        group, number, index = (environment.get(name, "") for name in names)
        if not group or not number.isdecimal() or not index.isdecimal():
            raise RunError(f"{', '.join(names)} do not give this pod's slot; `craton run --on kubernetes` sets them")
        return cls(
            owner,
            SlotName(group, int(number)),
            int(index),
            environment.get(SUBMISSION_VARIABLE, ""),
            environment.get("CRATON_HOST_NAME", ""),
        )

    def pod_of(self, member: str) -> Pod:
        """Return this pod as a pod of the member."""
        return Pod(
            run=RunDirectory(self.owner.path / MEMBERS_FOLDER / member),
            index=self.index,
            submission=self.submission,
            files=None,
            code=None,
            drafted_at="",
            first="",
            metrics_port=0,
            give_up_seconds=None,
            stop_after_seconds=None,
            host=self.host,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m craton.orchestration.kubernetes.members.slot_pod")
    parser.add_argument("run", metavar="RUN", help="directory of the run that owns the members")
    options = parser.parse_args(arguments)
    signals = Signals()
    try:
        if folder := os.environ.get("CRATON_SECRETS"):
            os.environ.update(read_secrets(Path(folder)))
        return work(SlotPod.of(RunDirectory(options.run), os.environ), signals)
    except RunError as error:
        say(str(error))
        return EXIT_FATAL
    except OSError as error:
        say(f"{options.run} cannot be read: {error}")
        return EXIT_FAILED


def work(pod: SlotPod, signals: Signals) -> int:
    """Run one member after the other; return the exit code of the pod."""
    done = ""  # token of the last hand that this pod is done with
    waiting = PodWaiting()
    while signals.received is None:
        is_prepared = submission_of(pod.owner) == pod.submission
        # A stop by the scheduler is not the end: the pods of the run come back, and this one gets its own signal.
        if is_prepared and verdict(pod.owner) not in (None, EXIT_AGAIN):
            return EXIT_DONE
        hand = read_hand(pod.owner, pod.slot) if is_prepared else Hand()
        if hand.token != done and is_startable(pod, hand):
            code = run_member(pod, hand, signals)
            if code == EXIT_FAILED:
                return code
            done, waiting = hand.token, PodWaiting()
        elif is_prepared and is_spent(pod):
            return EXIT_DONE
        waiting.say(f"{pod.slot} waits for a member of {pod.owner.path}")
        time.sleep(LOOK_SECONDS)
    return EXIT_AGAIN


def is_startable(pod: SlotPod, hand: Hand) -> bool:
    """Whether a hand is for this pod now: of its submission, for a member that has not ended and has a node for it."""
    if not hand.member or hand.submission != pod.submission:
        return False
    run = pod.pod_of(hand.member).run
    if any(run.has(marker) for marker in MARKERS):
        return False
    try:
        launch = read_launch(run)
    except LaunchError:
        return False
    return launch.generation == hand.generation and node_of(launch, pod.index) is not None


def is_spent(pod: SlotPod) -> bool:
    """Whether no member is left for this slot: each member of its group is done, or in another slot."""
    slots = read_slots(pod.owner)
    group = next((item for item in slots.groups if item.name == pod.slot.group), None) if slots else None
    if group is None:
        return False
    elsewhere = {
        handed.hand.member
        for handed in handed_in(pod.owner, group)
        if handed.slot != pod.slot and handed.hand.submission == pod.submission
    }
    return all(name in elsewhere or pod.pod_of(name).run.has("DONE") for name in group.members)


def run_member(pod: SlotPod, hand: Hand, signals: Signals) -> int:
    """Run the agent of this pod's node until it ends; EXIT_FAILED: a new pod should go on in its place."""
    member = pod.pod_of(hand.member)
    say(f"{pod.slot} runs member {hand.member}")
    try:
        if not is_healthy(member):
            return EXIT_FAILED
        with _killing(pod, hand):
            return supervise(member, signals)
    except (LaunchError, RunError) as error:  # of this member; the next may be well
        say(f"member {hand.member}: {error}")
        return EXIT_DONE


@contextlib.contextmanager
def _killing(pod: SlotPod, hand: Hand) -> Iterator[None]:
    """Kill the member's agent here when the member is taken from the slot."""
    closing = threading.Event()

    def watch() -> None:
        while not closing.wait(LOOK_SECONDS):
            now = read_hand(pod.owner, pod.slot)
            if now.token != hand.token and not now.member:
                LocalBackend().kill(pod.pod_of(hand.member).run)
                return

    thread = threading.Thread(target=watch, name="slot", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
