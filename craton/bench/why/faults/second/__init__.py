"""The second set of live faults: written after the first set had been run, by authors who had not read the rules."""
