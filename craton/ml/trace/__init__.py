"""The real training step on fake ranks: what it communicates, computes and holds, at any world size, without a GPU."""
