"""Wall clocks of nodes, second set: what services and programs make of a wrong clock, and clocks that never settle."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

from craton.bench.why.faults.fault import ExpectedVerdict, JobRecipe, LiveFault
from craton.bench.why.faults.injections import program_path
from craton.bench.why.faults.node_clocks import CLOCK, HOUR, NEEDS, jump, with_clocks
from craton.bench.why.faults.running import RunningJob
from craton.bench.why.faults.system_injections import client

FLAP_SECONDS = 2.0
CERTIFY = (
    *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=localhost"),
    *("-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "certificate.pem"),
)


def _script(fault: str, prepare: Callable[[RunningJob], None]) -> JobRecipe:
    progress = {"pattern": "step {step} loss {loss}", "hang": "10x"}
    return JobRecipe(
        kind="command",
        keys={"command": ["{python}", "second_clocks.py"], "progress": progress},
        program="second_clocks",
        fault=fault,
        env={"SERVICE": "{folder}/job"},
        prepare=prepare,
    )


def _with_service(mode: str) -> Callable[[RunningJob], None]:
    def prepare(job: RunningJob) -> None:
        if mode == "tls":
            subprocess.run(CERTIFY, cwd=job.folder, check=True, capture_output=True)
        job.spawn([sys.executable, str(program_path("second_clocks")), mode, str(job.folder)])
        job.wait((job.folder / "port.txt").exists, "the service listens")
        with_clocks()(job)

    return prepare


def _at_the_epoch(job: RunningJob) -> None:
    with_clocks(1, offset=100.0 - time.time())(job)


def _flap(job: RunningJob) -> None:
    """Set the clock of node-0 ahead and back in turn, as two services that correct each other do."""
    over = threading.Event()
    job.undo.callback(over.set)

    def act() -> None:
        offset = 120.0
        while not over.wait(FLAP_SECONDS):
            offset = -offset
            jump(0, seconds=offset)(job)

    jump(0, seconds=120.0)(job)
    threading.Thread(target=act, daemon=True).start()


def _jump_under_load(job: RunningJob) -> None:
    client(job, "ask", 2)
    jump(0, seconds=-HOUR)(job)


def _wrong_clock(rank: int, *conditions: str) -> ExpectedVerdict:
    return ExpectedVerdict(("host",), conditions, ranks=frozenset({rank}), node=f"node-{rank}", remedy=CLOCK)


FAULTS = (
    LiveFault(
        name="clock-back-makes-a-sleep-endless",
        family="clocks",
        summary="The clock of node-0 jumps an hour back; a script there sleeps until a tick that is an hour away.",
        source="https://github.com/JacORB/JacORB/issues/210",
        job=_script("pace", with_clocks()),
        inject=jump(0, seconds=-HOUR),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("hung", "dead"),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(*CLOCK, r"sleep|stack|py-spy"),
        ),
        judge_seconds=30,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-back-voids-a-certificate",
        family="clocks",
        summary="The clock of node-1 jumps two days back; the certificate of a service is not yet valid there.",
        source="https://github.com/openssl/openssl/issues/14771",
        job=_script("tls", _with_service("tls")),
        inject=jump(1, seconds=-48 * HOUR),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({1}),
            node="node-1",
            remedy=(*CLOCK, r"not yet valid|certificate"),
        ),
        needs=(*NEEDS, "openssl"),
    ),
    LiveFault(
        name="clock-ahead-of-object-store",
        family="clocks",
        summary="The clock of node-0 gets 20 minutes ahead; the object store refuses its uploads as too skewed.",
        source="https://github.com/aws/aws-sdk-php/issues/612",
        job=_script("upload", _with_service("upload")),
        inject=jump(0, seconds=1200.0),
        expected=ExpectedVerdict(
            layers=("host", "framework"),
            conditions=("dead",),
            ranks=frozenset({0}),
            node="node-0",
            remedy=(*CLOCK, r"RequestTimeTooSkewed|skew|request time"),
        ),
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-at-the-epoch",
        family="clocks",
        summary="Node-1 booted without a battery and without NTP; its clock says 1970 from the start. The run works.",
        source="https://github.com/uboslinux/ubos-admin/issues/17",
        job=JobRecipe(kind="sft", keys={"train": {"lora": {"rank": 4}}}, prepare=_at_the_epoch),
        expected=_wrong_clock(1, "healthy", "slow", "starting"),
        onset="start",
        judge_seconds=40,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-flaps",
        family="clocks",
        summary="Two time services on node-0 fight: every two seconds its clock jumps by four minutes, there and back.",
        source="https://github.com/vmware/open-vm-tools/issues/302",
        job=JobRecipe(keys={"layout": {"tp": 2}}, prepare=with_clocks()),
        inject=_flap,
        expected=_wrong_clock(0, "healthy", "slow"),
        judge_seconds=25,
        needs=NEEDS,
    ),
    LiveFault(
        name="clock-of-server-jumps-back",
        family="clocks",
        summary="The clock of a server's node jumps an hour back while clients wait for answers; it still answers.",
        source="https://github.com/prometheus/blackbox_exporter/issues/38",
        job=JobRecipe(kind="serve", nodes=1, prepare=with_clocks()),
        inject=_jump_under_load,
        expected=_wrong_clock(0, "healthy", "slow"),
        judge_seconds=25,
        needs=NEEDS,
    ),
)
