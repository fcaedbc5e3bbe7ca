"""Rules by layer: each looks at a snapshot and returns findings with evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.observability.diagnosis.rules.collectives import examine_collectives
    from craton.observability.diagnosis.rules.connections import examine_connections
    from craton.observability.diagnosis.rules.devices import examine_devices
    from craton.observability.diagnosis.rules.errors import examine_errors
    from craton.observability.diagnosis.rules.fabric import examine_fabric
    from craton.observability.diagnosis.rules.framework import examine_framework
    from craton.observability.diagnosis.rules.host import examine_host
    from craton.observability.diagnosis.rules.members import examine_members
    from craton.observability.diagnosis.rules.resources import examine_resources
    from craton.observability.diagnosis.rules.restarts import examine_restarts
    from craton.observability.diagnosis.rules.rollouts import examine_rollouts
    from craton.observability.diagnosis.rules.scheduler import examine_scheduler
    from craton.observability.diagnosis.rules.serving import examine_serving
    from craton.observability.diagnosis.rules.storage import examine_storage
    from craton.observability.diagnosis.rules.training_health import examine_training
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
