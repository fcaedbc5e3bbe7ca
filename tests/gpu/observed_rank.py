"""A rank of a server that shares one GPU with the other ranks: `python observed_rank.py RUN`.

It is `python -m craton.ml.serving RUN` with three differences: it uses the first GPU whatever its local rank is, its KV
cache has a fixed size (ranks that share a GPU cannot all take what is free), and it prints how many CUDA graphs it
captures, with how many collectives, and every replay.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # craton, where it is not installed

import torch

import craton.ml.serving.engine.build as build
from craton.ml.collectives import Peers
from craton.ml.serving.device.graphs import DecodeGraphs
from craton.ml.serving.device.prompt_graphs import PromptGraphs

BLOCKS = 2048  # of the KV cache

num_captured = 0  # collectives


def observe_collectives(name: str) -> None:
    start: Callable[..., Any] = getattr(Peers, name)

    def counted(peers: Peers, *arguments: Any) -> Any:
        global num_captured
        num_captured += torch.cuda.is_current_stream_capturing()
        return start(peers, *arguments)

    setattr(Peers, name, counted)


def observe_graphs(kind: type[DecodeGraphs] | type[PromptGraphs]) -> None:
    capture, replay = kind.capture, kind.replay

    def printed_capture(graphs: Any) -> None:
        before = num_captured
        capture(graphs)
        say(f"captured {len(graphs._steps)} CUDA graphs with {num_captured - before} collectives")

    def printed_replay(graphs: Any, *arguments: Any) -> Any:
        say("replayed a CUDA graph")
        return replay(graphs, *arguments)

    kind.capture, kind.replay = printed_capture, printed_replay  # type: ignore[method-assign]


def say(line: str) -> None:
    """Print a line in one piece: the front end prints to the same log."""
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"
    build._blocks = lambda *_: BLOCKS
    for name in ("start_gather", "start_scatter_sum"):
        observe_collectives(name)
    for kind in (DecodeGraphs, PromptGraphs):
        observe_graphs(kind)
    runpy.run_module("craton.ml.serving", run_name="__main__", alter_sys=True)
