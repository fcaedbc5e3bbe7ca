"""KV cache tiers beyond GPU memory: reloading a prefix from host memory or NVMe against computing it again."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from craton.infrastructure import Instance
from craton.planning.serving.load import ServedLoad
from craton.planning.serving.search.replicas import ServedCandidates
from craton.planning.serving.search.result import Deployment, KvTier

HOST_SHARE = 0.5  # of the host's memory that KV cache blocks may take; assumed


def kv_tiers(candidates: ServedCandidates, instance: Instance, load: ServedLoad, chosen: Deployment) -> list[KvTier]:
    """Return the tiers of the chosen deployment's nodes, for the replicas that compute prompts. GPUs of a replica load
    their shards side by side."""
    size = candidates.kv_bytes_per_token
    layout = replace(chosen.prefill or chosen.layout, replicas=1)
    # A prompt's cache is that of one attention-data-parallel rank.
    prompt, gpus = load.input.mean, min(layout.replica_gpus // layout.attention_dp, instance.num_gpus)
    index = candidates.layouts.index(layout) if layout in candidates.layouts else 0
    steps: Any = candidates.only([index]).replica.steps
    recompute = float(np.ravel(steps.prefill_seconds(prompt, 0.0))[0]) * math.exp(candidates.log_scale)
    host_rate = instance.host_link_bytes_per_second * gpus
    tiers = []
    if instance.host_memory_bytes and host_rate:
        tokens = HOST_SHARE * instance.host_memory_bytes / size
        name = f"host memory ({instance.host_link})"
        tiers.append(KvTier(name, tokens, prompt * size / host_rate, recompute))
    if instance.nvme_bytes and instance.nvme_read_bytes_per_second:
        rate = min(instance.nvme_read_bytes_per_second, host_rate or instance.nvme_read_bytes_per_second)
        tiers.append(KvTier("NVMe", instance.nvme_bytes / size, prompt * size / rate, recompute))
    return tiers
