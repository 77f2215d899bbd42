"""Polls of a random cursor become a trace: after each poll its redelivery is what is acked and not durable."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from pyroaring import BitMap

from ackstate.analysis.pulsar.recorder import CursorFollower, CursorPoll
from ackstate.analysis.replay.acked import EventChunk
from ackstate.analysis.replay.curves import RecordedCurve
from ackstate.analysis.trace.check import EventOrder, wrong_alone
from ackstate.analysis.trace.chunks import Events
from ackstate.analysis.trace.events import EventKind

ENTRIES = st.sets(st.integers(0, 29), max_size=12)


class PolledCursor(RuleBasedStateMachine):
    """A cursor over ledgers of ten entries, its broker, and a recorder that may be restarted."""

    def __init__(self):
        super().__init__()
        self.ledgers = {3: 10}
        self.acked, self.durable = set(), set()  # (ledger, entry)
        self.version, self.cursor_ledger, self.published = 0, -1, 10
        self.follower, self.told = CursorFollower(), False
        self.curve, self.order = RecordedCurve(is_polled=True), EventOrder()
        self.now_ms, self.points, self.last, self.events = 1_000, [], None, []
        self.has_sought = self.has_crashed = False
        self.seen, self.read, self.was_ahead = set(), set(), False

    def existing(self, entries):
        found = {}
        for ledger_id, entry in entries:
            if ledger_id in self.ledgers:
                found.setdefault(ledger_id, BitMap()).add(entry)
        return found

    def place(self, number):
        ledgers = sorted(self.ledgers)
        return ledgers[number // 10 % len(ledgers)], number % 10

    @rule(entries=ENTRIES)
    def ack(self, entries):
        self.acked |= {self.place(each) for each in entries}

    @rule(left_out=ENTRIES)
    def persist(self, left_out):
        """Write a record, without some ranges."""
        self.durable = self.acked - {self.place(each) for each in left_out}
        self.version += 1
        if self.cursor_ledger < 0:
            self.cursor_ledger = 100 + self.version

    @rule()
    def roll_the_cursor_ledger_over(self):
        if self.cursor_ledger >= 0:
            self.version += 1
            self.cursor_ledger = 100 + self.version

    @rule()
    def publish(self):
        self.ledgers[max(self.ledgers) + 1] = 10
        self.published += 10

    @precondition(lambda self: len(self.ledgers) > 1)
    @rule()
    def trim(self):
        """Delete the first ledger, whose entries are acked and durable."""
        first = min(self.ledgers)
        whole = {(first, entry) for entry in range(10)}
        self.acked, self.durable = self.acked | whole, self.durable | whole
        self.version += 1
        del self.ledgers[first]

    @rule()
    def crash(self):
        if not self.has_sought:
            self.acked = set(self.durable)
            self.cursor_ledger, self.published, self.has_crashed = -1, 0, True

    @rule(entries=ENTRIES, is_lasting=st.booleans())
    def seek(self, entries, is_lasting):
        """Forget some acks, in the same load; the record of a seek may still have them."""
        if not self.has_crashed:
            self.acked -= {self.place(each) for each in entries}
            if is_lasting:
                self.durable = set(self.acked)
            self.version += 1
            self.has_sought = True

    @rule()
    def restart_the_recorder(self):
        acked = self.existing(self.seen)
        self.follower = CursorFollower(acked, is_new=not self.told)
        self.last, self.has_sought, self.has_crashed = None, False, False
        self.read = set()

    @rule()
    def delete_and_create(self):
        self.events += self.take(self.follower.ended(self.now_ms))
        self.acked, self.durable, self.seen, self.read = set(), set(), set(), set()
        self.version, self.cursor_ledger, self.last = self.version + 1, -1, None
        self.follower = CursorFollower(is_new=not self.told)
        self.has_sought = self.has_crashed = False

    @rule()
    def poll(self):
        self.now_ms += 1_000
        acked, durable = self.existing(self.acked), self.existing(self.durable)
        poll = CursorPoll(
            self.now_ms, dict(self.ledgers), acked, durable, (self.version,), self.cursor_ledger, self.published
        )
        events = self.take(self.follower.follow(poll))
        kinds = [each.kind for each in events]
        if self.last is not None:
            assert EventKind.CRASH not in kinds or self.has_crashed or self.last != self.cursor_ledger
            assert EventKind.RESET not in kinds or self.has_sought or self.was_ahead
            again = sum(each.last_entry - each.first_entry + 1 for each in events if each.kind == EventKind.REDELIVER)
            if EventKind.CRASH in kinds:
                assert self.curve.at_crashes.tolist() == [[again, again, 0]]
            gone = {each for each in self.seen - self.acked - (self.durable - self.read) if each[0] in self.ledgers}
            assert again >= len(gone)
        self.seen = {each for each in self.acked | (self.durable - self.read) if each[0] in self.ledgers}
        self.read, self.was_ahead = set(self.durable), bool(self.seen - self.acked)
        self.last, self.has_sought, self.has_crashed = self.cursor_ledger, False, False
        if events:
            unwritten = self.seen - self.durable
            assert self.points[-1].value[-1] == len(unwritten)
            assert self.curve.sum.peak == max(int(each.value.max()) for each in self.points)

    def take(self, events):
        """Replay and check events as those of a trace."""
        if not events:
            return events
        self.told = True
        columns = [np.array(each, np.int64) for each in zip(*events, strict=True)]
        wrong = [*wrong_alone(Events(*columns)).values(), self.order.judge_times(columns[0])]
        assert not any(each.any() for each in [*wrong, self.order.judge_lives(Events(*columns))])
        self.points.append(self.curve.take(EventChunk(*columns[:5])))
        return events


TestPolledCursor = PolledCursor.TestCase
