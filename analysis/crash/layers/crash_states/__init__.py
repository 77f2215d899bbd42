"""L1: every state that a power cut could leave, opened and judged; `examination` begins it."""

from ackstate.analysis.crash.layers.crash_states.examination import CrashStates, crash_states

__all__ = ["CrashStates", "crash_states"]
