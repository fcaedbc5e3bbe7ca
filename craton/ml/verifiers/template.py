"""The template of open workers: loads users' functions once, then forks a worker whenever the supervisor asks for one.

Open workers run the user's own code (functions, environments) and the judge. They have the rights of this user, but
each is in a pid namespace of its own where the machine has them, so that killing it ends everything it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from craton.errors import CratonError
from craton.ml.functions import load_function, search_folder, user_code
from craton.ml.verifiers.environment import Environment, reset_reply, step_reply
from craton.ml.verifiers.judge import judge
from craton.ml.verifiers.rewards import as_reward
from craton.ml.verifiers.sandbox import kernel
from craton.ml.verifiers.sandbox.limits import set_limit
from craton.ml.verifiers.sandbox.namespaces import become_init
from craton.ml.verifiers.sandbox.processes import kill_descendants
from craton.ml.verifiers.wire import BlockingChannel

ADOPTION_SECONDS = 5.0
REQUEST_BYTES = 1 << 16
SETTINGS_BYTES = 1 << 20


def start(descriptor: int, supervisor: int) -> None:
    """Load what the settings name, then fork on request until the supervisor is gone. Never returns."""
    kernel.die_with_parent(supervisor)
    connection = socket.socket(fileno=descriptor)
    settings = json.loads(connection.recv(SETTINGS_BYTES))
    if settings["folder"]:
        search_folder(Path(settings["folder"]))
    try:
        functions = {name: load_function(name) for name in settings["functions"]}
        environment = load_function(settings["environment"]) if settings["environment"] else None
    except CratonError as error:
        connection.sendall(json.dumps({"error": str(error)[:4000]}).encode())
        os._exit(1)
    connection.sendall(b'{"ready": true}')
    worker = OpenWorker(settings, functions, environment)
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 2)
        if not request:
            os._exit(0)
        reading, writing = os.pipe()
        middle = os.fork()
        if middle == 0:
            child = os.fork()
            if child:
                os.write(writing, str(child).encode())
                os._exit(0)
            _fork_worker(worker, descriptors, supervisor)
        os.close(writing)
        pid = os.read(reading, 32)
        os.close(reading)
        os.waitpid(middle, 0)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(pid)


class OpenWorker:
    """Serves one connection: calls of functions, questions to the judge, and one episode of an environment."""

    def __init__(
        self, settings: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]], environment: Any
    ) -> None:
        self._settings = settings
        self._functions = functions
        self._make_environment = environment
        self._environment: Environment | None = None

    def serve(self, channel: BlockingChannel) -> None:
        channel.send(b'{"ready": true}')
        while (message := channel.receive()) is not None:
            channel.send(json.dumps(self._reply(pickle.loads(message))).encode())

    def _reply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._answer(request)
        except MemoryError:
            return {"error": "needs more memory than verify.memory", "exhausted": True}
        except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever a user's function raises costs one sample and is reported)
            text = str(error) if isinstance(error, CratonError) else f"{type(error).__name__}: {error}"
            return {"error": text[:2000]}

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name = request["name"]
        if request["what"] == "judge":
            arguments = (request["prompt"], request["completion"], request["answer"], request["options"])
            return {"value": judge(*arguments, seconds=self._settings["limit"])}
        if request["what"] == "function":
            function = self._functions[name]
            arguments = (request["prompt"], request["completion"], request["row"], request["transcript"])
            with user_code(function, name):
                value = function(*arguments)
            return {"value": as_reward(value, name)}
        with user_code(self._make_environment, name):
            if request["what"] == "reset":
                self._environment = self._make_environment()
                return reset_reply(self._environment, name, request["row"])
            assert self._environment is not None
            return step_reply(self._environment, name, request["completion"])


def _fork_worker(worker: OpenWorker, descriptors: Sequence[int], supervisor: int) -> None:
    """Become a worker: own session, output and pid namespace; adopted by the supervisor, and dies with it."""
    try:
        os.setsid()
        _wait_for_parent(supervisor)
        kernel.die_with_parent(supervisor)
        nothing = os.open(os.devnull, os.O_RDONLY)
        channel = 3
        placed = [os.dup(descriptor) for descriptor in (nothing, descriptors[1], descriptors[1], descriptors[0])]
        for target, source in enumerate(placed):
            os.dup2(source, target, inheritable=target < channel)
        os.closerange(channel + 1, 1 << 20)
        own = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | (0 if os.geteuid() == 0 else kernel.CLONE_NEWUSER)

        def serve() -> None:
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
            _limit_data(worker._settings["memory_bytes"])
            worker.serve(BlockingChannel(channel))

        try:
            become_init(own, _mount_processes, serve)
        except OSError:
            _guard(serve)
    except BaseException as error:  # noqa: BLE001 (a forked copy must never return into the template's loop)
        print(f"a verifier's worker could not start: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def _wait_for_parent(parent: int) -> None:
    deadline = time.monotonic() + ADOPTION_SECONDS
    while os.getppid() != parent:  # until the process between has ended
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)


def _mount_processes() -> None:
    """Show the processes of the namespace in /proc, which libraries read about themselves; some machines forbid it."""
    with contextlib.suppress(OSError):
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)


def _guard(serve: Callable[[], None]) -> None:
    """Without pid namespaces: adopt what the worker leaves behind, and end it."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        os.setsid()
        kernel.die_with_parent(guard)
        serve()
        os._exit(0)
    os.close(3)
    while os.waitpid(-1, 0)[0] != child:
        pass
    kill_descendants(guard)
    os._exit(0)


def _limit_data(memory_bytes: int) -> None:
    """Limit memory to what the loaded modules have taken already and `verify.memory` more."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            set_limit(resource.RLIMIT_DATA, int(line.split()[1]) * 1024 + memory_bytes)
    set_limit(resource.RLIMIT_CORE, 0)
