"""L2: the n-th system call fails, stores half, or kills; `layer` is the entry point."""

from crash.system_calls.layer import system_calls

__all__ = ["system_calls"]
