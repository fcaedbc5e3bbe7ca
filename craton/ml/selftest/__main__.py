"""`python -m craton.ml.selftest compute|bandwidth`: print JSON lines.

`compute` tests every GPU of this node (without GPUs: the CPU). It first prints the names of all devices, then one line
per device as it finishes, so a device that hangs does not hide the others. `bandwidth` runs as one of several ranks. It
reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or the variables that srun sets; rank 0 prints one
line. Exit code 3 means that torch cannot be imported.
"""

from __future__ import annotations

import argparse
import json
import sys

NO_TORCH = 3


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m craton.ml.selftest")
    verbs = parser.add_subparsers(dest="verb", required=True)
    compute = verbs.add_parser(
        "compute", help="repeat seeded matmuls and attention, and print the hashes of their results"
    )
    compute.add_argument("--seconds", type=float, help="seconds per device [default: 20 on GPUs, 1 on a CPU]")
    bandwidth = verbs.add_parser("bandwidth", help="measure all-reduce between pairs of units")
    bandwidth.add_argument(
        "--unit-ranks", type=int, default=1, help="ranks per unit, normally those of one node [default: 1]"
    )
    bandwidth.add_argument("--megabytes", type=float, help="buffer size [default: 256 on GPUs, 4 on CPUs]")
    bandwidth.add_argument(
        "--expected",
        type=float,
        default=0.0,
        help="bytes per second that a pair should reach [default: judge by the fast pairs]",
    )
    options = parser.parse_args(arguments)
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a CUDA library that torch needs is missing
        print(f"torch cannot be imported: {error}", file=sys.stderr)
        return NO_TORCH
    if options.verb == "compute":
        from craton.ml.selftest.compute import check_devices, devices_here

        devices = devices_here()
        print(json.dumps({"devices": [str(device) for device in devices]}), flush=True)
        for result in check_devices(devices, options.seconds):
            print(json.dumps({"result": result}), flush=True)
        return 0
    from craton.ml.selftest.bandwidth import measure_pairs

    found = measure_pairs(options.unit_ranks, options.megabytes, options.expected)
    if found is not None:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
