"""Makes the tiny training of the tests beside this folder importable, here and on the ranks of the gang."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "training")]
