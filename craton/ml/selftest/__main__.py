"""`python -m craton.ml.selftest compute|bandwidth`: prints one JSON object.

`compute` tests every GPU of this node by itself, or its processor. `bandwidth` is one rank of several: it takes its
place from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or from what srun sets; rank 0 prints.
"""

from __future__ import annotations

import argparse
import json
import sys


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
    if options.verb == "compute":
        from craton.ml.selftest.compute import check_devices

        print(json.dumps({"devices": check_devices(options.seconds)}))
        return 0
    from craton.ml.selftest.bandwidth import measure_pairs

    found = measure_pairs(options.unit_ranks, options.megabytes, options.expected)
    if found is not None:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
