"""Events as the arrays that a replay takes."""

from __future__ import annotations

import numpy as np

from ackstate.analysis.replay.acked import EventChunk


def chunk_of(events):
    """Return some events as one chunk."""
    return EventChunk(*(np.array([getattr(event, name) for event in events], np.int64) for name in EventChunk._fields))
