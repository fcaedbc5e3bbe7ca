"""Starts the front end. A missing package is an error that a restart cannot fix (exit status 2)."""

from __future__ import annotations

import sys

from craton.extras import install_command, missing_text

try:
    from craton.ml.serving.server.front import main
except ModuleNotFoundError as error:
    text = missing_text("the front end", [str(error.name)], install_command("serve"))
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main())
