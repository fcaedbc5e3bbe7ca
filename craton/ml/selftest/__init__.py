"""Hardware self-tests before a run: whether each device computes correctly, and as fast as its neighbours."""
