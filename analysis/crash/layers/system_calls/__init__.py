"""L2: the n-th system call fails, stores half, or kills; `layer` begins it."""

from ackstate.analysis.crash.layers.system_calls.layer import system_calls

__all__ = ["system_calls"]
