"""Node images made on the spot: one healthy node of each kind, and every way we know for one to be degraded.

Texts have the shape of what nvidia-smi, fi_info, lnetctl and the kernel write; numbers are made up.
"""

from infrastructure.node_images.degraded import DEGRADED, Degraded
from infrastructure.node_images.healthy import HEALTHY, lab_cluster_file
from infrastructure.node_images.node import Card, Node, Port

__all__ = ["DEGRADED", "HEALTHY", "Card", "Degraded", "Node", "Port", "lab_cluster_file"]
