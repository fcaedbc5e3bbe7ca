"""What foreign stacks want to be told, from a layout and a model: command lines, configurations, environments.

Everything here is pure. Placeholders such as `{node_rank}` stay in what comes out: the agent of each node fills them in
when it starts the processes of a job of kind `command`.
"""

from craton.frameworks.accelerate import accelerate_command, accelerate_config
from craton.frameworks.errors import FrameworkError
from craton.frameworks.jax import jax_environment
from craton.frameworks.megatron import megatron_arguments, nemo_parallelism
from craton.frameworks.servers import sglang_command, vllm_command
from craton.frameworks.torchrun import torchrun_command
from craton.frameworks.verl import verl_overrides

__all__ = [
    "FrameworkError",
    "accelerate_command",
    "accelerate_config",
    "jax_environment",
    "megatron_arguments",
    "nemo_parallelism",
    "sglang_command",
    "torchrun_command",
    "verl_overrides",
    "vllm_command",
]
