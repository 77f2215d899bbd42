"""Crash layers that only our own classes can use, and the servers that tests start."""

import os
import sys

PATHS = {"PYTHONPATH": os.pathsep.join(sys.path)}
"""Lets a child import what this process can, also where pytest has extended the path."""
