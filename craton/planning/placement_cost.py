"""What a placement costs: one layout, priced where its groups of ranks stay below a leaf switch, and where not."""

from __future__ import annotations

from dataclasses import replace

from craton.infrastructure import Cluster
from craton.job import Job
from craton.job.layout import Layout
from craton.planning.calibration import predict
from craton.planning.search import evaluate
from craton.planning.setting import check_plannable, setting_of


def placed_step_seconds(job: Job, cluster: Cluster, layout: Layout, leaf_nodes: int) -> float:
    """Seconds of a step when every aligned run of `leaf_nodes` nodes, in rank order, shares a leaf; 0: all of them do.

    Collectives between leaves get the cluster's oversubscribed bandwidth; sends of a pipeline are not slowed.
    """
    check_plannable(job)
    setting = setting_of(job, replace(cluster, leaf_nodes=leaf_nodes))
    return predict(setting.profile, evaluate(setting.model, setting.machine, setting.profile, layout).terms).seconds
