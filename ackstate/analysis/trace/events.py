"""The schema of a trace, event by event: as a Python type and as Parquet, side by side.

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
event_count     int32             number of events in the chunk
ts_ms           packed int64      time, ms since the epoch; never falls inside a subscription
kind            packed int8       an `EventKind`
ledger_id       packed int64      ledger of the entries concerned; -1 without any
first_entry     packed int64      first entry concerned; -1 without any
last_entry      packed int64      last entry concerned, included; -1 without any; packed as distance above the first
number          packed int64      depends on the kind, else -1
ledgers         list of structs   for each ledger that the events name, rising: ``ledger_id``; one above the highest
                                  entry named by any event (``entry_count``), by a PUBLISH (``published``), and by an
                                  ACK or MARK_DELETE (``acked``), all int64, 0 if there is none
==============  ================  ==================================================================================

Packed is a binary value with `event_count` numbers, as in `ackstate.analysis.trace.chunks`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from ackstate.errors import AckStateError

TRACE_VERSION = 3
CHUNK_EVENTS = 16_384
VERSION_KEY = b"ackstate.trace.version"
POLL_MS_KEY = b"ackstate.trace.poll_ms"
"""Key-value metadata of a file that was recorded by polls: the time between two polls, a decimal number. An event
happened at its time or since the poll before."""
POLLED_UNTIL_KEY = b"ackstate.trace.polled_until_ms"
"""Key-value metadata of such a file: the time of the last poll, a decimal number."""
DROPPED_KEY = b"ackstate.trace.dropped_events"
"""Key-value metadata of a file: the number of events that it lacks because a recorder dropped them, a decimal number;
missing if there are none."""
FILES_KEY = b"ackstate.trace.files"
"""Key-value metadata of a trace's Parquet file: `ONLY` or `SEVERAL`."""
ONLY, SEVERAL = b"1", b"several"

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
    """The kind of an event."""

    PUBLISH = 1
    """Entries were appended to the topic's log. number: deliver-at time of all of them, -1 for at once."""
    DELIVER = 2
    """Entries were sent to a consumer. number: the consumer."""
    ACK = 3
    """Entries were accepted as acked, one by one. number: the consumer."""
    MARK_DELETE = 4
    """Entries were accepted as acked by a cumulative ack; one event for each ledger it reaches into. number: the
    consumer."""
    PERSIST_BEGUN = 5
    """A persist began that covers every ack before this event, except those named by HELD_BACK, CUT_OFF and DISPLACED
    events right after it. number: that of the persist."""
    PERSIST_ENDED = 6
    """The persist was synced: the acks that it covers are durable. number: that of the persist."""
    PERSIST_FAILED = 7
    """The persist failed: it is unknown whether the acks that it covers are durable. number: that of the persist."""
    CRASH = 8
    """The process died. Written by the observer of its death."""
    RECOVER = 9
    """The cursor was opened again: all acks are durable, except that entries named by following REDELIVER events are
    no longer acked. With entries, one event for each run: they are acked, although no earlier event acks them."""
    REDELIVER = 10
    """Entries that had been acked and are no longer acked after a recovery or a reset."""
    HELD_BACK = 11
    """Acked entries that the persist just begun excludes because they are young."""
    CUT_OFF = 12
    """Acked entries that the persist just begun excludes because of a limit, and that were not durable."""
    DISPLACED = 13
    """Acked entries that the persist just begun excludes because of a limit, and that were durable until now; they
    are not durable from here on, even if the persist fails."""
    RESET = 14
    """The cursor was reset, durably: like RECOVER, for a cursor that stays open."""
    BATCH = 16
    """In a trace whose unit is messages: these are the messages of one entry, before the first of them is acked."""
    COMMAND = 17
    """Another ACK command begins in a millisecond with an earlier one; without it, the acks of a millisecond count as
    one command."""


NAMES_ENTRIES = frozenset({
    EventKind.PUBLISH, EventKind.DELIVER, EventKind.ACK, EventKind.MARK_DELETE, EventKind.REDELIVER,
    EventKind.HELD_BACK, EventKind.CUT_OFF, EventKind.DISPLACED, EventKind.BATCH,
})  # fmt: skip
"""The kinds that always have entries."""


class Event(NamedTuple):
    """One event of one subscription, or of the topic. The fields are those of the columns."""

    ts_ms: int
    kind: EventKind
    ledger_id: int = -1
    first_entry: int = -1
    last_entry: int = -1
    number: int = -1
