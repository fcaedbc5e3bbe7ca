"""A multi-process JAX training script without Craton code; it reads only RANK and WORLD_SIZE.

Parameters are replicated, the batch is sharded over all devices (data parallel), and XLA sums the gradients. The first
process saves a checkpoint every few steps; all processes resume from the newest one.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BATCH, WIDTH = 32, 64

Parameters = dict[str, jax.Array]


def predict(parameters: Parameters, inputs: jax.Array) -> jax.Array:
    hidden = jnp.tanh(inputs @ parameters["into"] + parameters["bias"])
    return hidden @ parameters["out"]


def loss_of(parameters: Parameters, inputs: jax.Array, wanted: jax.Array) -> jax.Array:
    return jnp.mean((predict(parameters, inputs) - wanted) ** 2)


@jax.jit
def train(parameters: Parameters, inputs: jax.Array, wanted: jax.Array) -> tuple[Parameters, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(parameters, inputs, wanted)
    return jax.tree.map(lambda value, gradient: value - 0.02 * gradient, parameters, gradients), loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--step-seconds", type=float, default=0.05, help="minimum duration of a step")
    given = parser.parse_args()

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    jax.distributed.initialize(num_processes=world, process_id=rank)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere, spread = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    saved = sorted(given.save.glob("step-*.npz"))
    begin = int(saved[-1].stem.removeprefix("step-")) if saved else 0
    numbers = np.random.default_rng(0)
    values = {
        "into": numbers.normal(size=(8, WIDTH)).astype(np.float32) / 3,
        "bias": np.zeros(WIDTH, np.float32),
        "out": numbers.normal(size=(WIDTH, 1)).astype(np.float32) / 8,
    }
    if saved:
        values = dict(np.load(saved[-1]))
    parameters = {name: jax.make_array_from_process_local_data(everywhere, value) for name, value in values.items()}
    if rank == 0:
        print(f"{world} processes with {len(jax.devices())} devices resume after step {begin}", flush=True)

    for step in range(begin + 1, given.steps + 1):
        started = time.monotonic()
        local = np.random.default_rng((step, rank)).normal(size=(BATCH, 8)).astype(np.float32)
        inputs = jax.make_array_from_process_local_data(spread, local)
        wanted = jax.make_array_from_process_local_data(spread, np.sin(local).sum(axis=1, keepdims=True))
        parameters, loss = train(parameters, inputs, wanted)
        mean = float(loss)
        time.sleep(max(0.0, given.step_seconds - (time.monotonic() - started)))
        if rank == 0:
            samples = BATCH * world / (time.monotonic() - started)
            print(f"step {step}/{given.steps}  loss {mean:.6f}  {samples:,.0f} samples/s", flush=True)
        if rank == 0 and (step % given.save_every == 0 or step == given.steps):
            given.save.mkdir(parents=True, exist_ok=True)
            partial = given.save / f".step-{step:08d}.npz"
            np.savez(partial, **{name: np.asarray(value) for name, value in parameters.items()})
            partial.rename(given.save / f"step-{step:08d}.npz")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
