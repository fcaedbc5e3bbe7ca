"""`python -m craton` runs the command `craton`."""

from craton.cli import main

main()
