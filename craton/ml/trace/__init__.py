"""Trace: run the real training step on fake ranks to see its collectives, FLOPs and memory at any world size, without a
GPU."""
