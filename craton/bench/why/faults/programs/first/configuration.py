"""Scripts and a data source that are configured wrongly. FAULT names the fault, ONSET the file to touch."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TENSOR_PARALLEL = 4  # of a script written for other nodes
TOKENIZER_VOCABULARY = 1024  # of a tokenizer that is not the model's


def tokens(job: Any, split: str) -> Callable[[int], list[int]]:
    """`data.source: configuration:tokens`: samples of a tokenizer with more tokens than the model."""

    def sample(index: int) -> list[int]:
        return [int(token) for token in np.random.default_rng(index).integers(0, TOKENIZER_VOCABULARY, job.sequence)]

    return sample


def use_another_world_size() -> None:
    """Wait for four ranks where two were started."""
    from torch import distributed

    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    distributed.init_process_group("gloo", init_method=address, world_size=4, rank=int(os.environ["RANK"]))


def use_a_taken_port() -> None:
    """Listen on the port of the rendezvous, which another job on the node has."""
    if os.environ["RANK"] == "0":
        socket.create_server(("127.0.0.1", int(Path("port.txt").read_text())))
    time.sleep(600)


def use_another_layout() -> None:
    size = int(os.environ["WORLD_SIZE"])
    if size % TENSOR_PARALLEL:
        raise AssertionError(f"world size ({size}) is not divisible by tensor model parallel size ({TENSOR_PARALLEL})")


if __name__ == "__main__":
    Path(os.environ["ONSET"]).touch()
    {"world-size": use_another_world_size, "port": use_a_taken_port, "layout": use_another_layout}[
        os.environ["FAULT"]
    ]()
