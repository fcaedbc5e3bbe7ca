"""The pool: weighted sums, users' functions, workers that die, limits, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from verifier_pools import needs_isolation, open_pool, processes_below, processes_with, sample
from waiting import wait_until

from craton.ml.verifiers import Isolation, Verdict, VerifierError, judge_failures
from craton.ml.verifiers import pool as pool_module
from craton.ml.verifiers.members import PoolWorker, Starter
from craton.ml.verifiers.sandbox import ConfinedProcess
from craton.ml.verifiers.supervisor import PoolSupervisor
from craton.ml.verifiers.wire import Channel

REWARDS = """
import os, signal, subprocess, sys, time

def length(prompt, completion, row, transcript):
    return len(completion) / row.get("scale", 1) + len(transcript)

def wrong(prompt, completion, row, transcript):
    return eval(completion)

def fail(prompt, completion, row, transcript):
    raise KeyError("no such thing")

def two_parameters(prompt, completion):
    return 0.0

def misbehave(prompt, completion, row, transcript):
    if completion == "fine":
        return 1.0
    if completion == "sleep":
        time.sleep(1000)
    if completion == "spin":
        while True:
            pass
    if completion == "trap":
        for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, lambda *_: None)
        while True:
            time.sleep(1)
    if completion == "daemon":
        sleeps = f"import time; time.sleep(1000) # {row['mark']}"
        subprocess.Popen([sys.executable, "-c", sleeps], start_new_session=True)
        return 1.0
    if completion == "forks":
        while True:
            os.fork()
    if completion == "memory":
        kept = []
        while True:
            kept.append(bytearray(1 << 24))
    if completion == "prints":
        while True:
            print("x" * 10_000)
    if completion == "slow":
        time.sleep(0.3)
        return 1.0
    if completion == "exits":
        os._exit(0)
    if completion == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "once":  # the first try only: killed from outside
        mark = row["mark"]
        if not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0
    return 0.5

def pid(prompt, completion, row, transcript):
    import threading
    with open("/proc/self/status") as file:
        threads = [line for line in file if line.startswith("Threads")]
    return float(threads[0].split()[1])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    return tmp_path


@needs_isolation
def test_terms_add_up_with_their_weights(folder: Path) -> None:
    terms = (
        {"verifier": "exact", "weight": 2.0},
        {"verifier": "regex", "pattern": r"\d", "weight": 0.5},
        {"verifier": "regex", "pattern": r"z", "weight": 8.0},
        {"python": "own_rewards:length", "weight": -1.0},
        {"model": "/reward/model", "weight": 100.0},
    )
    with open_pool(*terms, folder=folder) as pool:
        right, wrong = pool.verify([sample("42", answer="42", scale=4), sample("x", answer="42")])
    assert right.parts == {"exact": 1.0, "regex": 1.0, "regex 2": 0.0, "own_rewards:length": 0.5}
    assert right.reward == 2.0 + 0.5 - 0.5
    assert wrong.reward == -1.0
    assert right.error == wrong.error == ""


def test_a_function_that_returns_no_number_is_named(folder: Path) -> None:
    with open_pool({"python": "own_rewards:wrong"}, folder=folder) as pool:
        verdicts = pool.verify([sample(text) for text in ("float('nan')", "'yes'", "None", "1.5", "True", "1/0")])
    assert [verdict.reward for verdict in verdicts] == [None, None, None, 1.5, 1.0, None]
    assert verdicts[1].error == "own_rewards:wrong returned 'yes' (str); return a finite number", "named once"
    assert "own_rewards:wrong raised ZeroDivisionError" in verdicts[5].error
    assert "own_rewards.py:8" in verdicts[5].error
    with pytest.raises(VerifierError, match=r"4 of 6 samples \(67%\) got no verdict.*returned nan.*returned 'yes'"):
        judge_failures(verdicts)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_rewards:nothing", "has no function 'nothing'"),
        ("no_such_module:score", "no module 'no_such_module'"),
        ("own_rewards:two_parameters", r"cannot be called with a sample.*\(prompt, completion, row, transcript\)"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_the_start(folder: Path, name: str, message: str) -> None:
    with pytest.raises(VerifierError, match=message):
        open_pool({"python": name}, folder=folder)


def test_hostile_functions_cost_one_sample_each(folder: Path, tmp_path: Path) -> None:
    """Users' functions have the user's rights, and still cannot hold up the pool or leave a process behind."""
    mark = f"left-behind-{os.getpid()}"
    hostile = ["sleep", "spin", "trap", "memory", "prints", "exits", "crashes"]
    completions = [text for pair in zip(hostile, ["fine"] * len(hostile), strict=True) for text in pair]
    with open_pool({"python": "own_rewards:misbehave"}, folder=folder, limit=2, memory="256MiB", workers=4) as pool:
        verdicts = pool.verify([sample(text, mark=mark) for text in completions])
        (daemon,) = pool.verify([sample("daemon", mark=mark)])
        (forks,) = pool.verify([sample("forks", mark=mark)])  # alone: it leaves others little of the machine
        (last,) = pool.verify([sample("fine", mark=mark)])
        supervisor = pool.supervisor_pid
    assert not [verdict.error for verdict in verdicts[1::2] if verdict.reward != 1.0]
    assert [verdict.reward for verdict in verdicts[::2]] == [None] * len(hostile)
    errors = {text: verdict.error for text, verdict in zip(completions, verdicts, strict=True) if verdict.error}
    for text in ("sleep", "spin", "trap"):
        assert "exceeded verify.limit of 2 s" in errors[text]
    assert "memory" in errors["memory"]
    assert "printed more than" in errors["prints"]
    assert (daemon.reward, forks.reward, last.reward) == (1.0, None, 1.0)
    assert not processes_below(supervisor)
    assert not processes_with(mark)


def test_whoever_gives_up_a_sample_does_not_break_the_pool(folder: Path) -> None:
    """A trainer whose generation breaks off cancels what it awaits, and uses the same pool in the next one."""
    with open_pool({"python": "own_rewards:length"}, folder=folder) as pool:

        async def give_up() -> None:
            waiting = [asyncio.ensure_future(asyncio.wrap_future(pool.submit(sample("x")))) for _ in range(8)]
            await asyncio.sleep(0)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

        asyncio.run(give_up())
        assert [verdict.reward for verdict in pool.verify([sample("four")] * 4)] == [4.0] * 4


def test_workers_that_are_all_killed_at_once_cost_no_sample(folder: Path) -> None:
    """Also the process that forks them: no sample goes to one that is dead but not known to be, as its last attempt."""
    with open_pool({"python": "own_rewards:misbehave"}, folder=folder, workers=1) as pool:
        for _ in range(4):
            wait_until(lambda: len(pool.worker_pids) >= 2, "a worker and a spare")
            verdicts = [pool.submit(sample("slow")) for _ in range(2)]
            wait_until(lambda: len(psutil.Process(pool.supervisor_pid).children()) >= 3, "all processes")
            for process in psutil.Process(pool.supervisor_pid).children():
                process.kill()
            assert [verdict.result().reward for verdict in verdicts] == [1.0, 1.0]


def test_a_worker_that_is_killed_from_outside_costs_no_sample(folder: Path, tmp_path: Path) -> None:
    with open_pool({"python": "own_rewards:misbehave"}, folder=folder) as pool:
        (verdict,) = pool.verify([sample("once", mark=str(tmp_path / "mark"))])
        assert verdict.reward == 1.0
        wait_until(lambda: len(pool.worker_pids) >= 2, "two workers")
        first = pool.worker_pids
        os.kill(first[0], signal.SIGKILL)
        assert [verdict.reward for verdict in pool.verify([sample("fine")] * 8)] == [1.0] * 8
        wait_until(lambda: first[0] not in pool.worker_pids and len(pool.worker_pids) >= 2, "a replacement")


def test_a_supervisor_that_is_killed_costs_no_sample(folder: Path) -> None:
    with open_pool({"python": "own_rewards:length"}, folder=folder) as pool:
        first = pool.supervisor_pid
        futures = [pool.submit(sample("x" * number)) for number in range(20)]
        os.kill(first, signal.SIGKILL)
        futures += [pool.submit(sample("x" * number)) for number in range(20, 40)]
        assert [future.result().reward for future in futures] == [float(number) for number in range(40)]
        assert pool.supervisor_pid != first


def test_a_pool_works_beside_a_thousand_open_files(folder: Path) -> None:
    """As in a server with many clients: its descriptors are above those that select() takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        with open_pool({"python": "own_rewards:length"}, folder=folder) as pool:
            assert pool.verify([sample("abc")])[0].reward == 3.0
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_supervisor_that_is_stopped_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool gives it up at once here, not after the minute that a busy machine may take for a living one."""
    stopped: list[int] = []

    def wait(connection: socket.socket, seconds: float) -> bool:
        while not (is_readable := real_wait(connection, 0.1)):
            if pool.supervisor_pid in stopped:
                break
        return is_readable

    real_wait = pool_module._is_readable
    with open_pool({"python": "own_rewards:length"}, folder=folder) as pool:
        monkeypatch.setattr(pool_module, "_is_readable", wait)
        assert pool.submit(sample("a")).result().reward == 1.0  # from now on the pool waits as above
        stopped.append(pool.supervisor_pid)
        os.kill(stopped[0], signal.SIGSTOP)
        verdict = pool.submit(sample("abc"))
        assert verdict.result().reward == 3.0
        assert pool.supervisor_pid != stopped[0]


def test_pools_share_no_users() -> None:
    """The kernel counts processes by user: a fork bomb of one pool must not take those of another."""
    starters = [Starter({}, Isolation.NAMESPACES) for _ in range(4)]
    assert len({starter._num_started for starter in starters}) == len(starters)


def test_a_worker_that_is_being_ended_gets_no_further_sample() -> None:
    """A process may take longer to end than its verdict waits for; the next sample must not share its fate."""
    pool_side, supervisor_side = socket.socketpair()
    worker_side, _ = pair = socket.socketpair()
    reading, writing = os.pipe()
    supervisor = PoolSupervisor(supervisor_side, os.getpid())
    supervisor._settings = {"groups": ["open"], "limit": 60.0, "workers": 1, "open_workers": 1}
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    confined = ConfinedProcess(process.pid, Isolation.NAMESPACES)
    worker = PoolWorker("open", confined, Channel(worker_side), reading, is_ready=True)
    supervisor._workers.append(worker)
    supervisor._ending[worker] = 0.0
    supervisor._on_task(1, "open", b"sample", b"")
    supervisor._hand_out()
    assert not worker.is_busy
    assert len(supervisor._waiting["open"]) == 1
    del supervisor._ending[worker]
    supervisor._hand_out()
    assert worker.is_busy
    process.communicate(b"\n")
    for connection in (pool_side, supervisor_side, *pair):
        connection.close()
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_an_orphan_that_arrives_late_is_reaped(folder: Path) -> None:
    """A process whose parent died becomes the supervisor's child, also when no worker ends afterwards."""
    with open_pool({"python": "own_rewards:length"}, folder=folder) as pool:
        wait_until(lambda: len(pool.worker_pids) == 3, "two workers and a spare")
        worker = psutil.Process(pool.worker_pids[0])
        orphans = worker.children()
        worker.kill()  # the process between the supervisor and the worker's init
        wait_until(lambda: not any(orphan.is_running() for orphan in orphans), lambda: str(orphans))
        wait_until(
            lambda: all(process.status() != psutil.STATUS_ZOMBIE for process in processes_below(pool.supervisor_pid)),
            "zombies were left",
        )


def test_workers_have_one_thread(folder: Path) -> None:
    with open_pool({"python": "own_rewards:pid"}, folder=folder) as pool:
        assert pool.verify([sample("")])[0].reward == 1.0


def test_closing_gives_no_verdict_to_what_is_left(folder: Path) -> None:
    pool = open_pool({"python": "own_rewards:misbehave"}, folder=folder)
    futures = [pool.submit(sample("sleep")) for _ in range(3)]
    pool.close()
    assert [future.result() for future in futures] == [
        Verdict(None, {"own_rewards:misbehave": None}, "own_rewards:misbehave: the pool was closed")
    ] * 3
    assert pool.submit(sample("fine")).result().reward is None
    pool.close()


@needs_isolation
def test_nothing_outlives_a_trainer_that_is_killed(folder: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from verifier_pools import open_pool, sample
pool = open_pool({{"verifier": "exact"}}, {{"python": "own_rewards:misbehave"}}, folder=Path({str(folder)!r}))
pool.submit(sample("sleep", answer="x"))
print(pool.supervisor_pid, flush=True)
sys.stdin.read()
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    supervisor = int(trainer.stdout.readline())
    below = wait_until(lambda: processes_below(supervisor), "workers")
    trainer.kill()
    trainer.communicate()
    wait_until(lambda: not any(process.is_running() for process in below), lambda: str(below))
    wait_until(lambda: not os.path.exists(f"/proc/{supervisor}"), "the supervisor is still there")


def verdicts_with(failures: int, samples: int) -> list[Verdict]:
    return [Verdict(None, error=f"error {number}") for number in range(failures)] + [Verdict(1.0)] * (
        samples - failures
    )


def test_failures_of_a_step() -> None:
    assert judge_failures([]) == ""
    assert judge_failures(verdicts_with(5, 100)) == ""
    warning = judge_failures(verdicts_with(6, 100))
    assert warning.startswith("6 of 100 samples (6%) got no verdict")
    assert warning.endswith("error 0; error 1; error 2")
    assert judge_failures(verdicts_with(50, 100))
    with pytest.raises(VerifierError, match=r"51 of 100 samples \(51%\) got no verdict.*error 0; error 1"):
        judge_failures(verdicts_with(51, 100))
