"""Find, start, query and stop Prometheus and Alertmanager as local processes.

Both listen only on the given address, keep their data in one folder, and end when this process ends for any reason.
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
    """Return the program's path; ObserveError says how to install it."""
    for name in names:
        # Some packages install into folders that are often missing from PATH, such as /usr/sbin.
        if result := shutil.which(name) or shutil.which(name, path="/usr/local/bin:/usr/sbin:/opt/prometheus"):
            return result
    raise ObserveError(
        f"{names[0]} is not installed. On Debian and Ubuntu run `apt-get install prometheus prometheus-alertmanager`; "
        "elsewhere download it from prometheus.io/download and add it to PATH"
    )


def check_port(host: str, port: int, program: str) -> None:
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except (OSError, OverflowError) as error:
        reason, number = (error.strerror, error.errno) if isinstance(error, OSError) else (error, None)
        taken = number == errno.EADDRINUSE
        advice = "choose another --port, or stop the program that uses it" if taken else "change --port or --listen"
        raise ObserveError(f"{program} cannot listen on {joined(host, port)} ({reason}); {advice}") from None


@dataclass
class ObserverProcess:
    """A running Prometheus or Alertmanager process."""

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
        """Send a GET to its API and return the JSON answer; OSError when it fails."""
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=ASK_SECONDS)
        try:
            connection.request("GET", path + query)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", errors="replace")
        except http.client.HTTPException as error:
            raise OSError(f"{self.name} at {self.url} did not answer: {error}") from error
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
                    words = "this build has no Kubernetes discovery, like Debian's; install it from prometheus.io"
                raise ObserveError(f"{self.name} failed to start: {words}")
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
    """Start Prometheus with FOLDER/prometheus.yml and its data in FOLDER/prometheus."""
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
    """Start Alertmanager with FOLDER/alertmanager.yml and its data in FOLDER/alertmanager, without clustering."""
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
        # Own process group: Ctrl-C reaches only this process, which then stops both in order.
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
