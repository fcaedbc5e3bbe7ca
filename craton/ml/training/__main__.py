"""One rank: `python -m craton.ml.training RUN`.

Exits 0 when the last step is done, or when it was asked to stop (SIGTERM) and all ranks have saved their state;
otherwise with one line that says what to do when the job, its data or its memory is at fault, a user's own traceback
above it.
"""

from __future__ import annotations

import sys

from craton.ml.training.session import main, run_and_exit
from craton.telemetry.files import protect_output

if __name__ == "__main__":
    protect_output()
    run_and_exit(main, sys.argv[1:])
