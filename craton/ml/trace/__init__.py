"""Run the real training step on fake ranks: collectives, FLOPs and memory at any world size, without a GPU."""
