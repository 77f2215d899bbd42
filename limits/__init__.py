"""May the dispatcher send more? Plain numbers in, a verdict out; no cursor, clock or lock in here."""

from limits.gate import DispatchGate, GateLimits, Rule, Usage, Verdict

__all__ = ["DispatchGate", "GateLimits", "Rule", "Usage", "Verdict"]
