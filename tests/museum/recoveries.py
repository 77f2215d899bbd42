"""Mistakes of a successor: wrong readings of the stored state, or of the stored delayed messages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ackstate.cursor import recovery as cursor_recovery
from ackstate.cursor.journal import Journal
from ackstate.cursor.recovery import Recovery, StoredCursor, UnreadableCursorError, decode_record
from ackstate.delay import BucketedDelayIndex, bucket_storage
from ackstate.delay.bucket_storage import FoundBucket
from ackstate.deleted_ranges import DeletedRanges
from ackstate.stores.base import StoreError
from museum.exhibit import Exhibit, Replacement


@dataclass(frozen=True, slots=True)
class FellBack(StoredCursor):
    """A repair that no report speaks of."""

    @property
    def is_repaired(self):
        return True


def _fall_back_to_the_older_state():
    find = Recovery.find

    def find_something(self, orphans):
        try:
            return find(self, orphans)
        except (UnreadableCursorError, StoreError) as error:
            value = self.store.metadata.get(self.path)
            if value is None:
                raise
            decoded = decode_record(value.data, self.ledgers)
            if decoded.record.mark_delete is None:
                raise
            nothing = StoredCursor(decoded.record, value.version, decoded.form, recovered=None)
            older = cursor_recovery._state_at(decoded.record.mark_delete, nothing, error)
            recovered = replace(older.recovered, discarded_reason="")
            return FellBack(older.record, older.version, older.form, recovered)

    return (Replacement(Recovery, "find", find_something),)


def _lose_the_ranges_of_another_format():
    open_journal = Journal.open.__func__

    def open_and_lose(cls, store, opening):
        journal, found = open_journal(cls, store, opening)
        if found is not None and found.form.name is not journal.form.name:
            content = found.recovered.content._replace(deleted=DeletedRanges())
            found = replace(found, recovered=replace(found.recovered, content=content))
        return journal, found

    return (Replacement(Journal, "open", classmethod(open_and_lose)),)


def _ask_what_is_known_before_what_is_due():
    add_message, hold = BucketedDelayIndex.add_message, BucketedDelayIndex.hold

    def all_bitmaps(self):
        return bucket_storage._union(self.metadata)

    def add_unless_known(self, position, *, deliver_at_ms, now_ms):
        if position in self.held:
            return True
        return add_message(self, position, deliver_at_ms=deliver_at_ms, now_ms=now_ms)

    def hold_unless_known(self, position, deliver_at_ms):
        return position in self.held or hold(self, position, deliver_at_ms)

    return (
        Replacement(FoundBucket, "bitmaps", all_bitmaps),
        Replacement(BucketedDelayIndex, "add_message", add_unless_known),
        Replacement(BucketedDelayIndex, "hold", hold_unless_known),
    )


RECOVERIES = (
    Exhibit(
        "M12",
        "an unreadable newer state is replaced by an older one",
        "Apache Pulsar, apache/pulsar#18123: a cursor ledger that could not be read in time, and the cursor went on "
        "from the older state in ZooKeeper; the consumers got a large number of messages again. Of its kind: "
        "apache/pulsar#17812.",
        "`Recovery.find` goes on from the mark-delete position that the record has where a journal is damaged, or the "
        "storage fails to read it; unasked, and the report says nothing of it.",
        _fall_back_to_the_older_state,
    ),
    Exhibit(
        "M15",
        "a change of the format loses the ranges",
        "Apache Pulsar, apache/pulsar#7554 (fixed by apache/pulsar#7861): the ranges that one class of range set had "
        "written were lost on those who read them with another, at an upgrade or a change of a setting; messages "
        "acked long ago came again. Of its kind: apache/pulsar#23759.",
        "`Journal.open` drops the individually deleted ranges of a state that is not in the format it is to write.",
        _lose_the_ranges_of_another_format,
    ),
    Exhibit(
        "M16",
        "a delayed message is looked up before its time is checked",
        "Apache Pulsar, apache/pulsar#26230: `BucketDelayedDeliveryTracker.addMessage` asked the bitmap that a "
        "snapshot had restored before the time. Due messages had not been loaded: skipped, and never handed out.",
        "A recovered `BucketedDelayIndex` also has the messages of segments that it skipped as due, and answers that "
        "all its messages must wait, due or not. Both mistakes are needed here: of segments that it skips ours "
        "recovers no bitmap.",
        _ask_what_is_known_before_what_is_due,
    ),
)
