"""Run an `ackstate` command in a process that is killed when its parent dies.

python -P -m ackstate.analysis.cli.child PARENT_PID COMMAND...
"""

from __future__ import annotations

import sys

from ackstate.analysis.cli.main import main
from ackstate.analysis.crash.dying import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    main(sys.argv[2:])
