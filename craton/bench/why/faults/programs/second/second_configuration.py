"""Scripts and an objective of the second set that are configured wrongly. FAULT names the fault, ONSET the file."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

FAULT, ONSET, RANK = os.environ["FAULT"], Path(os.environ["ONSET"]), int(os.environ.get("RANK", "0"))
# Of a cluster that no longer exists.
RENDEZVOUS_HOST = "trainer-0.trainer.old-cluster.invalid"
EVALUATE_AT = 60
VALIDATION = Path("/data/validation-v2/tokens.bin")  # the folder is called validation_v2
TIMEOUT_SECONDS, EVALUATION_SECONDS = 6, 30
STEP_SECONDS = 0.1
LEARN_CALLS = 100
calls = 0


def loss(log_probs: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """The usual loss; after LEARN_CALLS everybody may see that nothing is learnt."""
    global calls
    calls += 1
    if calls == LEARN_CALLS:
        ONSET.touch()
    return -(batch.weight * log_probs).sum(), {}


def connect() -> None:
    """Meet the other rank at an address; that of rank 1 was never changed."""
    if RANK == 0:
        server = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        server.accept()
    else:
        ONSET.touch()
        socket.create_connection((RENDEZVOUS_HOST, int(os.environ["MASTER_PORT"])), timeout=60)


def log_in() -> None:
    """Log in to the experiment tracker."""
    ONSET.touch()
    if "TRACKER_KEY" not in os.environ:
        raise RuntimeError("api_key not configured (no-tty): set the variable TRACKER_KEY or call login(key=…)")


def resume() -> None:
    """Load the weights of a smaller model than the one that is configured."""
    import torch

    torch.save(torch.nn.Sequential(torch.nn.Linear(128, 128)).state_dict(), f"last-{RANK}.pt")
    model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    ONSET.touch()
    model.load_state_dict(torch.load(f"last-{RANK}.pt"))


def train() -> None:
    """Train data parallel with gloo; after EVALUATE_AT steps rank 0 evaluates while the others wait for it."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    timeout = TIMEOUT_SECONDS if FAULT == "timeout" else 1800
    group = torch.distributed.new_group(timeout=timedelta(seconds=timeout))
    model: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, 100_000):
        value = model(torch.randn(16, 256)).square().mean()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        time.sleep(STEP_SECONDS)
        print(f"step {step} loss {value.item():.4f}", flush=True)
        if step == EVALUATE_AT and RANK == 0:
            ONSET.touch()
            evaluate()


def evaluate() -> None:
    print("evaluating", flush=True)
    if FAULT == "timeout":
        time.sleep(EVALUATION_SECONDS)
    else:
        VALIDATION.read_bytes()


SCRIPTS = {"host": connect, "key": log_in, "resume": resume, "timeout": train, "path": train}

if __name__ == "__main__":
    SCRIPTS[FAULT]()
