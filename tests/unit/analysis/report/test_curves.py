"""The curves of a report: their peaks and their ends are those of the trace, also of many subscriptions at once."""

import pytest

from ackstate.analysis.estimate.engine import LocalSource
from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.report.contents import CrashTimes, curves_of_rows
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.recording import Frame

BEGUN, ENDED, CRASH = EventKind.PERSIST_BEGUN, EventKind.PERSIST_ENDED, EventKind.CRASH
A, B = ("t", "a"), ("t", "b")


def ack(ts_ms, first, last):
    return Event(ts_ms, EventKind.ACK, 3, first, last)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """10 of `a` at 100, 9 more at 200 in two runs after a hole each, written at 300; 5 of `b` at 200."""
    events = {
        "a": [
            ack(100, 0, 9), ack(200, 20, 26), ack(200, 30, 31), Event(300, BEGUN), Event(300, ENDED), Event(400, CRASH),
        ],
        "b": [ack(200, 0, 4), Event(400, CRASH), Event(900, EventKind.RECOVER)],
    }  # fmt: skip
    path = tmp_path_factory.mktemp("curves") / "trace"
    parquet.write_trace([Frame("t", name, [event]) for name, told in events.items() for event in told], path)
    return LocalSource.of(path)


def curves(trace, policies, *, subscriptions):
    rows = estimates(trace, policies, is_plotted=True).collect()
    return curves_of_rows(rows, trace.span, range(len(policies)), subscriptions=subscriptions)


def steps(curve):
    return list(zip(curve.ts_ms, curve.value, strict=True))


def test_a_total_is_the_sum_of_its_subscriptions_and_nothing_is_left_of_the_dead(trace):
    total, own, other = curves(trace, [None], subscriptions=[B, A])
    assert total.is_total
    assert (own.topic, own.subscription) == B
    assert steps(total) == [(100, 10), (200, 24), (300, 5), (400, 0), (900, 0)]
    assert steps(own) == [(100, 0), (200, 5), (400, 0), (900, 0)]
    assert steps(other) == [(100, 10), (200, 19), (300, 0), (900, 0)]


def test_a_policy_of_its_own_has_its_causes_and_one_that_loses_nothing_is_flat(trace):
    one_range = Policy.from_mapping({"flush_interval_ms": "50", "range_count_max": "1"})
    flushed, cut = curves(trace, [Policy.from_mapping({"flush_interval_ms": "0"}), one_range], subscriptions=[])
    assert steps(flushed) == [(100, 0), (900, 0)]
    assert cut.policy == 1
    # After each flush only the run beyond the limit would come back.
    assert (2, (0, 2, 0, 0)) in zip(cut.value, zip(*cut.causes, strict=True), strict=True)


def test_subscriptions_are_drawn_under_the_chosen_policy(trace):
    never = Policy.from_mapping({"flush_interval_ms": "100000"})
    rows = estimates(trace, [None, never], is_plotted=True, drawn=1).collect()
    drawn = {
        (row["policy"], row["subscription"]) for row in rows if row["curve_ms"] is not None and row["subscription"]
    }
    assert drawn == {(1, "a"), (1, "b")}
    *_, own = curves_of_rows(rows, trace.span, [0, 1], subscriptions=[A], drawn=1)
    assert own.policy == 1
    # As recorded, nothing is left at 300.
    assert (300, 0) not in steps(own)
    assert max(own.value) == 19


def test_processes_that_die_at_once_die_once(trace):
    assert CrashTimes.of_rows(estimates(trace, [None]).collect()) == CrashTimes((400,), 1)
