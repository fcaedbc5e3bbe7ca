"""Program of the health pods: run `craton doctor`, keep /tmp/fit while the node is fit, cordon a node that is unfit.

Guarantees: a node is unfit only if doctor reports a failure that a pod can judge. A pod has its own shared memory,
limits, libraries and variables, and no EFA devices unless it requests them: problems with those are not problems of the
node. A doctor that crashes, hangs or is missing is not a failure of the node either.

It runs as a single file in the pod, with only Python's standard library and the command `craton`.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
FIT = Path(os.environ.get("FIT_FILE", "/tmp/fit"))
GPU_CONTROL = Path(os.environ.get("GPU_CONTROL", "/dev/nvidiactl"))  # exists in a pod that was given GPUs
# Findings about the GPUs themselves. `gpu_model` is left out: the catalog may be wrong, and for all nodes.
JUDGED = (
    "gpu_driver",
    "gpu_count",
    "gpu_recovery",
    "gpu_memory",
    "gpu_row_remap",
    "gpu_throttle",
    "gpu_pcie",
    "nvlink",
    "nvlink_fabric",
    "xid",
)


def main() -> None:
    interval = float(os.environ["INTERVAL_SECONDS"])
    rounds = int(os.environ.get("ROUNDS", "0"))  # 0: forever
    done = 0
    while True:
        look()
        done += 1
        if done == rounds:
            return
        time.sleep(interval)


def look() -> None:
    """Run one check. A check that cannot run does not make the node unfit."""
    findings = ask()
    failures = judged(findings)
    for finding in findings:
        if finding["severity"] == "fail" and finding not in failures:
            print(f"problem of this pod, not of the node: {finding['what']}: {finding['evidence']}", flush=True)
    if not failures:
        FIT.touch()
        return
    reason = "; ".join(f"{finding['what']}: {finding['evidence']}" for finding in failures)
    print(f"unfit: {reason}", flush=True)
    FIT.unlink(missing_ok=True)
    if os.environ.get("CORDON") == "yes":
        cordon(os.environ["NODE_NAME"], reason)


def ask() -> list[dict[str, Any]]:
    """Return the findings of doctor; none where it could not run."""
    if not (GPU_CONTROL.exists() and shutil.which("nvidia-smi")):
        return cannot_be_checked("the container runtime gave this pod no GPUs (NVIDIA_VISIBLE_DEVICES=all)")
    command, limit = ["craton", "doctor", "--json"], float(os.environ["CHECK_SECONDS"])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return cannot_be_checked(str(error))
    try:
        return [dict(finding) for finding in json.loads(done.stdout)["findings"]]
    except (ValueError, KeyError, TypeError):
        return cannot_be_checked(f"craton doctor ended with {done.returncode}: {(done.stderr or done.stdout).strip()}")


def judged(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the failures of the node itself."""
    return [finding for finding in findings if finding["severity"] == "fail" and finding["what"] in JUDGED]


def cannot_be_checked(why: str) -> list[dict[str, Any]]:
    print(f"the node cannot be checked: {why}", file=sys.stderr, flush=True)
    return []


def cordon(node: str, why: str) -> None:
    """Cordon the node: no new pods, running ones continue. An operator uncordons it after the repair."""
    host = os.environ["KUBERNETES_SERVICE_HOST"]
    scheme = os.environ.get("KUBERNETES_SCHEME", "https")
    address = f"{scheme}://{host}:{os.environ['KUBERNETES_SERVICE_PORT']}/api/v1/nodes/{node}"
    reason = {"metadata": {"annotations": {"craton/unfit": f"craton doctor: {why}"[:1000]}}}
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
