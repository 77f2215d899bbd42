"""Crash layers that only our own classes can use, and the servers that tests start."""

import os
import sys
from contextlib import closing
from itertools import islice

PATHS = {"PYTHONPATH": os.pathsep.join(sys.path)}
"""Lets a child import what this process can, also where pytest has extended the path."""


def first_runs(layer, count):
    """Return the outcomes of the first runs of a layer, up to one that broke a promise."""
    found = []
    with closing(layer):
        for outcome in islice(layer, count):
            found.append(outcome)
            if outcome.broken:
                break
    return found
