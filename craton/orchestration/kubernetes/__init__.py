"""Kubernetes as a backend: pure emitters of objects, why a run waits, and a thin API client.

The pods run `python -m craton.orchestration.kubernetes.pod`, which needs none of the rest, and which must handle the
kubelet's signals before anything heavy is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.orchestration.kubernetes.backend import KubernetesBackend, end_pods_on
    from craton.orchestration.kubernetes.node_maintenance import KubernetesService
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
