"""Where nodes sit in the network: read from schedulers and clouds, written for schedulers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.infrastructure.topology.hostlist import expand
    from craton.infrastructure.topology.read import HOSTNAME_LABEL, read_instance_names, read_topology
    from craton.infrastructure.topology.sources import discover
    from craton.infrastructure.topology.topology import level_names, natural
    from craton.infrastructure.topology.write import kai_topology, kueue_topology, written
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
