"""One rank of kind dpo or grpo: `python -m craton.ml.posttraining RUN`. Its exit codes are those of
`craton.ml.training`."""

from __future__ import annotations

import sys

from craton.ml.posttraining.build import main
from craton.ml.training import session
from craton.telemetry.files import protect_output

if __name__ == "__main__":
    protect_output()
    session.run_and_exit(main, sys.argv[1:])
