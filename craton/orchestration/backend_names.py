"""The backends there are. Apart from them, so that a quick verb need not import a job to know their names."""

from __future__ import annotations

BACKENDS = ("local", "slurm", "kubernetes")
