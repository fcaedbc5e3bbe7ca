"""The fourth set of live faults: written after the third had been run, by authors who had not read the rules."""
