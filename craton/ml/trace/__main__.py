"""`python -m craton.ml.trace JOB --layout JSON`: run a trace in its own process, so that no fake group outlives it.

Prints JSON lines on stdout: {"done": 0, "of": 2, "what": "..."} while it runs, then {"trace": ..., "comparison": ...}.
A user error prints {"error": "..."} and exits with code 2.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import asdict

from craton.errors import CratonError
from craton.job import load_job
from craton.job.layout import Layout
from craton.ml.trace.comparison import compare
from craton.ml.trace.trace import trace


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m craton.ml.trace", description=__doc__)
    parser.add_argument("job")
    parser.add_argument("--layout", required=True, help="layout fields as JSON")
    parser.add_argument(
        "--ranks", default="", help="ranks to trace, e.g. 0,8 [default: one of every pipeline stage that differs]"
    )
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # on fake ranks; the real run shows its own
    try:
        job, layout = load_job(given.job), Layout(**json.loads(given.layout))
        ranks = [int(rank) for rank in given.ranks.split(",") if rank]
        found = trace(job, layout, ranks, lambda done, of, what: _say({"done": done, "of": of, "what": what}))
        _say({"trace": asdict(found), "comparison": asdict(compare(job, layout, found))})
    except CratonError as error:
        _say({"error": str(error)})
        return 2
    return 0


def _say(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
