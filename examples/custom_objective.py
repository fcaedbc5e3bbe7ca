"""A custom loss: `objective: custom_objective:focal` in examples/custom-objective.yaml.

An objective takes the log-probability of every label, [rows, sequence]. It returns the sum over tokens to minimise, and
sums to report (recorded as run_NAME, divided by the weight of all labels like the loss itself).
"""

from torch import Tensor

from craton.ml.training import Batch

GAMMA = 1.0


def focal(log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the focal loss -Σ w · (1 - p)^γ · log p (arXiv:1708.02002): well-predicted tokens count less."""
    unsure = (1 - log_probs.exp()) ** GAMMA
    loss = -(batch.weight * unsure * log_probs).sum()
    return loss, {"cross_entropy": -(batch.weight * log_probs).sum()}
