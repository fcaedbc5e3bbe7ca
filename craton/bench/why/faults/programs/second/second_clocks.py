"""Scripts of the second family clocks, and the services that they ask.

FAULT is what a script does in every step: `pace` waits for the next tick of the wall clock, `tls` asks a service over
TLS, `upload` sends an object with the time of the request. `second_clocks.py tls|upload FOLDER` is the service; it
writes its port to FOLDER/port.txt. Scripts find it by $SERVICE, the same folder.
"""

from __future__ import annotations

import http.client
import http.server
import os
import ssl
import sys
import time
from collections.abc import Callable
from email.utils import formatdate, parsedate_to_datetime
from pathlib import Path

TICK_SECONDS = 0.2
MAX_SKEW_SECONDS = 900.0
CERTIFICATE, KEY, PORT = "certificate.pem", "key.pem", "port.txt"


def train(work: Callable[[int], None]) -> None:
    step = 0
    while True:
        step += 1
        work(step)
        print(f"step {step} loss {3 - step / 1e4:.4f}", flush=True)


_tick = 0.0


def pace(step: int) -> None:
    """Wait for the next tick of the wall clock."""
    global _tick
    _tick = _tick + TICK_SECONDS if _tick > time.time() - 1 else time.time()
    time.sleep(max(0.0, _tick - time.time()))


def ask_over_tls(step: int) -> None:
    time.sleep(TICK_SECONDS)
    context = ssl.create_default_context(cafile=str(service_folder() / CERTIFICATE))
    service = http.client.HTTPSConnection("localhost", port(), context=context, timeout=30)
    service.request("GET", f"/samples/{step}")
    service.getresponse().read()
    service.close()


def upload(step: int) -> None:
    time.sleep(TICK_SECONDS)
    service = http.client.HTTPConnection("localhost", port(), timeout=30)
    service.request("PUT", f"/bucket/step-{step}", body=b"state", headers={"Date": formatdate(usegmt=True)})
    answer = service.getresponse()
    text = answer.read().decode()
    if answer.status != 200:
        raise RuntimeError(f"upload of step {step} failed with status {answer.status}: {text}")
    service.close()


def port() -> int:
    return int((service_folder() / PORT).read_text())


def service_folder() -> Path:
    return Path(os.environ["SERVICE"])


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(200, "sample")

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        skew = abs(parsedate_to_datetime(self.headers["Date"]).timestamp() - time.time())
        if skew > MAX_SKEW_SECONDS:
            message = "The difference between the request time and the current time is too large."
            self._answer(403, f"<Error><Code>RequestTimeTooSkewed</Code><Message>{message}</Message></Error>")
        else:
            self._answer(200, "")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


def serve(mode: str, folder: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if mode == "tls":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    (folder / PORT).write_text(str(server.server_address[1]))
    server.serve_forever()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(sys.argv[1], Path(sys.argv[2]))
    train({"pace": pace, "tls": ask_over_tls, "upload": upload}[os.environ["FAULT"]])
