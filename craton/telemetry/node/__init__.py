"""What a node's agent publishes: heartbeat, rank status, metrics endpoint, log times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.telemetry.node.endpoint import MetricsEndpoint
    from craton.telemetry.node.heartbeat import (
        LOST_SECONDS,
        Heartbeat,
        NodeState,
        process_start,
        read_heartbeat,
        touch_heartbeat,
        write_heartbeat,
    )
    from craton.telemetry.node.log_times import LogClock, LogTimes
    from craton.telemetry.node.status import (
        NodeStatus,
        PeerTraffic,
        ProcessResources,
        RankStatus,
        read_peer,
        read_status,
        write_status,
    )
    from craton.telemetry.node.wait_channels import (
        FROZEN,
        WAITS_FOR_FILES,
        WAITS_FOR_LOCK,
        WAITS_FOR_MEMORY,
        sleeps_for,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
