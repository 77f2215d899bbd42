"""The museum: bugs that were once shipped, each with its public issue, ready to be planted in our code.

The name of one ends with ``-sqlite`` if the mistake is made in `SqliteStore`, as others made it in theirs.
"""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import pytest

import ackstate.cursor.config
from ackstate.cursor import recovery as cursor_recovery
from ackstate.cursor.journal import Journal
from ackstate.cursor.persist import Persister, Round
from ackstate.cursor.recovery import Recovery, StoredCursor, UnreadableCursorError, decode_record
from ackstate.cursor.results import PersistTarget
from ackstate.cursor.state import UnpersistedAcks
from ackstate.delay import BucketedDelayIndex, bucket_storage
from ackstate.delay.bucket_storage import FoundBucket
from ackstate.deleted_ranges import DeletedRanges
from ackstate.dispatch.admission import Admission
from ackstate.limits.gate import DispatchGate
from ackstate.limits.rules import RuleState
from ackstate.selection import select
from ackstate.stores import sqlite, sqlite_connection, sqlite_database
from ackstate.stores.base import StoreError
from ackstate.wire import native

if TYPE_CHECKING:
    from collections.abc import Callable


class Replacement(NamedTuple):
    """One attribute of our code and its replacement while a bug is planted; its owner must have it itself."""

    owner: object
    name: str
    by: object


class Exhibit(NamedTuple):
    """A bug of the museum."""

    name: str
    replacements: Callable[[], tuple[Replacement, ...]]  # Called again each time: no exhibit depends on another

    @contextmanager
    def plant(self):
        """Make the mistake until the context is left."""
        with pytest.MonkeyPatch.context() as planted:
            for owner, name, by in self.replacements():
                # An inherited or renamed attribute would be planted without effect.
                assert name in vars(owner), f"{owner!r} has no {name!r} of its own: the exhibit has to follow it"
                planted.setattr(owner, name, by)
            yield


EXHIBITS = []


def _exhibit(name):
    def add(replacements):
        EXHIBITS.append(Exhibit(name, replacements))
        return replacements

    return add


class _Believed(tuple):
    """Equal to anything."""

    __slots__ = ()

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __hash__(self):
        return 0


def _pragmas(changed):
    pragmas = [each for pragma in sqlite_database._PRAGMAS for each in changed.get(pragma, [pragma])]
    return (Replacement(sqlite_database, "_PRAGMAS", tuple(pragmas)),)


@dataclass(frozen=True, slots=True)
class FellBack(StoredCursor):
    """A repair that no report speaks of."""

    @property
    def is_repaired(self):
        return True


@_exhibit("M1-sqlite")
def _never_sync():
    """A commit is not synced.

    NATS JetStream, nats-io/nats-server#8036: after a power failure the ack floors of durable consumers were back at
    1. A consumer's state is a file that is written beside and renamed, and synced only with `sync_always`; that
    this is the cause is likely, not proved.

    `SqliteStore` tells SQLite to sync nothing (`synchronous = OFF`).
    """
    return _pragmas({"synchronous = FULL": ["synchronous = OFF"]})


@_exhibit("M2-sqlite")
def _sync_no_names():
    """No directory is ever synced.

    Similar to M1, in the same place: NATS JetStream syncs the directory of a renamed state file only with
    `sync_always`.

    `SqliteStore` syncs no directory, neither its own nor those above. SQLite itself syncs its own when it begins a
    log.
    """
    sync = sqlite_database.sync_path

    def sync_file(path):
        if not path.is_dir():
            sync(path)

    return (
        Replacement(sqlite_database, "sync_path", sync_file),
        Replacement(sqlite_database, "sync_names_above", lambda _directory: None),
    )


@_exhibit("M3-sqlite")
def _believe_all_rows():
    """Rows and the log are accepted without their checksums.

    NATS JetStream: `decodeConsumerState` looks at a magic number and a version, and there is no checksum. Single
    flipped bits lost 49.7 % of the messages in Jepsen's report on 2.12.1 (nats-io/nats-server#7564).

    `SqliteStore` compares no seal of a row and does not check the log before SQLite reads it; the checksums of the
    journal's records are not compared either.
    """
    return (
        Replacement(sqlite, "SEALED", _Believed()),
        Replacement(sqlite_database, "check_log", lambda _log, _database: None),
        Replacement(native, "SEALED", _Believed()),
    )


@_exhibit("M4-sqlite")
def _take_an_empty_database_for_none():
    """An empty database is an empty state.

    NATS JetStream: `stateWithCopyLocked` returns an empty state and no error for a consumer's file of no bytes; a
    consumer whose file was zeroed was deleted at the start (nats-io/nats-server#7691).

    `SqliteStore` creates a new database where its own is empty.
    """
    check = sqlite_database._check_header

    def check_or_remove(database):
        if database.stat().st_size:
            check(database)
        else:
            database.unlink()

    return (
        Replacement(sqlite_database, "_check_header", check_or_remove),
        Replacement(sqlite_database, "check_not_lost", lambda _directory: None),
    )


@_exhibit("M5")
def _forget_acks_that_came_meanwhile():
    """An ack that arrives during the promotion of older ones is lost.

    RocketMQ 5, apache/rocketmq#10736: an ack that arrives while `PopConsumerCache.cleanupRecords` writes the
    records it has staged finds its record in neither map; the write then restores the acked record.

    `UnpersistedAcks.end_write` ends a write by forgetting fresh acks with those in flight: an ack that came between
    the two is in memory, in no record, and the next persist calls it durable.
    """
    end_write = UnpersistedAcks.end_write

    def end_and_forget(self, mark_delete):
        end_write(self, mark_delete)
        if self._as_one is not None:
            self._as_one.difference_update(self.fresh)
        self.new.clear()
        self._fresh = DeletedRanges()

    return (Replacement(UnpersistedAcks, "end_write", end_and_forget),)


@_exhibit("M6")
def _commit_whatever_became_of_the_write():
    """Staged acks are cleared even if the write failed.

    RocketMQ 5, apache/rocketmq#10667: `PopConsumerCache` clears its staged checkpoints regardless of the result of
    the revive, and the next offset is committed although there is no durable record.

    `Round.write` and `Round.fall_back` swallow the store's error and commit the plan.
    """

    def commit_anyway(self):
        journal, plan = self._persister.journal, self._plan
        write = journal.write_record if plan.target is PersistTarget.METADATA else journal.begin_ledger
        try:
            byte_count = write(plan.content)
        except StoreError:
            byte_count = 0
        return self.commit(byte_count)

    def commit_instead(self, error):
        return self.commit(0)

    return (Replacement(Round, "write", commit_anyway), Replacement(Round, "fall_back", commit_instead))


@_exhibit("M7")
def _confirm_what_the_limiter_refused():
    """Under the rate limit a receipt is durable before the persist.

    Apache Pulsar, apache/pulsar#26484: where the mark-delete rate limiter refuses,
    `ManagedCursorImpl.asyncMarkDelete` completes the callback of a persisted ack with nothing persisted.

    `Persister.tick` counts everything accepted as durable whenever the limiter refuses.
    """
    tick = Persister.tick

    def tick_and_confirm(self, *, now_ms):
        with self.lock:
            limiter = self.limiter
            is_refused = limiter is not None and self._is_new() and not limiter.can_acquire(now_ms)
            is_due = tick(self, now_ms=now_ms)
            if is_refused and not is_due:
                self.state.durable_number = self.state.accepted_number
            return is_due

    return (Replacement(Persister, "tick", tick_and_confirm),)


@_exhibit("M8")
def _keep_one_range_more():
    """A limit on ranges keeps one range too many.

    Apache Pulsar since 2019, fixed by apache/pulsar#25548: `buildIndividualDeletedMessageRanges` added a range
    before it tested the cap, and persisted one range too many.

    `PersistLimits` has `select` choose one range more than the limit.
    """

    def one_more(ranges, *, range_count_max, keep, always):
        return select(ranges, range_count_max=range_count_max + 1, keep=keep, always=always)

    return (Replacement(ackstate.cursor.config, "select", one_more),)


@_exhibit("M9")
def _look_at_what_the_last_persist_left():
    """A limiter uses the size of the last persist.

    Apache Pulsar, apache/pulsar#23200: with `dispatcherPauseOnAckStatePersistentEnabled` (PIP-299), which looks at
    a cached value, 11,097 ranges were seen with a limit of 10,000.

    `DispatchGate`, and `Admission` before it asks the gate, go by the bytes and ranges that they saw first after
    the last persist; the reservations are those of now.
    """
    request, request_again, persisted = DispatchGate.request, DispatchGate.request_redelivery, Admission.persisted
    marked = WeakKeyDictionary()  # for each gate, the usage that it saw first after the last persist

    def stale(gate, usage):
        seen = marked.setdefault(gate, usage)
        return usage._replace(unpersisted_record_bytes=seen.unpersisted_record_bytes, range_count=seen.range_count)

    def stale_request(self, costs, *, usage, **named):
        return request(self, costs, usage=stale(self, usage), **named)

    def stale_request_again(self, costs, *, usage, **named):
        return request_again(self, costs, usage=stale(self, usage), **named)

    def look_again(self, error, *, now_ms):
        marked.pop(self.gate, None)
        persisted(self, error, now_ms=now_ms)

    def has_bytes_for(self, cost):
        limit, seen = self._bytes_limit, stale(self.gate, self.usage()) if self.gate is not None else None
        return limit is None or seen.unpersisted_record_bytes + seen.reserved_bytes + cost <= limit

    return (
        Replacement(Admission, "has_bytes_for", has_bytes_for),
        Replacement(DispatchGate, "request", stale_request),
        Replacement(DispatchGate, "request_redelivery", stale_request_again),
        Replacement(Admission, "persisted", look_again),
    )


@_exhibit("M10")
def _read_the_ranges_when_they_are_written():
    """A base and the data relative to it are of two instants.

    Confluent Parallel Consumer, confluentinc/parallel-consumer#894: the payload was encoded against one offset,
    then another was read and committed with it.

    `Round.write` reads the ranges of a snapshot again once its ledger is made, and keeps the mark-delete position
    of the plan: acks between the two moved it, and are in neither. Our ranges are absolute, so the payload is read
    too late, not the base: the other way round nothing would be lost here.
    """
    write = Round.write

    def write_later(self):
        persister, plan = self._persister, self._plan
        if plan.target is PersistTarget.SNAPSHOT:
            # A ledger more than is needed: making one takes as long as a sync, and others ack meanwhile.
            journal = persister.journal
            journal._made.add(journal.store.ledgers.create(journal._owner))
            with persister.lock:
                deleted, batch, _ = persister.state.whole()
            self._plan = plan._replace(content=plan.content._replace(deleted=deleted, batch=batch))
        return write(self)

    return (Replacement(Round, "write", write_later),)


@_exhibit("M11-sqlite")
def _take_a_failed_commit_for_one_that_went_well():
    """A failed sync is trusted.

    PostgreSQL until 2019 (fsync-gate): the kernel marks the pages of a failed fsync as clean, so that the next one
    succeeds and has written nothing. Rebello and others, USENIX ATC '20, found no strategy that is enough.

    `SqliteStore` reports success, and goes on, if the sync of a commit fails; SQLite has undone it. That an opening
    rereads the log after a failed sync is seen by a test, and by no layer.
    """
    undo = sqlite_connection.SqliteConnection._undo

    def undo_or_trust(connection, calls, error, *, is_committing):
        if not is_committing or getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_IOERR:
            return undo(connection, calls, error, is_committing=is_committing)
        for call in calls:
            call.is_withdrawn = True
        return True

    return (Replacement(sqlite_connection.SqliteConnection, "_undo", undo_or_trust),)


@_exhibit("M12")
def _fall_back_to_the_older_state():
    """An unreadable newer state is replaced by an older one.

    Apache Pulsar, apache/pulsar#18123: a cursor ledger that could not be read in time, and the cursor went on from
    the older state in ZooKeeper; the consumers got a large number of messages again. Of its kind:
    apache/pulsar#17812.

    `Recovery.look_up` goes on from the mark-delete position that the record has where a journal is damaged, or the
    storage fails to read it; unasked, and the report says nothing of it.
    """
    look_up = Recovery.look_up

    def find_something(self, orphans):
        try:
            return look_up(self, orphans)
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

    return (Replacement(Recovery, "look_up", find_something),)


@_exhibit("M13")
def _let_nothing_out_above_a_limit():
    """A restart above a limit stays blocked for ever.

    Apache Kafka share groups, KAFKA-17210 (apache/kafka#16711): state persisted at the limit with no available
    record in it: no share fetch could complete any more.

    `RuleState.fitting` admits nothing while the use is above the limit, not even a message that fills a hole and
    costs nothing. Ours may also come to be above a limit when it is lowered at work.
    """
    fitting = RuleState.fitting

    def nothing_fits(self, costs, count, *, used):
        return 0 if used > self.limit else fitting(self, costs, count, used=used)

    return (Replacement(RuleState, "fitting", nothing_fits),)


@_exhibit("M14-sqlite")
def _empty_the_log_before_the_database_is_synced():
    """A log is emptied before the database is synced.

    No single report. Suspected in Atomix Copycat, in a change that its author later called incorrect
    (atomix/copycat#286); the compaction of NeDB let the new file take the old one's place before it was synced
    (louischatriot/nedb#265).

    The opening of `SqliteStore` copies the log into the database and empties it, and syncs neither.
    """
    checkpoint = "wal_checkpoint(TRUNCATE)"
    return _pragmas({checkpoint: ["synchronous = OFF", checkpoint, "synchronous = FULL"]})


@_exhibit("M15")
def _lose_the_ranges_of_another_format():
    """A change of the format loses the ranges.

    Apache Pulsar, apache/pulsar#7554 (fixed by apache/pulsar#7861): the ranges that one class of range set had
    written were lost on those who read them with another, at an upgrade or a change of a setting; messages acked
    long ago came again. Of its kind: apache/pulsar#23759.

    `Journal.open` drops the individually deleted ranges of a state that is not in the format it is to write.
    """
    open_journal = Journal.open.__func__

    def open_and_lose(cls, store, opening):
        journal, found = open_journal(cls, store, opening)
        if found is not None and found.form.name is not journal.form.name:
            content = found.recovered.content._replace(deleted=DeletedRanges())
            found = replace(found, recovered=replace(found.recovered, content=content))
        return journal, found

    return (Replacement(Journal, "open", classmethod(open_and_lose)),)


@_exhibit("M16")
def _ask_what_is_known_before_what_is_due():
    """A delayed message is looked up before its time is checked.

    Apache Pulsar, apache/pulsar#26230: `BucketDelayedDeliveryTracker.addMessage` asked the bitmap that a snapshot
    had restored before the time. Due messages had not been loaded: skipped, and never handed out.

    A recovered `BucketedDelayIndex` also has the messages of segments that it skipped as due, and answers that all
    its messages must wait, due or not. Both mistakes are needed here: of segments that it skips ours recovers no
    bitmap.
    """
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
