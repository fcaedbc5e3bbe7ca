"""Slurm as a place to run on: the script of a job, what its nodes start, why it waits, and its tools.

`batch` and `node` are programs that run on the nodes of a job.
"""

from craton.orchestration.slurm.backend import SlurmBackend, release_held, submit_array
from craton.orchestration.slurm.script import SCRIPT_FILE, ScriptOptions, sbatch_script
from craton.orchestration.slurm.tools import SlurmState
from craton.orchestration.slurm.waiting import why_waiting

__all__ = [
    "SCRIPT_FILE",
    "ScriptOptions",
    "SlurmBackend",
    "SlurmState",
    "release_held",
    "sbatch_script",
    "submit_array",
    "why_waiting",
]
