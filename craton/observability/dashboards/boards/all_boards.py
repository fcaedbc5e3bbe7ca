"""All boards, in display order."""

from __future__ import annotations

from craton.observability.dashboards.boards.cluster import CLUSTER
from craton.observability.dashboards.boards.cost import COST_BOARD
from craton.observability.dashboards.boards.network import NETWORK
from craton.observability.dashboards.boards.node import NODE_BOARD
from craton.observability.dashboards.boards.run import RUN_BOARD
from craton.observability.dashboards.boards.serving import SERVING
from craton.observability.dashboards.boards.storage import STORAGE

BOARDS = (CLUSTER, RUN_BOARD, NODE_BOARD, SERVING, STORAGE, NETWORK, COST_BOARD)
