"""Runs on Kubernetes: pure emitters of what is sent, why it waits, and a thin backend that sends and asks.

The pods run `python -m craton.orchestration.kubernetes.pod`, which needs none of the rest.
"""

from __future__ import annotations

from craton.orchestration.kubernetes.backend import KubernetesBackend, is_elsewhere
from craton.orchestration.kubernetes.emitters import manifests, to_yaml
from craton.orchestration.kubernetes.standing import standing_of
from craton.orchestration.kubernetes.target import Target, target_of
from craton.orchestration.kubernetes.waiting import Seen, Waiting, why_waiting

__all__ = [
    "KubernetesBackend",
    "Seen",
    "Target",
    "Waiting",
    "is_elsewhere",
    "manifests",
    "standing_of",
    "target_of",
    "to_yaml",
    "why_waiting",
]
