"""The names of the policies of `ackstate.analysis.pulsar.policy`, needed by the help of the command line."""

from __future__ import annotations

from enum import Enum


class PolicyName(Enum):
    """The policy of real brokers, and wrong ones that show the effect of each of its parts."""

    PULSAR_4 = "pulsar-4"
    """The policy of Apache Pulsar 4.2."""

    NO_STORED_PERMITS = "no-stored-permits"
    """Wrong: a limiter that saves nothing while it idles."""

    NO_LIMITER = "no-limiter"
    """Wrong: every ACK command is written."""

    NO_RANGE_LIMIT = "no-range-limit"
    """Wrong: all ranges are written, without a limit."""
