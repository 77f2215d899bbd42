"""The worker with the fault shim: streams its outcomes to the process that started it.

python -P -m crash.system_calls PARENT_PID FIRST_SEED
"""

from __future__ import annotations

import sys
from contextlib import suppress

from crash.system_calls.layer import work

if __name__ == "__main__":
    with suppress(BrokenPipeError):
        work(int(sys.argv[1]), int(sys.argv[2]))
