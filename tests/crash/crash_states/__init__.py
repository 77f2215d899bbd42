"""L1: every state that a power cut could leave, opened and checked; `examination` is the entry point."""

from crash.crash_states.examination import crash_states

__all__ = ["crash_states"]
