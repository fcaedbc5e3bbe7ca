"""The template of open workers: loads users' functions once, then forks a worker whenever the supervisor asks for one.

Open workers run the user's own code (functions, environments) and the judge. They have the rights of this user, but
each is in a pid namespace of its own where the machine has them, so that killing it ends everything it started.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from craton.errors import CratonError
from craton.ml.functions import load_function, search_folder, user_code
from craton.ml.verifiers.environment import Environment, reset_reply, step_reply
from craton.ml.verifiers.errors import VerifierError
from craton.ml.verifiers.judge import judge
from craton.ml.verifiers.rewards import as_reward
from craton.ml.verifiers.sandbox import follow_parent, limit_further_memory, run_in_own_processes
from craton.ml.verifiers.wire import BlockingChannel

CHANNEL = 3  # descriptor of a worker's connection
REQUEST_BYTES = 1 << 16
SETTINGS_BYTES = 1 << 20


def start(descriptor: int, supervisor: int) -> None:
    """Load what the settings name, then fork on request until the supervisor is gone. Never returns."""
    follow_parent(supervisor)
    os.setpriority(os.PRIO_PROCESS, 0, max(0, os.getpriority(os.PRIO_PROCESS, 0)))
    connection = socket.socket(fileno=descriptor)
    settings = json.loads(connection.recv(SETTINGS_BYTES))
    if settings["folder"]:
        search_folder(Path(settings["folder"]))
    try:
        functions = {name: load_function(name) for name in settings["functions"]}
        for name, function in functions.items():
            _check_signature(name, function)
        environment = load_function(settings["environment"]) if settings["environment"] else None
        if environment is not None:
            _check_environment(settings["environment"], environment)
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

    def serve(self) -> None:
        limit_further_memory(self._settings["memory_bytes"])
        channel = BlockingChannel(CHANNEL)
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


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    """Refuse a function that cannot be called with (prompt, completion, row, transcript)."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some built-in functions have none
    try:
        signature.bind("", "", {}, [])
    except TypeError:
        raise VerifierError(
            f"{name}{signature} cannot be called with a sample; a reward takes (prompt, completion, row, transcript)"
        ) from None


def _check_environment(name: str, environment: Any) -> None:
    missing = [
        method for method in ("reset", "step") if inspect.isclass(environment) and not hasattr(environment, method)
    ]
    if missing:
        raise VerifierError(f"{name} has no method {' and '.join(missing)}; an environment has reset and step")


def _fork_worker(worker: OpenWorker, descriptors: Sequence[int], supervisor: int) -> None:
    """Become a worker with a session and output of its own; adopted by the supervisor, and dies with it."""
    try:
        os.setsid()
        follow_parent(supervisor)
        nothing = os.open(os.devnull, os.O_RDONLY)
        placed = [os.dup(descriptor) for descriptor in (nothing, descriptors[1], descriptors[1], descriptors[0])]
        for target, source in enumerate(placed):
            os.dup2(source, target, inheritable=target != CHANNEL)
        os.closerange(CHANNEL + 1, 1 << 20)
        run_in_own_processes(worker.serve)
    except BaseException as error:  # noqa: BLE001 (a forked copy must never return into the template's loop)
        print(f"a verifier's worker could not start: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)
