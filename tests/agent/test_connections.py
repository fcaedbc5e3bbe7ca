"""The TCP connections of a rank, by the kernel, in a network namespace whose links go away."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_SECONDS

PROGRAM = Path(__file__).with_name("connection_faults.py")


def test_what_is_not_acknowledged_is_found_by_peer() -> None:
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs ip and unshare")
    command = ["unshare", "--net", sys.executable, str(PROGRAM), str(PATIENCE_SECONDS)]
    if os.geteuid() != 0 or subprocess.run(["unshare", "--net", "true"], check=False).returncode != 0:
        pytest.skip("network namespaces need root")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    up, down, *_, peers = map(json.loads, done.stdout.splitlines())
    assert (up, down) == ("", "near")
    assert {address: peer["connecting_port"] for address, peer in peers.items()} == {"10.9.1.1": 0, "10.9.0.77": 29500}
    assert all(peer["unacknowledged_seconds"] > 2.0 for peer in peers.values())
