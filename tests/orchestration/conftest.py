"""Fixtures of every test of orchestration: a place for runs, a real Slurm, and a stand-in for Kubernetes."""

from __future__ import annotations

from kubernetes_runs import server  # noqa: F401
from run_places import root  # noqa: F401
from slurm_lab import slurm, slurm_lab  # noqa: F401
