"""Self-tests of this hardware before a run: whether it computes right, and as fast as its neighbours."""
