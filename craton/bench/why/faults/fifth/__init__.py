"""The fifth set of live faults: written after the fourth had been run, by authors who had not read the rules."""
