"""The program of the health pods: asks `craton doctor`, shows by /tmp/fit what it said, cordons a node that is unfit.

It runs as a file of its own in the pod, with nothing but Python's standard library and the command `craton`.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
FIT = Path(os.environ.get("FIT_FILE", "/tmp/fit"))


def main() -> None:
    interval = float(os.environ["INTERVAL_SECONDS"])
    rounds = int(os.environ.get("ROUNDS", "0"))  # 0: for ever
    done = 0
    while True:
        look()
        done += 1
        if done == rounds:
            return
        time.sleep(interval)


def look() -> None:
    """One check. What cannot be checked is not held against the node."""
    try:
        code = subprocess.run(
            ["craton", "doctor", "--json"], timeout=float(os.environ["CHECK_SECONDS"]), check=False
        ).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"the node cannot be checked: {error}", file=sys.stderr, flush=True)
        code = 0
    if code != 1:
        FIT.touch()
        return
    FIT.unlink(missing_ok=True)
    if os.environ.get("CORDON") == "yes":
        cordon(os.environ["NODE_NAME"])


def cordon(node: str) -> None:
    """No new pods; those that run are left alone. Whoever mended the node uncordons it."""
    host = os.environ["KUBERNETES_SERVICE_HOST"]
    scheme = os.environ.get("KUBERNETES_SCHEME", "https")
    address = f"{scheme}://{host}:{os.environ['KUBERNETES_SERVICE_PORT']}/api/v1/nodes/{node}"
    reason = {"metadata": {"annotations": {"craton/unfit": "craton doctor found a failure: see the health pod's log"}}}
    request = urllib.request.Request(
        address,
        data=json.dumps({"spec": {"unschedulable": True}, **reason}).encode(),
        method="PATCH",
        headers={"Content-Type": "application/merge-patch+json", "Authorization": f"Bearer {_token()}"},
    )
    trust = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt")) if scheme == "https" else None
    try:
        with urllib.request.urlopen(request, timeout=30, context=trust):
            print(f"cordoned {node}", flush=True)
    except OSError as error:
        print(f"{node} is unfit and could not be cordoned: {error}", file=sys.stderr, flush=True)


def _token() -> str:
    path = ACCOUNT / "token"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


if __name__ == "__main__":
    main()
