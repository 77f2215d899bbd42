"""Under Pulsar's format a replay keeps one record, however many it wrote, and answers as if it had kept them all."""

from __future__ import annotations

import pytest

from ackstate.analysis.replay import cursor_replay
from ackstate.analysis.replay.cursor_replay import LatestEntryStore
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.replay.subscription_replay import SubscriptionReplay
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.stores.base import LedgerFencedError, LedgerNotFoundError
from ackstate.stores.memory import MemoryStore
from chunks import chunk_of

SETTINGS = {"flush_interval_ms": 100, "format": "PULSAR", "range_form": "LIST", "range_count_max": 10_000}
POLICIES = [Policy.from_mapping(SETTINGS)]
HOLES = 500
LOG = {1: 4 * HOLES}


def acks(step=2):
    """Acks 10 ms apart that leave a hole each."""
    return [Event(5 * entry, EventKind.ACK, 1, entry, entry) for entry in range(0, 2 * HOLES, step)]


def with_a_crash():
    """Replay acks, a crash, and an ack after it; return the curve."""
    end_ms = 10 * HOLES
    died = [Event(end_ms + 55, EventKind.CRASH), Event(end_ms + 60, EventKind.RECOVER)]
    last = Event(end_ms + 70, EventKind.ACK, 1, 2 * HOLES + 1, 2 * HOLES + 1)
    replay = SubscriptionReplay(POLICIES, LOG)
    points = [*replay.take(chunk_of([*acks(), *died])), *replay.take(chunk_of([last])), *replay.end(end_ms + 1_000)]
    return [(each.ts_ms.tolist(), each.value.tolist()) for each in points]


def test_the_answer_is_that_of_a_store_that_keeps_all(monkeypatch):
    found = with_a_crash()
    monkeypatch.setattr(cursor_replay, "LatestEntryStore", MemoryStore)
    expected = with_a_crash()
    assert found == expected
    assert max(max(value) for _, value in found) > 0


def test_a_store_of_last_records_has_the_last_and_no_other():
    store = LatestEntryStore()
    one, other = (store.ledgers.create(owner) for owner in ("b", "a"))
    assert store.ledgers.last(one) == -1
    assert store.ledgers.append_many([(one, [b"0", b"1"]), (other, [b"x"])]) == [1, 0]
    assert store.ledgers.append(one, [b"2"]) == 2
    assert store.ledgers.read(one, 2, 3) == [b"2"]
    assert store.ledgers.read(one, 0, 0) == []
    for first, end in ((1, 2), (1, 3), (2, 4), (3, 4)):
        with pytest.raises(LedgerNotFoundError):
            store.ledgers.read(one, first, end)
    assert store.ledgers.owners() == ["a", "b"]
    assert store.ledgers.fence(one) == 2
    with pytest.raises(LedgerFencedError):
        store.ledgers.append(one, [b"3"])
    assert (store.ledgers.last(one), store.ledgers.last(other)) == (2, 0)
    store.ledgers.delete(one)
    assert store.ledgers.owned_by("b") == []
    with pytest.raises(LedgerNotFoundError):
        store.ledgers.read(one, 2, 3)
