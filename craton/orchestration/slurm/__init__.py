"""Slurm as a backend: the batch script, programs on its nodes, why a job waits, and its command line tools.

`batch` and `node` are programs that run on the nodes of a job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from craton.lazy import lazy_names

if TYPE_CHECKING:
    from craton.orchestration.slurm.allocation import read_allocation
    from craton.orchestration.slurm.backend import SlurmBackend, release_held, submit_array
    from craton.orchestration.slurm.doctor import diagnose_nodes
    from craton.orchestration.slurm.member_steps import SlurmPlace
    from craton.orchestration.slurm.node_maintenance import SlurmService
    from craton.orchestration.slurm.script import SCRIPT_FILE, ScriptOptions, sbatch_script
    from craton.orchestration.slurm.tools import warn
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
