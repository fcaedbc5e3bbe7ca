"""The third set of live faults: written after the second had been run, by authors who had not read the rules."""
