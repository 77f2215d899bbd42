"""Finds the shortest steps that break a promise."""

import time


def shortest(steps, evidence, attempt, *, tries=float("inf"), seconds=float("inf"), clock=time.monotonic):
    """Return the shortest known steps that break a promise: first, many neighbours are removed, then one at a time.

    `attempt` repeats some of the steps. It returns those that happened until the same promise was broken, with the
    evidence, or None if it was not: crashes of real processes are not repeatable.

    Source: Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002, without its tests of
    subsets.
    """
    until = clock() + seconds
    size = len(steps) // 2 or 1
    while size:
        end = len(steps)
        # From the end, because steps after the cause are irrelevant.
        while end > 0:
            if not tries or clock() > until:
                return steps, evidence
            tries -= 1
            first = max(end - size, 0)
            steps, evidence = attempt(steps[:first] + steps[end:]) or (steps, evidence)
            end = min(first, len(steps))
        size //= 2
    return steps, evidence
