"""`python -m craton` is the command `craton`."""

from craton.cli import main

main()
