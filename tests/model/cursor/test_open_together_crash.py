"""A crash at any write, while cursors are opened together or begin their journals together, loses no durable ack."""

from __future__ import annotations

import random

import pytest
from serial import SerialExecutor

from ackstate import (
    CursorConfig,
    Format,
    LedgerMap,
    ManagedCursor,
    MemoryStore,
    Position,
)
from ackstate.cursor import CursorOpening, PersistResult, open_cursors, persist_all
from ackstate.cursor.journal import cursor_owner, cursor_path
from ackstate.stores.memory import Fault, FaultKind, MemoryDisk

NAMES = "abcd"
LEDGERS = {3: 40}
SERIAL = SerialExecutor()
KINDS = [FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER]


class CursorsOnOneDisk:
    """Cursors on one disk, and the acks of each that are accepted and durable."""

    def __init__(self, form):
        self.config = CursorConfig(format=form)
        self.ledgers = LedgerMap.from_counts(LEDGERS)
        self.disk = MemoryDisk()
        self.accepted = {name: set() for name in NAMES}
        self.durable = {name: set() for name in NAMES}

    def opening(self, name):
        return CursorOpening(topic="t", subscription=name, ledgers=self.ledgers, config=self.config)

    def open(self, store, names):
        return open_cursors(store, [self.opening(name) for name in names], now_ms=0, executor=SERIAL)

    def ack(self, cursors, names, random):
        self.receipts = []
        for name, cursor in zip(names, cursors, strict=True):
            entry = random.randrange(LEDGERS[3])
            self.accepted[name].add(entry)
            self.receipts.append((name, entry, cursor.ack(Position(3, entry), now_ms=0)))

    def note_durable(self, cursors, names):
        of_name = dict(zip(names, cursors, strict=True))
        for name, entry, receipt in self.receipts:
            if of_name[name].durable(receipt):
                self.durable[name].add(entry)

    def check(self):
        """Recover each cursor alone: it has every durable ack, invents none, and leaves one ledger."""
        store = MemoryStore(self.disk)
        for name in NAMES:
            opening = self.opening(name)
            cursor = ManagedCursor.open(
                store, topic="t", subscription=name, ledgers=self.ledgers, config=self.config, now_ms=0
            )
            acked = {entry for entry in range(LEDGERS[3]) if cursor.is_acked(Position(3, entry))}
            assert self.durable[name] <= acked <= self.accepted[name]
            assert len(store.ledgers.owned_by(cursor_owner(cursor_path("t", opening.subscription)))) <= 1
            self.accepted[name], self.durable[name] = set(acked), set(acked)


def lives(form, fault, *, seed=1, count=2):
    """Run a broker for some lives; return how many writes it began in each."""
    source = random.Random(seed)
    broker = CursorsOnOneDisk(form)
    begun = []
    for life in range(count):
        faults = [Fault(fault[1], fault[2])] if fault is not None and fault[0] == life else []
        store = MemoryStore(broker.disk, faults=faults)
        names = source.sample(NAMES, len(NAMES))
        opened = broker.open(store, names)
        good = [(name, each) for name, each in zip(names, opened, strict=True) if isinstance(each, ManagedCursor)]
        names, cursors = [name for name, _ in good], [each for _, each in good]
        for _ in range(2):
            broker.ack(cursors, names, source)
            results = persist_all(cursors, now_ms=0, executor=SERIAL)
            broker.note_durable(cursors, names)
            assert faults or all(isinstance(each, PersistResult) for each in results)
        begun.append(store.mutation_count)
        broker.check()
    return begun


@pytest.mark.parametrize("form", Format)
def test_a_crash_at_any_write_loses_no_durable_ack(form):
    begun = lives(form, None)
    assert all(count > 2 * len(NAMES) for count in begun)
    for life, count in enumerate(begun):
        for number in range(count):
            for kind in KINDS:
                lives(form, (life, number, kind))
