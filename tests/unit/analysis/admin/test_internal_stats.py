"""A topic in a store, in Pulsar's shape: compared with the numbers that a broker reports right after it loaded it."""

import pytest

from ackstate import LedgerMap, ManagedCursor, Message, Position
from ackstate.cursor.journal import cursor_path
from ackstate.topic import MessageLog

TOPIC = "persistent://public/default/orders"
PATH = "/admin/v2/persistent/public/default/orders/internalStats"


def publish(store, *, counts, topic=TOPIC):
    """Fill a log of one ledger for each count; return their ids."""
    log = MessageLog.open(store, topic=topic, entries_per_ledger_max=counts[0])
    for count in counts:
        log.publish([Message(b"m")] * count)
    return log.ledgers


def subscribe(store, log, name, *, topic=TOPIC):
    return ManagedCursor.open(store, topic=topic, subscription=name, ledgers=log, now_ms=0)


def test_a_topic_without_messages_and_cursors_is_not_there(ask):
    answer = ask("GET", PATH)
    assert answer.status_code == 404
    assert answer.json() == {"reason": f"the store has neither messages nor cursors of {TOPIC}"}


def test_a_log_is_told_ledger_by_ledger(ask, store):
    log = publish(store, counts=[1, 3])
    first, second = log.counts()
    stats = ask("GET", f"{PATH}?authoritative=false").json()
    assert stats == {
        "entriesAddedCounter": 0,
        "numberOfEntries": 4,
        "totalSize": 0,
        "currentLedgerEntries": 3,
        "currentLedgerSize": 0,
        "lastLedgerCreatedTimestamp": "1970-01-01T00:00:00Z",
        "lastLedgerCreationFailureTimestamp": None,
        "waitingCursorsCount": 0,
        "pendingAddEntriesCount": 0,
        "lastConfirmedEntry": f"{second}:2",
        "state": "Closed",
        "ledgers": [
            {"ledgerId": first, "entries": 1, "size": 0, "offloaded": False, "underReplicated": False},
            {"ledgerId": second, "entries": 3, "size": 0, "offloaded": False, "underReplicated": False},
        ],
        "cursors": {},
        "schemaLedgers": [],
        "compactedLedger": {
            "ledgerId": -1, "entries": -1, "size": -1, "offloaded": False, "underReplicated": False,
        },
    }  # fmt: skip


def test_a_cursor_is_told_as_a_broker_would_recover_it(ask, store):
    log = publish(store, counts=[10])
    (ledger_id,) = log.counts()
    cursor = subscribe(store, log, "billing")
    cursor.mark_delete(Position(ledger_id, 2), now_ms=0, properties={"sequence": 7})
    cursor.persist(now_ms=0)
    cursor.ack_entries(ledger_id, [5, 6, 8], now_ms=0)
    cursor.persist(now_ms=0)
    cursor_ledger = store.ledgers.owned_by("cursor " + cursor_path(TOPIC, "billing"))
    (stats,) = ask("GET", PATH).json()["cursors"].values()
    assert stats == {
        "markDeletePosition": f"{ledger_id}:2",
        "readPosition": f"{ledger_id}:3",
        "waitingReadOp": False,
        "pendingReadOps": 0,
        "messagesConsumedCounter": -4,  # 3, 4, 7 and 9 are left
        "cursorLedger": cursor_ledger[0],
        "cursorLedgerLastEntry": 2,  # the new cursor, and two persists
        "individuallyDeletedMessages": f"[({ledger_id}:4..{ledger_id}:6],({ledger_id}:7..{ledger_id}:8]]",
        "lastLedgerSwitchTimestamp": "1970-01-01T00:00:00Z",
        "state": "Closed",
        "active": False,
        "numberOfEntriesSinceFirstNotAckedMessage": 1,
        "totalNonContiguousDeletedMessagesRange": 2,
        "subscriptionHavePendingRead": False,
        "subscriptionHavePendingReplayRead": False,
        "properties": {"sequence": 7},
    }


def test_a_cursor_beyond_the_end_of_its_log_is_named_and_no_more(ask, store):
    log = publish(store, counts=[10])
    cursor = subscribe(store, LedgerMap.from_counts({log.current_ledger_id: 20}), "billing")
    cursor.ack_entries(log.current_ledger_id, [15], now_ms=0)
    cursor.persist(now_ms=0)
    stats = ask("GET", PATH).json()["cursors"]["billing"]
    assert (stats["state"], stats["individuallyDeletedMessages"]) == ("Uninitialized", "[]")


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
def test_it_is_only_read(ask, store, method):
    publish(store, counts=[1])
    assert ask(method, PATH).status_code == 405
