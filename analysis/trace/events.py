"""What happened, event by event: the trace's schema, as a Python type and as Parquet, side by side.

A trace is chunked: one Parquet row holds up to `CHUNK_EVENTS` consecutive events of one subscription, so that Spark
moves and sorts chunks instead of events and a worker sees whole arrays.

==============  ================  ==================================================================================
column          type              meaning
==============  ================  ==================================================================================
topic           string            the topic
subscription    string            the subscription; empty for events of the topic itself (PUBLISH)
chunk           int32             number of the chunk in its subscription, from 0
first_seq       int64             `seq` of the first event; `seq` counts a subscription's events from 0, without gaps
first_ts_ms     int64             time of the first event
last_ts_ms      int64             time of the last event
event_count     int32             how many events the chunk has
ts_ms           packed int64      when, ms since the epoch; never falls inside a subscription
kind            packed int8       an `EventKind`
ledger_id       packed int64      ledger of the entries concerned; -1 without any
first_entry     packed int64      first entry concerned; -1 without any
last_entry      packed int64      last entry concerned, included; -1 without any; packed as how far above the first
number          packed int64      what the kind says, else -1
ledgers         list of structs   for each ledger that the events name, rising: ``ledger_id``; one above the highest
                                  entry that any event names (``entry_count``), that a PUBLISH names (``published``),
                                  and that an ACK or MARK_DELETE names (``acked``), all int64, 0 if there is none
==============  ================  ==================================================================================

Packed is a binary value with `event_count` numbers, as `ackstate.analysis.trace.packed_numbers` has them. Versions 1
and 2 have lists of numbers instead, and neither `event_count` nor `ledgers`; version 1 lacks the kinds from `HELD_BACK`
on, and entries of `RECOVER`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from ackstate.errors import AckStateError

TRACE_VERSION = 3
CHUNK_EVENTS = 16_384
VERSION_KEY = b"ackstate.trace.version"

SCALAR_COLUMNS = {
    "topic": "string",
    "subscription": "string",
    "chunk": "int32",
    "first_seq": "int64",
    "first_ts_ms": "int64",
    "last_ts_ms": "int64",
}
EVENT_COLUMNS = {
    "ts_ms": "int64",
    "kind": "int8",
    "ledger_id": "int64",
    "first_entry": "int64",
    "last_entry": "int64",
    "number": "int64",
}


class TraceError(AckStateError):
    """A trace that is missing, empty, damaged, or not a trace; the message names it."""


class EventKind(IntEnum):
    """What happened."""

    PUBLISH = 1
    """Entries were appended to the topic's log. number: deliver-at time of all of them, -1 for at once."""
    DELIVER = 2
    """Entries were sent to a consumer. number: which consumer."""
    ACK = 3
    """Entries were accepted as acked, one by one. number: which consumer."""
    MARK_DELETE = 4
    """Entries were accepted as acked by a cumulative ack; one event for each ledger it reaches into. number: which
    consumer."""
    PERSIST_BEGUN = 5
    """A persist began that covers every ack before this event, but for what HELD_BACK, CUT_OFF and DISPLACED events
    right after it name. number: of the persist."""
    PERSIST_ENDED = 6
    """That persist was synced: what it covers is durable. number: of the persist."""
    PERSIST_FAILED = 7
    """That persist failed, which promises nothing: what it covers may or may not be durable, as if it had not ended.
    number: of the persist."""
    CRASH = 8
    """The process died. Written by whoever saw it die."""
    RECOVER = 9
    """The cursor was opened again: everything acked is durable, but what REDELIVER events follow name is not acked any
    more. With entries, one event for each run: they are acked, though no event before says so."""
    REDELIVER = 10
    """Entries that had been acked and are not after a recovery or a reset."""
    HELD_BACK = 11
    """Acked entries that the persist just begun leaves out because they are young."""
    CUT_OFF = 12
    """Acked entries that the persist just begun leaves out because of a limit, and that were not durable."""
    DISPLACED = 13
    """Acked entries that the persist just begun leaves out because of a limit, and that were durable until now; they
    are not from here on, even if it fails."""
    RESET = 14
    """The cursor was put elsewhere, and that is durable: as RECOVER, of a cursor that stays open."""


NAMES_ENTRIES = frozenset({
    EventKind.PUBLISH, EventKind.DELIVER, EventKind.ACK, EventKind.MARK_DELETE, EventKind.REDELIVER,
    EventKind.HELD_BACK, EventKind.CUT_OFF, EventKind.DISPLACED,
})  # fmt: skip
"""The kinds that never come without entries."""


class Event(NamedTuple):
    """One event of one subscription, or of the topic. Fields as the columns of the same names."""

    ts_ms: int
    kind: EventKind
    ledger_id: int = -1
    first_entry: int = -1
    last_entry: int = -1
    number: int = -1
