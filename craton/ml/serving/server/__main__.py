"""Starts the front end. A missing package is an error that a restart cannot fix (exit status 2)."""

from __future__ import annotations

import sys

try:
    from craton.ml.serving.server.front import main
except ModuleNotFoundError as error:
    print(
        f"error: the front end needs {error.name}, which is not installed; pip install 'craton[serve]'", file=sys.stderr
    )
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main())
