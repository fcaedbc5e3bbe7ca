"""Kubernetes manifests held against their schemas, as the tests of the launchers do it, and how they are told apart."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

sys.path.append(str(Path(__file__).parents[1] / "orchestration"))
from kubernetes_schemas import problems

# Karpenter's schemas are not shipped with the tests: its objects are compared with golden files alone.
UNCHECKED = {"NodePool", "EC2NodeClass"}


def check_manifests(text: str) -> list[str]:
    """The kinds that were checked, one a document; what a schema refuses is an error."""
    documents = [document for document in yaml.safe_load_all(text) if document["kind"] not in UNCHECKED]
    found = [problem for document in documents for problem in problems(document)]
    assert not found, found
    return [document["kind"] for document in documents]
