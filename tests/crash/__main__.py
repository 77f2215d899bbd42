"""Run every crash layer on our cursor: `PYTHONPATH=.:tests .venv/bin/python -P -m crash --layer L0 --budget 60s`.

It is `ackstate crash` with more layers, in a process that has the fault shim.
"""

import signal
import subprocess
import sys

from ackstate.analysis.cli import crash as command
from ackstate.analysis.cli.main import main
from ackstate.analysis.crash import dying
from ackstate.analysis.crash.runs import LayerSkippedError, scratch_directory
from crash.bookkeeper import bookkeeper
from crash.crash_states import crash_states
from crash.damage import damage
from crash.schedules import schedules
from crash.shim import compiled, environment, loaded, lose_names_in_power_cuts
from crash.system_calls import system_calls


def of_ours(layer):
    def make(subject):
        if subject != command.OURS:
            raise ValueError("--subject is for `ackstate crash`")
        return layer

    return make


def with_shim():
    """Start this program again with the fault shim, and return its status; None without a compiler: L2 is skipped."""
    with scratch_directory("shim") as directory:
        try:
            started = environment(compiled(directory))
        except LayerSkippedError:
            return None
        program = dying.command_of([sys.executable, "-P", "-m", "crash", *sys.argv[1:]])
        process = subprocess.Popen(program, env=started)
        # A Ctrl-C goes to both; the program reports what it has found until then.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        return process.wait()


def run():
    shared = command.LAYERS
    command.LAYERS = {
        "L0": command.LayerEntry("schedules on a faulty memory store", of_ours(schedules)),
        "L1": command.LayerEntry("every state that a power cut could leave", of_ours(crash_states)),
        "L2": command.LayerEntry("the n-th system call fails or kills", of_ours(system_calls)),
        "L3": shared["L3"],
        "L4": shared["L4"],
        "L5": command.LayerEntry("damaged media", of_ours(damage)),
        "BK": command.LayerEntry("bookies, ZooKeeper or Java killed, stopped, taken over", of_ours(bookkeeper)),
    }
    lose_names_in_power_cuts()
    command.PROGRAM = "python -P -m crash"
    main(["crash", *sys.argv[1:]])


if __name__ == "__main__":
    if loaded() is None and (status := with_shim()) is not None:
        sys.exit(status)
    run()
