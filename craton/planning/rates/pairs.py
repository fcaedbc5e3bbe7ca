"""What two nodes, or two GPUs of one, should reach together: the all-reduce that a pre-flight measures, from the curves
that are fitted to published measurements instead of the line rate.
"""

from __future__ import annotations

from craton.infrastructure import Cluster, Instance
from craton.planning.rates.collectives import Group, all_reduce_seconds
from craton.planning.rates.machine_rates import machine_of


def pair_bytes_per_second(instance: Instance, size_bytes: float, between_nodes: bool = True) -> float:
    """Buffer bytes per second of an all-reduce among all GPUs of two nodes, or between two GPUs of one."""
    network = machine_of(Cluster(name="pair", instance=instance, num_nodes=2)).network
    count = instance.num_gpus
    group = Group(2 * count, count, count) if between_nodes else Group(2, 2, 2)
    seconds = all_reduce_seconds(size_bytes, group, network)
    return size_bytes / seconds if seconds else 0.0
