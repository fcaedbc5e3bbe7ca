"""Prometheus and Alertmanager as processes of this machine: found, started, asked, ended.

Both listen where they are told and nowhere else, keep their data in one folder, and end with this process, however that
ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from craton.formatting import setting
from craton.observability.prometheus.errors import ObserveError
from craton.observability.prometheus.targets import joined

PROMETHEUS = ("prometheus",)
ALERTMANAGER = ("alertmanager", "prometheus-alertmanager")  # Debian has the longer name
READY_SECONDS = 30.0
ENDING_SECONDS = 10.0
ASK_SECONDS = 5.0
RETENTION = "30d"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def find_program(names: tuple[str, ...]) -> str:
    """Its path; ObserveError says how to install it."""
    for name in names:
        # Debian puts neither into a folder that everybody's PATH lacks, but other packages use /usr/sbin.
        if result := shutil.which(name) or shutil.which(name, path="/usr/local/bin:/usr/sbin:/opt/prometheus"):
            return result
    raise ObserveError(
        f"{names[0]} is not installed; on Debian and Ubuntu `apt-get install prometheus prometheus-alertmanager`, "
        "elsewhere from prometheus.io/download, then put it on the PATH"
    )


def check_port(host: str, port: int, program: str) -> None:
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except (OSError, OverflowError) as error:
        reason, number = (error.strerror, error.errno) if isinstance(error, OSError) else (error, None)
        taken = number == errno.EADDRINUSE
        advice = "give another --port, or end what has it" if taken else "give another --port or --listen"
        raise ObserveError(f"{program} cannot listen at {joined(host, port)} ({reason}); {advice}") from None


@dataclass
class ObserverProcess:
    """One of the two, while it runs."""

    name: str
    host: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def address(self) -> str:
        return joined(self.host, self.port)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def ask(self, path: str, **parameters: str) -> Any:
        """What its API answers to a GET, as JSON; OSError when it does not."""
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=ASK_SECONDS)
        try:
            connection.request("GET", path + query)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", errors="replace")
        except http.client.HTTPException as error:
            raise OSError(f"{self.name} at {self.url} gave no answer: {error}") from error
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise OSError(f"{self.name} at {self.url}{path} answers {answer.status}: {text[:200]}")
        return json.loads(text) if text.startswith(("{", "[")) else text

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            if not self.is_running:
                words = self.last_words()
                if "kubernetes_sd_configs not found" in words:
                    words = "it was built without discovery in Kubernetes, as Debian's is: take it from prometheus.io"
                raise ObserveError(f"{self.name} ended at once: {words}")
            with contextlib.suppress(OSError):
                self.ask("/-/ready")
                return
            if time.monotonic() > deadline:
                raise ObserveError(f"{self.name} is not ready after {setting(READY_SECONDS)}; its log is {self.log}")
            time.sleep(0.05)

    def reload(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    def last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " | ".join(lines[-3:]) or f"see {self.log}"

    def end(self) -> None:
        if self.is_running:
            self.process.terminate()
        try:
            self.process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_prometheus(folder: Path, host: str, port: int) -> ObserverProcess:
    """Of FOLDER/prometheus.yml, with its data in FOLDER/prometheus."""
    command = [
        find_program(PROMETHEUS),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        f"--storage.tsdb.retention.time={RETENTION}",
        f"--web.listen-address={joined(host, port)}",
        "--log.level=warn",
    ]
    return _start("prometheus", command, host, port, folder)


def start_alertmanager(folder: Path, host: str, port: int) -> ObserverProcess:
    """Of FOLDER/alertmanager.yml, with its data in FOLDER/alertmanager; it looks for no peers."""
    command = [
        find_program(ALERTMANAGER),
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address={joined(host, port)}",
        "--cluster.listen-address=",
        "--log.level=warn",
    ]
    return _start("alertmanager", command, host, port, folder)


def _start(name: str, command: list[str], host: str, port: int, folder: Path) -> ObserverProcess:
    check_port(host, port, name)
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        # A group of its own: Ctrl-C reaches this process first, which ends the two in order.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
    service = ObserverProcess(name, host, port, process, log)
    try:
        service.wait_until_ready()
    except BaseException:
        service.end()
        raise
    return service


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
