"""The time of one request to the gate, by the number of outstanding messages."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ackstate.limits import BrokerLimit, DispatchGate, GateLimits, Usage
from benchmarks.measurement import Against, BenchmarkReport, Timing, timed_in_turn

if TYPE_CHECKING:
    from collections.abc import Callable

ABOUT = (
    "One requested message, every rule on, the `Usage` made beforehand; the loop around the call is included. Shared "
    "is a gate under the limit of a broker, which counts the granted messages, and is notified by `count_unacked` that "
    "they were sent: two calls. Two comparisons are those of a dispatcher of Pulsar before it reads: is a flag set, "
    "are there permits? Its limits are looked at after the fact."
)
CALLS = 20_000
UNIT = "ns a request"
LIMIT = Against("limit", 1_000)
COST = (17,)
OUTSTANDING = {1: "1 outstanding", 1_000_000: "1 M outstanding"}
FAR = 2**40
LIMITS = GateLimits(FAR, FAR, max_unacked_ranges=FAR, max_unacked_messages_per_consumer=FAR)


class PulsarLikeDispatcher:
    """The checks before a read: a flag that was set after an earlier ack or send, and the permits."""

    def __init__(self, unacked: int) -> None:
        self.is_blocked = False
        self.permits = unacked

    def may_send(self) -> bool:
        """Return whether it may read on."""
        return not self.is_blocked and self.permits > 0


def usage_of(outstanding: int) -> Usage:
    """Return the usage of outstanding messages, half of them acked and not persisted."""
    half = outstanding // 2
    return Usage(17 * half, 17 * (outstanding - half), outstanding - half, half, outstanding - half, outstanding - half)


def request(usage: Usage, gate: DispatchGate) -> None:
    """Request repeatedly without sending: the timed function."""
    request = gate.request
    for _ in range(CALLS):
        request(COST, usage=usage, consumer="consumer", now_ms=1)


def request_and_count(usage: Usage, gate: DispatchGate) -> None:
    """Request, and count each granted message as sent."""
    request, count = gate.request, gate.count_unacked
    for _ in range(CALLS):
        request(COST, usage=usage, consumer="consumer", now_ms=1)
        count(1)


def compare_counters(dispatcher: PulsarLikeDispatcher) -> None:
    """The same of the peer."""
    may_send = dispatcher.may_send
    for _ in range(CALLS):
        may_send()


def closed_gate(usage: Usage) -> DispatchGate:
    """Return a gate that is closed at this usage, with a thousand waiters."""
    gate = DispatchGate(GateLimits(0, max(usage.unacked_messages, 1), max_unacked_messages_per_consumer=0))
    verdict = gate.request(COST, usage=usage)
    assert verdict.granted == 0
    for _ in range(1_000):
        gate.when_open(int)
    return gate


def shared_gate(outstanding: int) -> DispatchGate:
    """Return a gate under a broker's limit with a number of messages already counted."""
    gate = DispatchGate(LIMITS, broker=BrokerLimit(FAR))
    gate.count_unacked(outstanding)
    return gate


def timings(outstanding: int) -> dict[str, Timing]:
    """Return the timed requests for one number of outstanding messages."""
    usage = usage_of(outstanding)
    gates: dict[str, tuple[Callable[[DispatchGate], None], Callable[[], DispatchGate]]] = {
        "granted": (partial(request, usage), lambda: DispatchGate(LIMITS)),
        "granted, shared, and counted": (partial(request_and_count, usage), lambda: shared_gate(outstanding)),
        "refused, 1,000 wait": (partial(request, usage), lambda: closed_gate(usage)),
    }
    found = {name: Timing(thing, fresh, CALLS) for name, (thing, fresh) in gates.items()}
    found["two comparisons"] = Timing(compare_counters, lambda: PulsarLikeDispatcher(outstanding), CALLS)
    return found


def measure(report: BenchmarkReport) -> None:
    """Time all of it in turn, for few and for many outstanding."""
    named = {
        f"{size}, {name}": timing for count, size in OUTSTANDING.items() for name, timing in timings(count).items()
    }
    spreads = timed_in_turn(named)
    for size in OUTSTANDING.values():
        ours = spreads[f"{size}, granted"].median
        for what, spread in spreads.items():
            if what.startswith(f"{size}, "):
                against = {"two comparisons": Against("ours", ours), "granted, shared, and counted": None}
                report.time(what, UNIT, spread, against.get(what.removeprefix(f"{size}, "), LIMIT))


if __name__ == "__main__":
    report = BenchmarkReport("gate", ABOUT)
    measure(report)
    report.publish()
