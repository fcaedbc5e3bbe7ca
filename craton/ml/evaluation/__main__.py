"""One rank of an evaluation: `python -m craton.ml.evaluation RUN`, started by the node's agent."""

from __future__ import annotations

import sys

from craton.ml.evaluation.rank import main

if __name__ == "__main__":
    sys.exit(main())
