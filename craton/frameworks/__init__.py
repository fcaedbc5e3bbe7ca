"""Commands, configurations and environments for other frameworks, as pure functions of a layout and a model.

Placeholders such as `{node_rank}` stay in the output: the agent of each node fills them in when it starts the processes
of a job of kind `command`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.frameworks.launchers import jax_environment
    from craton.frameworks.megatron import megatron_arguments
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
