"""`python -m ackstate.analysis.cli` is the command `ackstate`."""

from ackstate.analysis.cli.main import main

main()
