"""Mistakes between a store and its disk: missing syncs, and wrong readings of a crash's remains."""

from __future__ import annotations

import sqlite3

from ackstate.stores import sqlite, sqlite_connection, sqlite_database
from ackstate.wire import native
from museum.exhibit import Exhibit, Replacement


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


def _never_sync():
    return _pragmas({"synchronous = FULL": ["synchronous = OFF"]})


def _sync_no_names():
    sync = sqlite_database.sync_path

    def sync_file(path):
        if not path.is_dir():
            sync(path)

    return (
        Replacement(sqlite_database, "sync_path", sync_file),
        Replacement(sqlite_database, "sync_names_above", lambda _directory: None),
    )


def _believe_all_rows():
    return (
        Replacement(sqlite, "SEALED", _Believed()),
        Replacement(sqlite_database, "check_log", lambda _log, _database: None),
        Replacement(native, "SEALED", _Believed()),
    )


def _take_an_empty_database_for_none():
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


def _take_a_failed_commit_for_one_that_went_well():
    undo = sqlite_connection.SqliteConnection._undo

    def undo_or_trust(connection, calls, error, *, is_committing):
        if not is_committing or getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_IOERR:
            return undo(connection, calls, error, is_committing=is_committing)
        for call in calls:
            call.is_withdrawn = True
        return True

    return (Replacement(sqlite_connection.SqliteConnection, "_undo", undo_or_trust),)


def _empty_the_log_before_the_database_is_synced():
    checkpoint = "wal_checkpoint(TRUNCATE)"
    return _pragmas({checkpoint: ["synchronous = OFF", checkpoint, "synchronous = FULL"]})


FILES = (
    Exhibit(
        "M1-sqlite",
        "a commit is not synced",
        "NATS JetStream, nats-io/nats-server#8036: after a power failure the ack floors of durable consumers were "
        "back at 1. A consumer's state is a file that is written beside and renamed, and synced only with "
        "`sync_always`; that this is the cause is likely, not proved.",
        "`SqliteStore` tells SQLite to sync nothing (`synchronous = OFF`).",
        _never_sync,
    ),
    Exhibit(
        "M2-sqlite",
        "no directory is ever synced",
        "Similar to M1, in the same place: NATS JetStream syncs the directory of a renamed state file only with "
        "`sync_always`.",
        "`SqliteStore` syncs no directory, neither its own nor those above. SQLite itself syncs its own when it begins "
        "a log.",
        _sync_no_names,
    ),
    Exhibit(
        "M3-sqlite",
        "rows and the log are accepted without their checksums",
        "NATS JetStream: `decodeConsumerState` looks at a magic number and a version, and there is no checksum. "
        "Single flipped bits lost 49.7 % of the messages in Jepsen's report on 2.12.1 (nats-io/nats-server#7564).",
        "`SqliteStore` compares no seal of a row and does not check the log before SQLite reads it; the checksums of "
        "the journal's records are not compared either.",
        _believe_all_rows,
    ),
    Exhibit(
        "M4-sqlite",
        "an empty database is an empty state",
        "NATS JetStream: `stateWithCopyLocked` returns an empty state and no error for a consumer's file of no bytes;"
        " a consumer whose file was zeroed was deleted at the start (nats-io/nats-server#7691).",
        "`SqliteStore` creates a new database where its own is empty.",
        _take_an_empty_database_for_none,
    ),
    Exhibit(
        "M11-sqlite",
        "a failed sync is trusted",
        "PostgreSQL until 2019 (fsync-gate): the kernel marks the pages of a failed fsync as clean, so that the next "
        "one succeeds and has written nothing. Rebello and others, USENIX ATC '20, found no strategy that is enough.",
        "`SqliteStore` reports success, and goes on, if the sync of a commit fails; SQLite has undone it. That an "
        "opening rereads the log after a failed sync is seen by a test, and by no layer.",
        _take_a_failed_commit_for_one_that_went_well,
    ),
    Exhibit(
        "M14-sqlite",
        "a log is emptied before the database is synced",
        "No single report. Suspected in Atomix Copycat, in a change that its author later called incorrect "
        "(atomix/copycat#286); the compaction of NeDB let the new file take the old one's place before it was synced "
        "(louischatriot/nedb#265).",
        "The opening of `SqliteStore` copies the log into the database and empties it, and syncs neither.",
        _empty_the_log_before_the_database_is_synced,
    ),
)
