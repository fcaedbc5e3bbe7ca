"""A stand-in for `python -m craton.ml.serving RUN`: no model, no engine, but the same promises to whoever starts it. It
breaks at the moment a test wants, in a tenth of the time; tests/ml/serving/test_whole_server.py starts the real one.

Rank 0 tells its stages, answers /health and /metrics at the job's address, and on SIGTERM lets requests finish: as long
as the file `busy` lies in the run directory there are some. Files in the run directory break it: `die-N` ends rank N.
The environment says what it does at its start: FAIL ends it with these last words, as the engine ends when the device
has too little memory.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from craton.agent.processes import EXIT_FINAL
from craton.job import load_job
from craton.telemetry import RunDirectory
from craton.telemetry.rank import Recorder

METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m"} 1.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{model_name="m"} 1000.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="0.02",model_name="m"} 0.0
vllm:time_to_first_token_seconds_bucket{le="0.04",model_name="m"} 10.0
vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 10.0
vllm:time_to_first_token_seconds_count{model_name="m"} 10.0
vllm:time_to_first_token_seconds_sum{model_name="m"} 0.3
"""


class Handler(BaseHTTPRequestHandler):
    is_draining = False

    def do_GET(self) -> None:
        status = 503 if self.path == "/health" and Handler.is_draining else 200
        body = METRICS.encode() if self.path == "/metrics" else b"{}"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main() -> int:
    run, rank = RunDirectory(Path(sys.argv[1])), int(os.environ["RANK"])
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} begins", flush=True)
    if os.environ.get("FAIL"):
        print(os.environ["FAIL"], flush=True)
        return EXIT_FINAL
    recorder = Recorder.from_environment()
    if rank == 0:
        serve = load_job(run.job_path).serve
        assert serve is not None
        recorder.event("serving", stage="loading weights")
        server = ThreadingHTTPServer((serve.host, serve.port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        recorder.event("serving", stage="ready", kv_tokens=4242)
        recorder.metrics(1, run_step_seconds=0.01, run_tokens_per_second=100.0)
    while not told.is_set():
        if (run.path / f"die-{rank}").exists():
            (run.path / f"die-{rank}").unlink()
            print(f"rank {rank} dies", flush=True)
            os._exit(1)
        time.sleep(0.02)
    Handler.is_draining = True
    while rank == 0 and (run.path / "busy").exists():
        time.sleep(0.02)
    print(f"rank {rank} has drained", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
