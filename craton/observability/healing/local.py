"""The nodes of one run on this machine, which no scheduler has: a node is out when the run is to avoid it."""

from __future__ import annotations

from craton.agent import read_launch
from craton.agent.coordination import read_avoided
from craton.orchestration import RunStateError, ServiceNode
from craton.orchestration.changes import come_back, plan_evacuation, working_nodes
from craton.telemetry import RunDirectory


class RunService:
    """Taking a node out is moving the run to a spare of its own."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def nodes(self) -> list[ServiceNode]:
        avoided, working = read_avoided(self._run), working_nodes(self._run)
        return [
            ServiceNode(
                node,
                node in avoided,
                "it is to be avoided" if node in avoided else "",
                node in working,
                avoided.get(node, ""),
            )
            for node in read_launch(self._run).nodes
        ]

    def take_out(self, node: str, mark: str, reason: str) -> None:
        """The run is moved by whoever heals; here it is refused where it cannot be. A spare need not move."""
        way = plan_evacuation(self._run, node)
        if not way.how and node in working_nodes(self._run):
            raise RunStateError(way.sentence)

    def can_hand_over(self, action: str) -> bool:
        return False

    def hand_over(self, node: str, mark: str, action: str) -> bool:
        return False

    def give_back(self, node: str, mark: str) -> str:
        is_back = node in come_back(self._run, mark)
        return "" if is_back else f"{self._run.name} does not avoid {node}, or for another reason"
