"""`python -m craton.ml.selftest compute|bandwidth`: prints JSON, an object a line.

`compute` tests every GPU of this node by itself, or its processor: a line with the names of all, then one of each that
comes to its end, so that one that hangs takes nothing from the others. `bandwidth` is one rank of several: it takes its
place from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or from what srun sets; rank 0 prints one line.
Exit code 3 says that torch cannot be imported.
"""

from __future__ import annotations

import argparse
import json
import sys

NO_TORCH = 3


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m craton.ml.selftest")
    verbs = parser.add_subparsers(dest="verb", required=True)
    compute = verbs.add_parser("compute", help="the same products again and again; their hashes")
    compute.add_argument("--seconds", type=float, help="how long; default 20 on GPUs, 1 on a processor")
    bandwidth = verbs.add_parser("bandwidth", help="all-reduce in pairs of units")
    bandwidth.add_argument("--unit-ranks", type=int, default=1, help="ranks that form a unit: those of a node")
    bandwidth.add_argument("--megabytes", type=float, help="of the buffer; default 256 on GPUs, 4 on processors")
    bandwidth.add_argument("--expected", type=float, default=0.0, help="bytes per second that a pair should reach")
    options = parser.parse_args(arguments)
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a library of CUDA that it needs is not there
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
