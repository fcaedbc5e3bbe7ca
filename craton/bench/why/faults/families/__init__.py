"""One module for each family of faults; each has FAULTS."""
