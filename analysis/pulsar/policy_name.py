"""The names of the policies of `ackstate.analysis.pulsar.policy`, which the command line needs for its help."""

from __future__ import annotations

from enum import Enum


class PolicyName(Enum):
    """The policy of real brokers, and wrong ones that show what each of its parts is worth."""

    PULSAR_4 = "pulsar-4"
    """What Apache Pulsar 4.2 does."""

    NO_STORED_PERMITS = "no-stored-permits"
    """Wrong: a limiter that saves nothing while it idles."""

    NO_LIMITER = "no-limiter"
    """Wrong: every ACK command is written."""

    NO_RANGE_LIMIT = "no-range-limit"
    """Wrong: all ranges are written, however many."""
