"""Runs on Kubernetes: pure emitters of what is sent, why it waits, and a thin backend that sends and asks.

The pods run `python -m craton.orchestration.kubernetes.pod`, which needs none of the rest, and which has to hear the
kubelet's signals before anything heavy is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import loader

if TYPE_CHECKING:
    from craton.orchestration.kubernetes.backend import KubernetesBackend
    from craton.orchestration.kubernetes.emitters import manifests, to_yaml
    from craton.orchestration.kubernetes.standing import standing_of
    from craton.orchestration.kubernetes.target import KubernetesTarget, target_of
    from craton.orchestration.kubernetes.waiting import Seen, Waiting, why_waiting
else:
    __getattr__ = loader(
        __name__,
        {
            "backend": ("KubernetesBackend",),
            "emitters": ("manifests", "to_yaml"),
            "standing": ("standing_of",),
            "target": ("Target", "target_of"),
            "waiting": ("Seen", "Waiting", "why_waiting"),
        },
    )

__all__ = [
    "KubernetesBackend",
    "Seen",
    "KubernetesTarget",
    "Waiting",
    "manifests",
    "standing_of",
    "target_of",
    "to_yaml",
    "why_waiting",
]
