"""Does this hardware compute right, and is it as fast as its neighbours? Started by command, before a run."""
