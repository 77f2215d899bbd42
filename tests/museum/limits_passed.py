"""Mistakes of limits: passed, looked up too late, or never let go."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import ackstate.cursor.config
from ackstate.dispatch.admission import Admission
from ackstate.limits.gate import DispatchGate
from ackstate.limits.rules import RuleState
from ackstate.selection import select
from museum.exhibit import Exhibit, Replacement


def _keep_one_range_more():
    def one_more(ranges, *, range_count_max, keep, always):
        return select(ranges, range_count_max=range_count_max + 1, keep=keep, always=always)

    return (Replacement(ackstate.cursor.config, "select", one_more),)


def _look_at_what_the_last_persist_left():
    request, request_again, persisted = DispatchGate.request, DispatchGate.request_redelivery, Admission.persisted
    marked = WeakKeyDictionary()  # for each gate, the usage that it saw first after the last persist

    def stale(gate, usage):
        seen = marked.setdefault(gate, usage)
        return usage._replace(unpersisted_record_bytes=seen.unpersisted_record_bytes, range_count=seen.range_count)

    def stale_request(self, costs, *, usage, **named):
        return request(self, costs, usage=stale(self, usage), **named)

    def stale_request_again(self, costs, *, usage, **named):
        return request_again(self, costs, usage=stale(self, usage), **named)

    def look_again(self, error, *, now_ms):
        marked.pop(self.gate, None)
        persisted(self, error, now_ms=now_ms)

    def has_bytes_for(self, cost):
        limit, seen = self._bytes_limit, stale(self.gate, self.usage()) if self.gate is not None else None
        return limit is None or seen.unpersisted_record_bytes + seen.reserved_bytes + cost <= limit

    return (
        Replacement(Admission, "has_bytes_for", has_bytes_for),
        Replacement(DispatchGate, "request", stale_request),
        Replacement(DispatchGate, "request_redelivery", stale_request_again),
        Replacement(Admission, "persisted", look_again),
    )


def _let_nothing_out_above_a_limit():
    fitting = RuleState.fitting

    def nothing_fits(self, costs, count, *, used):
        return 0 if used > self.limit else fitting(self, costs, count, used=used)

    return (Replacement(RuleState, "fitting", nothing_fits),)


LIMITS = (
    Exhibit(
        "M8",
        "a limit on ranges keeps one range too many",
        "Apache Pulsar since 2019, fixed by apache/pulsar#25548: `buildIndividualDeletedMessageRanges` added a range "
        "before it tested the cap, and persisted one range too many.",
        "`PersistLimits` has `select` choose one range more than the limit.",
        _keep_one_range_more,
    ),
    Exhibit(
        "M9",
        "a limiter uses the size of the last persist",
        "Apache Pulsar, apache/pulsar#23200: with `dispatcherPauseOnAckStatePersistentEnabled` (PIP-299), which looks "
        "at a cached value, 11,097 ranges were seen with a limit of 10,000.",
        "`DispatchGate`, and `Admission` before it asks the gate, go by the bytes and ranges that they saw first "
        "after the last persist; the reservations are those of now.",
        _look_at_what_the_last_persist_left,
    ),
    Exhibit(
        "M13",
        "a restart above a limit stays blocked for ever",
        "Apache Kafka share groups, KAFKA-17210 (apache/kafka#16711): state persisted at the limit with no available "
        "record in it: no share fetch could complete any more.",
        "`RuleState.fitting` admits nothing while the use is above the limit, not even a message that fills a hole and "
        "costs nothing. Ours may also come to be above a limit when it is lowered at work.",
        _let_nothing_out_above_a_limit,
    ),
)
