"""Fixtures of every test of orchestration: a place for runs, and a real Slurm."""

from __future__ import annotations

from run_places import root  # noqa: F401
from slurm_lab import slurm, slurm_lab  # noqa: F401
