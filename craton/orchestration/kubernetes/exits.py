"""How the program of a pod ends; the owner of the pods knows these numbers."""

EXIT_DONE = 0  # done, or stopped by its user
EXIT_FAILED = 1  # try again, and count it
EXIT_AGAIN = 75  # the scheduler wanted it to end (EX_TEMPFAIL of sysexits.h): try again, and do not count it
EXIT_FATAL = 77  # trying again would fail again
