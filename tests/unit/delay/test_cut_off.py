"""A view that lags behind the due log is cut off from it: nothing is lost, nothing comes twice, memory is bounded."""

import pytest

from ackstate import Position
from ackstate.delay import TopicDelayIndex
from ackstate.position_set import PositionSet
from delay_driver import unread_batches

TICK = 100
DUE = 2_000
A, B, C, D = (Position(3, entry_id) for entry_id in range(4))
# The most for which a batch of one message counts in the due log.
BATCH_BYTES = 730


class DispatcherOfView:
    """Reads the log of ledger 3 in order, acks some, and may have told its view how to ask it."""

    def __init__(self, index, *, is_attached):
        self.acked, self.sent, self.read_end = set(), set(), 0
        self.calls = 0
        self.view = index.open_view(self.acked.__contains__)
        if is_attached:
            self.view.attach(self)

    def read(self, deliver_at_ms, *, now_ms, count=1):
        """Read on; messages that need not wait are sent."""
        for _ in range(count):
            position = Position(3, self.read_end)
            if not self.view.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=now_ms):
                self.sent.add(position)
            self.read_end += 1

    def poll(self, now_ms, max_messages=100_000):
        given = self.view.scheduled_messages(max_messages, now_ms=now_ms)
        assert not self.sent & set(given), "in flight"
        self.sent |= set(given)
        return given

    def discard_acked(self, ledger_id, entries):
        for entry_id in list(entries):
            if Position(ledger_id, entry_id) in self.acked:
                entries.remove(entry_id)

    def not_sent_between(self, first, end):
        self.calls += 1
        found = PositionSet()
        for entry_id in range(self.read_end):
            position = Position(3, entry_id)
            if first <= position < end and position not in self.acked and position not in self.sent:
                found.add(position)
        return found


def both_kinds(**settings):
    index = TopicDelayIndex(tick_time_ms=TICK, **settings)
    return index, [DispatcherOfView(index, is_attached=is_attached) for is_attached in (False, True)]


bounds = pytest.mark.parametrize("bytes_max", [0, BATCH_BYTES, 5 * BATCH_BYTES])


@bounds
def test_views_that_were_cut_off_are_given_what_fell_due_since_and_nothing_else(bytes_max):
    index, dispatchers = both_kinds(due_log_bytes_max=bytes_max)
    for dispatcher in dispatchers:
        for tick in range(1, 11):
            dispatcher.read(DUE + tick * TICK, now_ms=1_000)
        dispatcher.read(-1, now_ms=1_000, count=2)
        dispatcher.read(9_000, now_ms=1_000)
        dispatcher.acked |= {B, Position(3, 10)}
    for tick in range(1, 11):
        index.advance(DUE + tick * TICK)
    assert unread_batches(index) <= 5
    for dispatcher in dispatchers:
        assert dispatcher.view.delayed_message_count == 10
        assert dispatcher.poll(DUE + 10 * TICK, 4) == [A, C, D, Position(3, 4)]
        assert dispatcher.poll(DUE + 10 * TICK) == [Position(3, entry_id) for entry_id in range(5, 10)]
        assert dispatcher.poll(DUE + 10 * TICK) == []
    for dispatcher in dispatchers:
        assert dispatcher.poll(9_000) == [Position(3, 12)]
    assert dispatchers[0].calls == 0
    assert dispatchers[1].calls > 0


@bounds
def test_what_was_handed_out_and_what_is_ahead_of_the_reader_is_not_found_again(bytes_max):
    index, dispatchers = both_kinds(due_log_bytes_max=bytes_max)
    ahead = index.open_view(lambda _: False)
    for entry_id in range(20):
        ahead.add_message(Position(3, entry_id), deliver_at_ms=DUE + entry_id * TICK, now_ms=1_000)
    for dispatcher in dispatchers:
        dispatcher.read(DUE, now_ms=1_000)
        dispatcher.read(DUE + TICK, now_ms=1_000)
    for dispatcher in dispatchers:
        assert dispatcher.poll(DUE) == [A]
    for entry_id in range(20):
        index.advance(DUE + entry_id * TICK)
    for dispatcher in dispatchers:
        assert dispatcher.poll(9_000) == [B]
        dispatcher.read(DUE + 2 * TICK, now_ms=9_000)
        assert C in dispatcher.sent
        assert dispatcher.poll(9_000) == []


@bounds
def test_one_that_is_offered_after_the_cut_off_is_judged_as_before(bytes_max):
    """The view finds the missed messages before it answers: else it would answer "deliver it now", and hand it out."""
    index, dispatchers = both_kinds(due_log_bytes_max=bytes_max)
    for dispatcher in dispatchers:
        for tick in range(8):
            dispatcher.read(DUE + tick * TICK, now_ms=1_000)
    for tick in range(8):
        index.advance(DUE + tick * TICK)
    for dispatcher in dispatchers:
        assert dispatcher.view.add_message(A, deliver_at_ms=DUE, now_ms=9_000), "it waits to be handed out"
        assert dispatcher.view.skip(B, now_ms=9_000)
        assert dispatcher.poll(9_000) == [Position(3, entry_id) for entry_id in range(8)]
        assert not dispatcher.view.add_message(A, deliver_at_ms=DUE, now_ms=9_000), "this is its replay"


@bounds
def test_a_rewound_view_is_not_told_what_it_missed_before(bytes_max):
    index, dispatchers = both_kinds(due_log_bytes_max=bytes_max)
    for dispatcher in dispatchers:
        for tick in range(8):
            dispatcher.read(DUE + tick * TICK, now_ms=1_000)
    for tick in range(7):
        index.advance(DUE + tick * TICK)
    for dispatcher in dispatchers:
        dispatcher.view.clear()
        dispatcher.sent.clear()
        dispatcher.read_end = 0
        assert dispatcher.poll(DUE + 6 * TICK) == []
        for tick in range(8):
            dispatcher.read(DUE + tick * TICK, now_ms=DUE + 6 * TICK)
        assert dispatcher.sent == {Position(3, entry_id) for entry_id in range(7)}
    for dispatcher in dispatchers:
        assert dispatcher.poll(9_000) == [Position(3, 7)]


@bounds
def test_a_closed_view_was_cut_off_for_good(bytes_max):
    index, dispatchers = both_kinds(due_log_bytes_max=bytes_max)
    for dispatcher in dispatchers:
        dispatcher.read(DUE, now_ms=1_000)
        dispatcher.view.close()
    for entry_id in range(20):
        index.add(Position(4, entry_id), deliver_at_ms=DUE + entry_id * TICK, now_ms=1_000)
    for entry_id in range(20):
        index.advance(DUE + entry_id * TICK)
    assert (unread_batches(index), dispatchers[1].calls) == (0, 0)


def test_what_falls_due_while_the_subscription_is_asked_comes_once():
    """Another view moves it to the due log meanwhile."""
    index, (_, dispatcher) = both_kinds(due_log_bytes_max=5 * BATCH_BYTES)
    for tick in range(9):
        dispatcher.read(DUE + tick * TICK, now_ms=1_000)
    for tick in range(8):
        index.advance(DUE + tick * TICK)
    answer = dispatcher.not_sent_between

    def while_time_passes(first, end):
        found = answer(first, end)
        index.advance(DUE + 8 * TICK)
        return found

    dispatcher.not_sent_between = while_time_passes
    assert dispatcher.poll(DUE + 7 * TICK) == [Position(3, entry_id) for entry_id in range(9)]
    assert dispatcher.calls == 1
    assert dispatcher.poll(9_000) == []


def test_an_error_of_the_subscription_loses_nothing():
    """Messages that a cut-off view missed are found by the next call that gets an answer."""
    index, (_, dispatcher) = both_kinds(due_log_bytes_max=0)
    dispatcher.read(DUE, now_ms=1_000)
    index.advance(DUE)
    answer, dispatcher.not_sent_between = dispatcher.not_sent_between, failing
    with pytest.raises(OSError, match="scripted"):
        dispatcher.poll(DUE)
    dispatcher.not_sent_between = answer
    assert dispatcher.poll(DUE) == [A]
    assert dispatcher.poll(DUE) == []


def failing(first, end):
    raise OSError("scripted")


@pytest.mark.slow
@pytest.mark.parametrize("is_attached", [False, True])
@pytest.mark.parametrize("bytes_max", [0, 20 * BATCH_BYTES])
def test_one_of_two_views_lags_for_10_000_ticks(bytes_max, is_attached):
    index = TopicDelayIndex(tick_time_ms=TICK, due_log_bytes_max=bytes_max)
    swift, lagging = DispatcherOfView(index, is_attached=False), DispatcherOfView(index, is_attached=is_attached)
    for dispatcher in (swift, lagging):
        for tick in range(1, 10_001):
            dispatcher.read(tick * TICK, now_ms=0, count=2)
    unread_batches_max = 0
    for tick in range(10_000):
        now_ms = (tick + 1) * TICK
        assert swift.poll(now_ms) == [Position(3, 2 * tick), Position(3, 2 * tick + 1)]
        unread_batches_max = max(unread_batches_max, unread_batches(index))
    assert unread_batches_max <= bytes_max // 500
    assert len(index) == 0
    lagging.acked |= {A, Position(3, 19_999)}
    assert lagging.view.delayed_message_count == 19_998
    assert lagging.poll(10_000 * TICK, 7) == [Position(3, entry_id) for entry_id in range(1, 8)]
    assert lagging.poll(10_000 * TICK) == [Position(3, entry_id) for entry_id in range(8, 19_999)]
    assert lagging.poll(10_001 * TICK) == []
