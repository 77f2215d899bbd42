"""Run every crash layer on our cursor: `PYTHONPATH=.:tests .venv/bin/python -P -m crash --layer L0 --budget 60s`.

It is `ackstate crash` with more layers.
"""

from __future__ import annotations

import sys

from ackstate.analysis.cli import crash as command
from ackstate.analysis.cli.main import main
from crash.bookkeeper import bookkeeper
from crash.crash_states import crash_states
from crash.damage import damage
from crash.schedules import schedules
from crash.system_calls import system_calls


def of_ours(layer):
    """Return what makes a layer that looks inside our own cursor."""

    def make(subject):
        if subject != command.OURS:
            raise ValueError("--subject is for `ackstate crash`")
        return layer

    return make


if __name__ == "__main__":
    shared = command.LAYERS
    command.LAYERS = {
        "L0": command.LayerEntry("schedules on a faulty memory store", of_ours(schedules)),
        "L1": command.LayerEntry("crash states of a simulated disk", of_ours(crash_states)),
        "L2": command.LayerEntry("the n-th system call fails or kills", of_ours(system_calls)),
        "L3": shared["L3"],
        "L4": shared["L4"],
        "L5": command.LayerEntry("damaged media", of_ours(damage)),
        "BK": command.LayerEntry("bookies, ZooKeeper or Java killed, stopped, taken over", of_ours(bookkeeper)),
    }
    command.PROGRAM = "python -P -m crash"
    main(["crash", *sys.argv[1:]])
