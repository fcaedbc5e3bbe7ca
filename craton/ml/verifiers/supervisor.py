"""The supervisor of a pool: a small single-threaded process between the trainer and the workers.

It hands out samples, ends at the limit what has not answered, replaces what has died, and never waits for any one
process. It is a process of its own because the trainer may hold its interpreter for seconds (compilation, a large
copy), and a limit has to hold all the same. It ends with the trainer, and all workers end with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import socket
import sys
import time
from collections import Counter, deque
from typing import Any

from craton.formatting import memory, setting
from craton.ml.verifiers.episodes import EpisodeRecord
from craton.ml.verifiers.errors import IsolationError
from craton.ml.verifiers.members import PoolWorker, Starter, VerifierTask
from craton.ml.verifiers.sandbox import (
    NOT_STARTED,
    OUTPUT_BYTES,
    Isolation,
    adopt_orphans,
    children,
    find_isolation,
    isolation_of,
    kill,
    own_package,
)
from craton.ml.verifiers.wire import Channel, MessageTooLongError

PRIORITY = -5
ALIVE_SECONDS = 5.0  # between messages that say that it works
ATTEMPTS = 2  # of a sample whose worker died without our doing
AGAIN_SECONDS = 0.05  # after which it is tried again: what killed its worker may kill others, and they must not get it
START_SECONDS = 120.0
START_FAILURES = 3  # in a row, after which a group is given up
LOOK_SECONDS = 0.02  # between looks at memory, processes and the trainer
END_SECONDS = 0.3  # that a kill may take before the verdict is sent all the same
OPEN_PROCESSES = 256
SHOWN_BYTES = 1 << 14  # of what a user's function prints for one sample; the rest is not in the log
PERSISTENT = ("sealed", "open")
SPARES = {"sealed": 1, "open": 1}  # ready to take the place of a worker that was killed


def start(descriptor: int, trainer: int) -> None:
    """Run until the trainer closes the connection or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, which closes the pool
    adopt_orphans()
    with contextlib.suppress(OSError):  # root only: a limit holds also where samples use all cores
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    PoolSupervisor(connection, trainer).run()


def signal_name(number: int) -> str:
    """SIGTERM; `signal 40` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class PoolSupervisor:
    """State: tasks that wait by group, workers, and episodes of environments."""

    def __init__(self, connection: socket.socket, trainer: int) -> None:
        self._trainer = trainer
        self._pool = Channel(connection)
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ, None)
        self._waiting: dict[str, deque[VerifierTask]] = {"sealed": deque(), "open": deque(), "program": deque()}
        self._workers: list[PoolWorker] = []
        self._ending: dict[PoolWorker, float] = {}  # worker → when its end is no longer waited for
        self._episodes: dict[int, EpisodeRecord] = {}
        self._episode_steps: deque[int] = deque()
        self._start_failures: Counter[str] = Counter()
        self._given_up: dict[str, str] = {}
        self._sent_pids: list[int] = []
        self._settings: dict[str, Any] = {}
        self._starter: Starter | None = None
        self._is_closing = False

    def run(self) -> None:
        last_look = last_sign = 0.0
        while not self._is_closing:
            for key, _ in self._selector.select(self._timeout()):
                if key.data is None:
                    self._hear_pool()
                elif key.data in self._ending:
                    continue  # ended by an event of the same round
                elif key.fd == key.data.output:
                    self._read_output(key.data)
                else:
                    self._hear_worker(key.data)
            self._pool.flush()
            for worker in self._workers:
                worker.channel.flush()
            now = time.monotonic()
            self._end_late(now)
            self._reap(now)
            if now - last_look > LOOK_SECONDS:
                last_look = now
                self._look_at_usage()
                self._end_strays()
                self._is_closing |= os.getppid() != self._trainer
            if now - last_sign > ALIVE_SECONDS:
                last_sign = now
                self._send("alive")
            if self._starter is not None:
                self._start_workers()
                self._hand_out()
                self._send_pids()
        self._end_all()

    # What the pool asks for

    def _hear_pool(self) -> None:
        messages = self._pool.receive()
        if messages is None:
            self._is_closing = True
            return
        for message in messages:
            what, *arguments = pickle.loads(message)
            getattr(self, f"_on_{what}")(*arguments)

    def _on_settings(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        isolation = Isolation.OFF
        if settings["sandbox"] != "off" and {"sealed", "program"} & set(settings["groups"]):
            try:
                isolation = isolation_of(find_isolation())
                own_package()
            except IsolationError as error:
                self._send("given_up", "", str(error), True)
                return
        self._starter = Starter(settings, isolation)
        if "program" in settings["groups"]:
            self._send("ready", "program")
        if "open" in settings["groups"]:
            try:
                self._starter.load_template()
            except RuntimeError as error:
                self._give_up("open", str(error))
            else:
                self._send("ready", "open")

    def _on_restore_episode(self, episode: int, messages: list[bytes], replies: list[dict[str, Any]]) -> None:
        """Take over an episode of a supervisor that died; it is replayed at its next step."""
        self._episodes[episode] = EpisodeRecord(episode, messages, [-1] * len(messages), replies)

    def _on_task(self, number: int, group: str, message: bytes, follow_up: bytes) -> None:
        if group in self._given_up:
            self._send("result", number, {"error": self._given_up[group]}, 0.0)
        else:
            self._waiting[group].append(VerifierTask(number, group, message, follow_up))

    def _on_episode(self, number: int, episode: int, message: bytes) -> None:
        """Begin an episode, or take its next step."""
        known = self._episodes.setdefault(episode, EpisodeRecord(episode))
        known.ask(number, message)
        self._episode_steps.append(episode)

    def _on_end_episode(self, episode: int) -> None:
        known = self._episodes.pop(episode, None)
        if known is not None and known.worker is not None:
            self._end(known.worker, "")

    # Workers

    def _limit_of(self, group: str) -> int:
        return int(self._settings["workers"]) if group != "open" else int(self._settings["open_workers"])

    def _start_workers(self) -> None:
        for group in PERSISTENT:
            if group not in self._settings["groups"] or group in self._given_up:
                continue
            if not self._settings["is_called" if group == "open" else "verifiers"]:
                continue  # open workers for episodes alone are started with them
            missing = self._limit_of(group) + SPARES[group] - len(self._members(group))
            for _ in range(missing if not self._start_failures[group] else min(missing, 1)):
                self._start(group)

    def _members(self, group: str) -> list[PoolWorker]:
        """Return the workers of a group that may get a sample, now or later: not those that are being ended."""
        return [
            worker
            for worker in self._workers
            if worker.group == group and worker.episode is None and worker not in self._ending
        ]

    def _start(self, group: str) -> PoolWorker | None:
        assert self._starter is not None
        try:
            worker = self._starter.start(group)
        except (OSError, RuntimeError) as error:
            self._count_start_failure(group, str(error))
            return None
        self._workers.append(worker)
        self._selector.register(worker.channel.connection, selectors.EVENT_READ, worker)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)
        worker.deadline = time.monotonic() + START_SECONDS
        return worker

    def _hand_out(self) -> None:
        for group in PERSISTENT:
            idle = [worker for worker in self._members(group) if worker.is_ready and not worker.is_busy]
            for worker in idle:
                if worker.process.poll() is not None:  # it has died, and its connection does not show it yet
                    self._end(worker, "")
            idle = [worker for worker in idle if worker not in self._ending]
            free = self._limit_of(group) - sum(worker.is_busy for worker in self._members(group))
            for worker in idle[: max(0, free)]:
                if self._waiting[group] and self._waiting[group][0].not_before <= time.monotonic():
                    self._give(worker, self._waiting[group].popleft())
        while self._waiting["program"] and len(self._members("program")) < self._limit_of("program"):
            task = self._waiting["program"].popleft()
            program = self._start("program")
            if program is None:
                self._fail(task, self._given_up.get("program", "the sandbox could not be started"))
                continue
            self._give(program, task)
        self._step_episodes()

    def _give(self, worker: PoolWorker, task: VerifierTask) -> None:
        worker.task = task
        worker.begun = time.monotonic()
        worker.deadline = worker.begun + self._settings["limit"]
        worker.printed_bytes = 0
        worker.channel.send(task.message)

    def _hear_worker(self, worker: PoolWorker) -> None:
        try:
            messages = worker.channel.receive()
        except MessageTooLongError:
            self._end(worker, f"returned more than {memory(OUTPUT_BYTES)}")
            return
        if messages is None:
            self._end(worker, "")
            return
        for message in messages:
            try:
                reply = json.loads(message)
            except (ValueError, RecursionError):
                reply = None
            if not isinstance(reply, dict):
                self._end(worker, "returned something that is not JSON")
                return
            self._take_reply(worker, reply)

    def _take_reply(self, worker: PoolWorker, reply: dict[str, Any]) -> None:
        if not worker.is_ready:
            worker.is_ready = True
            worker.base_bytes = worker.process.usage()[0] if worker.group == "open" else 0
            self._start_failures[worker.group] = 0
            if not worker.is_busy:
                worker.deadline = float("inf")
            if worker.episode in self._episodes:
                self._continue(self._episodes[worker.episode])
            elif worker.group in PERSISTENT:
                self._send("ready", worker.group)
            return
        task = worker.task
        if task is None:  # nothing was asked: no honest worker does this
            self._end(worker, "")
            return
        if reply.get("loaded") and task.follow_up:
            if worker.has_follow_up:  # no honest worker asks twice
                self._end(worker, "asked for its tests twice")
                return
            worker.has_follow_up = True
            worker.channel.send(task.follow_up)
            return
        task.seconds = time.monotonic() - worker.begun
        if worker.group == "program" or reply.get("exhausted"):  # the memory of an exhausted one is in pieces
            self._end(worker, "", reply)
            return
        worker.task = None
        worker.deadline = float("inf")
        if worker.episode is None:
            self._send("result", task.number, reply, task.seconds)
        elif worker.episode in self._episodes:
            self._advance(self._episodes[worker.episode], reply, task.seconds)

    def _read_output(self, worker: PoolWorker) -> None:
        data = worker.read_output()
        if data is None:
            self._selector.unregister(worker.output)
            return
        if worker.group == "open" and worker.printed_bytes <= SHOWN_BYTES:
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
        if worker.printed_bytes > OUTPUT_BYTES:
            self._end(worker, f"printed more than {memory(OUTPUT_BYTES)}")

    # Ends

    def _end_late(self, now: float) -> None:
        for worker in self._workers:
            if now >= worker.deadline and worker not in self._ending:
                if worker.is_busy:
                    self._end(worker, f"exceeded verify.limit of {setting(self._settings['limit'])}")
                elif not worker.is_ready:
                    self._end(worker, f"did not start within {setting(START_SECONDS)}")

    def _look_at_usage(self) -> None:
        limit = self._settings.get("memory_bytes", 0)
        for worker in self._workers:
            if not worker.is_busy or worker in self._ending:
                continue
            used, processes = worker.process.usage()
            if used - worker.base_bytes > limit:
                self._end(worker, f"needs more memory than verify.memory of {memory(limit)}")
            elif worker.group == "open" and processes > OPEN_PROCESSES:
                self._end(worker, f"started more than {OPEN_PROCESSES} processes")

    def _end(self, worker: PoolWorker, reason: str, reply: dict[str, Any] | None = None) -> None:
        """End a worker that has a reason to be killed or has sent its last reply; or wait for one that closed its
        connection. Its task is settled once it has ended."""
        if worker in self._ending:
            return
        worker.reason, worker.reply = reason, reply
        for source in (worker.channel.connection, worker.output):
            if source in self._selector.get_map():
                self._selector.unregister(source)
        if reason or reply is not None:
            worker.is_killed = True
            worker.process.kill()
        self._ending[worker] = time.monotonic() + END_SECONDS

    def _reap(self, now: float) -> None:
        for worker, patience in list(self._ending.items()):
            status = worker.process.poll()
            if status is None and now < patience:
                continue
            if status is None:
                self._ending[worker] = now + END_SECONDS
                is_first = not worker.is_killed
                worker.is_killed = True
                worker.process.kill()
                if is_first:
                    continue
            self._settle(worker, status)
            if status is not None:
                del self._ending[worker]
                self._workers.remove(worker)
                worker.close()

    def _settle(self, worker: PoolWorker, status: int | None) -> None:
        """Send the result of what a worker did when it ended, or let another one try."""
        worker.read_output()
        task, worker.task = worker.task, None
        if not worker.is_ready and not worker.reason and worker.group in PERSISTENT:
            self._count_start_failure(worker.group, worker.last_line() or f"ended with status {status}")
        if worker.episode is not None:
            self._settle_episode(worker, task)
        elif task is None:
            return
        elif worker.reply is not None:
            self._send("result", task.number, worker.reply, task.seconds)
        elif worker.reason:
            self._fail(task, worker.reason, worker)
        elif worker.group == "program" and worker.is_ready and status is not None and status != -signal.SIGKILL:
            if status < 0:
                self._fail(task, f"the program was ended by {signal_name(-status)}", worker)
            else:
                self._send("result", task.number, {"ended": status}, time.monotonic() - worker.begun)
        else:
            self._try_again(worker, task, status)

    def _try_again(self, worker: PoolWorker, task: VerifierTask, status: int | None) -> None:
        """A worker died, and perhaps not by the sample's doing: from outside, or for lack of the machine's memory."""
        task.attempts += 1
        if task.attempts < ATTEMPTS:
            task.not_before = time.monotonic() + AGAIN_SECONDS
            self._waiting[task.group].appendleft(task)
            return
        ended = f"by {signal_name(-status)}" if status is not None and status < 0 else f"with status {status}"
        what = f"its process ended {ended} in {task.attempts} attempts"
        if not worker.is_ready and status is not None and 0 < status <= NOT_STARTED:
            what = "the sandbox could not be started"
        line = worker.last_line()
        self._fail(task, f"{what}: {line}" if line else what, worker)

    def _fail(self, task: VerifierTask, error: str, worker: PoolWorker | None = None) -> None:
        self._send("result", task.number, {"error": error}, time.monotonic() - worker.begun if worker else 0.0)

    def _count_start_failure(self, group: str, reason: str) -> None:
        self._start_failures[group] += 1
        if self._start_failures[group] >= START_FAILURES:
            self._give_up(group, reason)

    def _give_up(self, group: str, reason: str) -> None:
        """Stop starting workers of a group; every sample that needs one gets the reason as its error."""
        self._given_up[group] = reason
        self._send("given_up", group, reason)
        while self._waiting[group]:
            self._fail(self._waiting[group].popleft(), reason)

    def _end_strays(self) -> None:
        """End processes that have lost their parent and became children of this one. They may arrive after the worker
        that started them has ended, so this is done at every look."""
        known = {worker.process.pid for worker in self._workers}
        if self._starter is not None:
            known.add(self._starter.template_pid)
        for pid in children(os.getpid()):
            if pid not in known:
                kill(pid)
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    continue

    def _end_all(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.reap()
        if self._starter is not None:
            self._starter.close()
        self._end_strays()

    # Episodes

    def _step_episodes(self) -> None:
        if not self._episode_steps:
            return
        running = sum(episode.is_running for episode in self._episodes.values())
        while self._episode_steps and running < self._limit_of("open"):
            episode = self._episodes.get(self._episode_steps.popleft())
            if episode is not None:
                running += 1
                episode.is_running = True
                self._continue(episode)

    def _continue(self, episode: EpisodeRecord) -> None:
        """Send the next message to the process of an episode; start one where there is none."""
        if "open" in self._given_up:
            episode.error = episode.error or self._given_up["open"]
        if episode.error:
            self._lose(episode, episode.error)
        elif episode.worker is None:
            episode.worker = self._start("open")
            if episode.worker is None:
                self._lose(episode, "its process could not be started")
            else:
                episode.worker.episode = episode.number
        elif episode.position == len(episode.messages):
            episode.is_running = False
        elif episode.worker.is_ready and not episode.worker.is_busy:
            position = episode.position
            self._give(episode.worker, VerifierTask(episode.tasks[position], "open", episode.messages[position]))

    def _advance(self, episode: EpisodeRecord, reply: dict[str, Any], seconds: float) -> None:
        if episode.is_replaying:
            if reply != episode.replies[episode.position]:
                self._lose(episode, "its process died, and the environment wrote something else when it was replayed")
                return
        else:
            episode.replies.append(reply)
            self._send("result", episode.tasks[episode.position], reply, seconds)
        episode.position += 1
        if "error" in reply:
            self._lose(episode, reply["error"])
        else:
            self._continue(episode)

    def _settle_episode(self, worker: PoolWorker, task: VerifierTask | None) -> None:
        episode = self._episodes.get(worker.episode if worker.episode is not None else -1)
        if episode is None or episode.worker is not worker:
            return
        episode.lose_worker()
        if worker.reply is not None:
            self._lose(episode, worker.reply["error"])
        elif worker.reason:
            self._lose(episode, worker.reason)
        elif episode.deaths >= ATTEMPTS:
            self._lose(episode, f"its process died {episode.deaths} times")
        elif episode.is_running:
            self._continue(episode)

    def _lose(self, episode: EpisodeRecord, error: str) -> None:
        """End an episode without a verdict."""
        episode.error = error
        episode.is_running = False
        while episode.is_waited_for:
            task = episode.tasks[len(episode.replies)]
            episode.replies.append({"error": error})
            self._send("result", task, {"error": error}, 0.0)
        if episode.worker is not None:
            worker, episode.worker = episode.worker, None
            self._end(worker, error)

    # Messages and times

    def _send(self, what: str, *arguments: object) -> None:
        self._pool.send(pickle.dumps((what, *arguments)))

    def _send_pids(self) -> None:
        """Tell the pool which processes verify: of each, the one that dies with its sample."""
        pids = [worker.process.pid for worker in self._workers if worker.is_ready and worker not in self._ending]
        if pids != self._sent_pids:
            self._sent_pids = pids
            self._send("pids", pids)

    def _timeout(self) -> float:
        """Return how long to sleep: until the next limit, or the next look at what is running."""
        if self._ending:
            return 0.002
        is_sending = self._pool.has_unsent or any(worker.channel.has_unsent for worker in self._workers)
        is_waiting = any(self._waiting.values())
        if is_sending or is_waiting or any(worker.is_busy for worker in self._workers):
            left = (
                min(worker.deadline for worker in self._workers) - time.monotonic() if self._workers else LOOK_SECONDS
            )
            return max(0.0, min(left, LOOK_SECONDS))
        return 1.0
