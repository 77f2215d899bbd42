"""The mistakes of `files`, made by `SqliteStore`."""

from __future__ import annotations

import sqlite3

from ackstate.stores import sqlite_connection, sqlite_database, sqlite_mark, sqlite_seal
from ackstate.wire import native
from museum.exhibit import Exhibit, Replacement
from museum.files import FILES, _Believed

_HAPPENED = {exhibit.name: exhibit.happened for exhibit in FILES}


def _pragmas(changed):
    """Return the pragmas of an opening, some of them replaced by others."""
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
        Replacement(sqlite_mark, "sync_path", sync_file),
        Replacement(sqlite_database, "sync_names_above", lambda _directory: None),
    )


def _believe_all_rows():
    def data_of_entries(seal, ledger_id, first, rows):
        return [row[: -sqlite_seal.SEAL_BYTES] for row in rows]

    def data_of_value(seal, path, version, row):
        return row[: -sqlite_seal.SEAL_BYTES]

    return (
        Replacement(sqlite_seal.RowSeal, "data_of_entries", data_of_entries),
        Replacement(sqlite_seal.RowSeal, "data_of_value", data_of_value),
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
        Replacement(sqlite_database, "_check_not_lost", lambda _directory: None),
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


def _on_sqlite(name, title, planted, replacements):
    return Exhibit(f"{name}-sqlite", title, _HAPPENED[name], planted, replacements)


SQLITE_FILES = (
    _on_sqlite(
        "M1", "a commit is not synced", "`SqliteStore` tells SQLite to sync nothing (`synchronous = OFF`).", _never_sync
    ),
    _on_sqlite(
        "M2",
        "no directory is ever synced",
        "`SqliteStore` syncs no directory, neither its own nor those above. SQLite itself syncs its own when it begins "
        "a log.",
        _sync_no_names,
    ),
    _on_sqlite(
        "M3",
        "rows and the log are accepted without their checksums",
        "`SqliteStore` compares no seal of a row and does not check the log before SQLite reads it; the checksums of "
        "the journal's records are not compared either.",
        _believe_all_rows,
    ),
    _on_sqlite(
        "M4",
        "an empty database is an empty state",
        "`SqliteStore` creates a new database where its own is empty.",
        _take_an_empty_database_for_none,
    ),
    _on_sqlite(
        "M11",
        "a failed sync is trusted",
        "`SqliteStore` reports success, and goes on, if the sync of a commit fails; SQLite has undone it. That an "
        "opening rereads the log after a failed sync is seen by a test, and by no layer.",
        _take_a_failed_commit_for_one_that_went_well,
    ),
    _on_sqlite(
        "M14",
        "a log is emptied before the database is synced",
        "The opening of `SqliteStore` copies the log into the database and empties it, and syncs neither.",
        _empty_the_log_before_the_database_is_synced,
    ),
)
