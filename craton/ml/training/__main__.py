"""One rank: `python -m craton.ml.training RUN`.

Exits 0 when the last step is done, or when a stop was requested (SIGTERM) and all ranks have saved their state. If the
job, its data or its memory is at fault, it prints one line that says what to do; for user code, below its traceback.
"""

from __future__ import annotations

import sys

from craton.ml.training.session import main, run_and_exit
from craton.telemetry.files import protect_output

if __name__ == "__main__":
    protect_output()
    run_and_exit(main, sys.argv[1:])
