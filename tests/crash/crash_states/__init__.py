"""L1: every state that a power cut could leave, opened and checked; `examination` is the entry point."""

from crash.crash_states.examination import CrashStates, crash_states

__all__ = ["CrashStates", "crash_states"]
