"""A policy with the timing of Pulsar: when it writes, and what a crash then redelivers."""

from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.trace.events import Event, EventKind
from montecarlo import replayed

ACK, MARK_DELETE, RECOVER, CRASH = EventKind.ACK, EventKind.MARK_DELETE, EventKind.RECOVER, EventKind.CRASH
BATCH, COMMAND, DELIVER = EventKind.BATCH, EventKind.COMMAND, EventKind.DELIVER
PULSAR = {
    "format": "PULSAR", "range_limit_rule": "PULSAR_4_2", "timing": "PULSAR", "mark_delete_rate_limit": 1,
    "flush_interval_ms": 60_000,
}  # fmt: skip


def acks(*times_ms, begin=1):
    """An ack of every other entry, at some times."""
    return [Event(ts_ms, ACK, 3, begin + 2 * number, begin + 2 * number) for number, ts_ms in enumerate(times_ms)]


def curve_of(*events, end_ms=5_000, sizes=(), **settings):
    """Return the redelivery at the end of each millisecond; the cursor is opened at 0."""
    opened = Event(0, DELIVER, 3, 0, 0)
    policy = Policy.from_mapping(PULSAR | settings)
    (curve,), replay = replayed([opened, *events], [policy], {3: 200}, sizes=list(sizes), end_ms=end_ms)
    assert replay.curves[0].sum.peak >= max(curve.values())
    return curve


def test_the_timer_flushes_what_was_refused_at_a_fixed_rate():
    found = {"flush_interval_ms": 1_000, "flush_phase_ms": 300}
    curve = curve_of(*acks(0, 10, 2_290), mark_delete_rate_limit=0.5, end_ms=9_000, **found)
    # Paid for at 2,000: the ticks at 300 and 1,300 are refused, that at 2,300 is too late for the command at 2,290.
    assert [curve[ts_ms] for ts_ms in (0, 10, 2_289, 2_290, 4_299, 4_300)] == [0, 1, 1, 0, 0, 0]
    curve = curve_of(*acks(0, 10), mark_delete_rate_limit=0.5, **found)
    assert [curve[ts_ms] for ts_ms in (10, 1_300, 2_299, 2_300)] == [1, 1, 1, 0]
    curve = curve_of(*acks(0, 10), mark_delete_rate_limit=7, flush_interval_ms=1)
    assert [curve[ts_ms] for ts_ms in (142, 143)] == [1, 0]


def test_each_command_of_a_millisecond_asks():
    first, second, third = acks(1_500, 1_500, 2_000)
    assert curve_of(first, second, third)[2_000] == 0
    curve = curve_of(first, Event(1_500, COMMAND), second, third)
    assert (curve[1_500], curve[2_000]) == (0, 1)
    # The one permit is that of the first.
    for later in ([], acks(700, begin=41)):
        for sizes in ([], [2], [3]):
            curve = curve_of(*acks(0), Event(0, COMMAND), *acks(0, begin=21), *later, sizes=sizes)
            assert (curve[0], curve[700]) == (1, 1 + len(later))


def test_a_batch_passed_by_a_cumulative_ack_stays_in_the_first_record():
    events = [
        Event(0, BATCH, 3, 0, 9), Event(0, MARK_DELETE, 3, 0, 4), Event(50, BATCH, 3, 10, 19),
        Event(50, MARK_DELETE, 3, 5, 17), Event(2_000, ACK, 3, 30, 30),
    ]  # fmt: skip
    curve = curve_of(*events, ledger_creation_ms=100)
    assert [curve[ts_ms] for ts_ms in (0, 50, 100, 2_000)] == [5, 18, 5, 0]


def test_acks_that_wait_for_the_next_chunk_come_before_a_cumulative_one_of_their_millisecond():
    events = [
        Event(0, BATCH, 3, 50, 59), Event(0, BATCH, 3, 60, 69), Event(0, ACK, 3, 52, 52),
        Event(50, MARK_DELETE, 3, 0, 1),
        Event(51, ACK, 3, 69, 69), Event(51, MARK_DELETE, 3, 0, 88), Event(150, ACK, 3, 95, 98),
    ]  # fmt: skip
    for sizes in ([], *([size] for size in range(1, 8)), [3, 3]):
        curve = curve_of(*events, sizes=sizes, ledger_creation_ms=400)
        assert [curve[ts_ms] for ts_ms in (0, 50, 51, 150, 449, 450)] == [1, 3, 89, 93, 93, 87]


def test_a_record_has_the_lowest_batches_and_only_if_parts_count():
    events = [Event(0, ACK, 3, 3, 3), Event(0, BATCH, 3, 20, 29), Event(0, BATCH, 3, 40, 119),
              Event(0, ACK, 3, 20, 24), Event(0, ACK, 3, 40, 47)]  # fmt: skip
    assert curve_of(*events)[0] == 0
    assert curve_of(*events, batch_count_max=1)[0] == 8
    assert curve_of(*events, batch_index_acks="false")[0] == 13


def test_a_recovered_cursor_has_the_parts_that_were_written():
    events = [Event(0, ACK, 3, 3, 3), Event(0, BATCH, 3, 20, 29), Event(0, ACK, 3, 20, 24), Event(100, CRASH),
              Event(200, RECOVER), Event(250, ACK, 3, 25, 28)]  # fmt: skip
    curve = curve_of(*events)
    assert [curve[ts_ms] for ts_ms in (0, 199, 200, 250)] == [0, 0, 0, 0]
