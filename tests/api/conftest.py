"""Fixtures of tests of the Python API: a place for runs."""

from __future__ import annotations

from orchestration.run_places import root  # noqa: F401
