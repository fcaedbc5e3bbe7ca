"""`python -m craton.ml.fork_server RUN`: the fork server of a node. Imports torch and the training code once (with
`--posttraining` also what generates, with `--serving` that of servers instead), then forks a rank or a
keeper whenever the node's agent requests one.

Nothing here may start a thread or touch a GPU before the fork: neither survives it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from craton.agent.coordination import run_secret
from craton.agent.memory import Keeper
from craton.agent.processes import FORK_SERVER_VARIABLE, answer_requests, open_log
from craton.agent.store import StoreServer
from craton.ml.training import session
from craton.telemetry import RunDirectory
from craton.telemetry.files import protect_output

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # linux/prctl.h
ADOPTION_SECONDS = 5.0
POSTTRAINING, SERVING = "--posttraining", "--serving"


def main(arguments: list[str]) -> int:
    """Serve requests until the agent exits. Returns only in a forked process, with its exit code."""
    run, *options = arguments or [""]
    if not run or options not in ([], [POSTTRAINING], [SERVING]):
        print(f"usage: python -m craton.ml.fork_server RUN [{POSTTRAINING} | {SERVING}]", file=sys.stderr)
        return 2
    work: Callable[[list[str]], int] = session.main
    if options == [SERVING]:
        importlib.import_module("craton.ml.serving.server.front")  # a forked rank forks its front end
        work = importlib.import_module("craton.ml.serving.__main__").main
    else:
        session.import_everything()
    if options == [POSTTRAINING]:
        from craton.ml import posttraining

        work = posttraining.main
    gc.collect()
    gc.freeze()  # imported objects are never collected, so their pages stay shared between all ranks
    connection = socket.socket(fileno=int(os.environ.pop(FORK_SERVER_VARIABLE)))
    kind, environment, log, agent = answer_requests(connection, ("rank", "keeper"))
    os.environ.update(environment)
    _become_a_child_of(agent, log, f"craton-{kind}-{environment.get('RANK', '')}".rstrip("-"))
    if kind == "keeper":
        return _keep(RunDirectory(run))
    return work([run])


def _become_a_child_of(agent: int, log: str, name: str) -> None:
    """Give the forked process its own session, log and process name; it dies with the agent."""
    os.setsid()
    with open_log(Path(log)) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    deadline = time.monotonic() + ADOPTION_SECONDS
    while os.getppid() != agent:  # until the intermediate process has exited
        if time.monotonic() > deadline:
            os._exit(126)
        time.sleep(0.0005)
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        library.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
        library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != agent:
            os._exit(126)


def _keep(run: RunDirectory) -> int:
    """Run the keeper: the rendezvous store and the in-memory state of the ranks, which outlive any rank."""
    host, secret = os.environ["CRATON_HOST"], run_secret(run)
    store = StoreServer(host, secret).start()
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"\0craton-keeper-{os.getpid()}-{os.urandom(8).hex()}"
    control.bind(name)
    control.listen(64)
    peers = socket.create_server((host, 0), backlog=64)
    folder = os.environ.get("CRATON_SHARED_MEMORY") or None
    keeper = Keeper(os.environ["CRATON_NODE"], secret, control, peers, folder)
    report = {"keeper": name[1:], "peers": f"{host}:{peers.getsockname()[1]}", "store": store.address}
    with os.fdopen(int(os.environ["CRATON_REPORT"]), "w") as answer:
        answer.write(json.dumps(report) + "\n")
    keeper.serve_forever()
    return 0


if __name__ == "__main__":
    protect_output()
    session.run_and_exit(main, sys.argv[1:])
