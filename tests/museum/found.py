"""Bugs of our own that the layers found: kept by hand."""

from __future__ import annotations

from typing import NamedTuple


class OwnBug(NamedTuple):
    """A bug of ours.

    Attributes:
        layer: Which layer found it: ``L0`` to ``L5``.
        what: The failure, in one sentence.
        mended: The correction.
        test: The test that tells the story.
    """

    layer: str
    what: str
    mended: str
    test: str


OWN_BUGS: tuple[OwnBug, ...] = (
    OwnBug(
        "L0",
        "After a failed promotion of young acks the next persist wrote a record with nothing new in it.",
        "A persist begins only for acks that are old enough for it.",
        "`tests/unit/cursor/test_promotion.py`",
    ),
    OwnBug(
        "L0",
        "In Pulsar's format, a receipt for acks in a batch that a limit had excluded from the record claimed to be "
        "durable as soon as a mark-delete had passed the batch, written or not.",
        "`AckState` keeps such batches in mind until a record that was written holds or covers them.",
        "`tests/model/cursor/test_managed_model.py`",
    ),
    OwnBug(
        "L0",
        "The same claim, while a write that would hold the batch was under way, and after it had failed.",
        "As above.",
        "`tests/model/cursor/test_managed_model.py`",
    ),
    OwnBug(
        "L0",
        "The same claim, where the last ack of the batch had been held back as young and a mark-delete covered it.",
        "As above.",
        "`tests/model/cursor/test_managed_model.py`",
    ),
    OwnBug(
        "L5",
        "A flipped bit in a row of `SqliteStore` that held a record in Pulsar's format, which has no checksum, "
        "invented up to 179 acks; a page of another store invented 80 in the native format.",
        "Each row ends with a checksum over its data, its key and a number of the store (format version 2).",
        "`tests/unit/cursor/test_sqlite.py`",
    ),
    OwnBug(
        "L5",
        "A flipped bit in SQLite's write-ahead log silently dropped every later transaction.",
        "Opening checks the log before SQLite reads it, and refuses one that is damaged before its last transaction.",
        "`tests/unit/cursor/test_sqlite_log.py`",
    ),
    OwnBug(
        "L5",
        "A flipped bit in the index of SQLite's table of values made a cursor look new.",
        "Opening compares tables with their indexes; entries are named by their rows, not by the index.",
        "`tests/unit/cursor/test_sqlite.py`",
    ),
    OwnBug(
        "L2",
        "A failed sync, which could not be recorded either: the next opening trusted the kernel's cache and appended, "
        "and a power cut left a valid group after a lost one.",
        "Opening syncs, drops the kernel's cache of the log, and reads the disk.",
        "`tests/unit/cursor/test_sqlite_unreadable.py`",
    ),
    OwnBug(
        "L2",
        "A page that SQLite's check could not read was reported as damage, but the next opening could read it.",
        "It is a failed read, `StoreError`, as everywhere else.",
        "`tests/unit/cursor/test_sqlite_unreadable.py`",
    ),
    OwnBug(
        "L5",
        "On SQLite, half of the repairs that were offered for an unreadable cursor failed: they fenced the ledger that "
        "they were to give up, and this ledger was damaged.",
        "A repair does without such a ledger; a call that meets damage is undone alone, and ends no store for others.",
        "`tests/unit/cursor/test_offered_repairs.py`",
    ),
    OwnBug(
        "L5",
        "With a page of another store in its table of entries, SQLite deleted a ledger's rows by its index, one row of "
        "the new ledger among them.",
        "Rows are deleted by their own content.",
        "`tests/unit/cursor/test_sqlite_unreadable.py`",
    ),
    OwnBug(
        "L5",
        "SQLite quoted damaged bytes in an error, and Python could not decode them: the store raised "
        "`UnicodeDecodeError`.",
        "It is damage, `CorruptStateError`.",
        "`tests/unit/cursor/test_sqlite_unreadable.py`",
    ),
    OwnBug(
        "L5",
        "The first part of another store's log in the place of its own invented 88 acks.",
        "The checksum of a row covers a number of its store.",
        "`tests/unit/cursor/test_sqlite.py`",
    ),
    OwnBug(
        "L5",
        "A flipped bit turned the number of a ledger's last entry in `SqliteStore` into text: it raised `TypeError`. "
        "Found by flipping all 327,680 bits of a database instead of a sample.",
        "It is damage, `CorruptStateError`.",
        "`tests/unit/cursor/test_sqlite.py`",
    ),
    OwnBug(
        "L5",
        "A flipped bit in the index of SQLite's table of entries: entries appended next to that key were synced, and "
        "could not be read after the offered repair had deleted the damaged ledger. Found as above.",
        "Opening compares every table with its indexes, and refuses a store where one disagrees.",
        "`tests/unit/cursor/test_sqlite_unreadable.py`",
    ),
    OwnBug(
        "L5",
        "A missing frame of SQLite's log silently dropped three transactions if the next two had one frame each.",
        "A frame behind it that others go on from says where a transaction ends, though it does not check out itself.",
        "`tests/unit/cursor/test_sqlite_log.py`",
    ),
    OwnBug(
        "L0",
        "A skip of 0 entries while the gate was closed and holes were being filled: the next dispatch failed with an "
        "`OverflowError`, because the mark-delete position was before the first entry of its ledger.",
        "No hole is looked for there.",
        "`tests/unit/cursor/test_subscription.py`",
    ),
    OwnBug(
        "L0",
        "Cursors that were persisted together and could not be written shared one error, with the outcomes of all of "
        "them.",
        "Each has its own.",
        "`tests/unit/cursor/test_persist_all.py`",
    ),
    OwnBug(
        "L0",
        "A waiting message that was acked through the cursor, bypassing its subscription, prevented all others of its "
        "key from filling holes: a gate closed by the number of ranges stayed closed.",
        "A dispatch notices that something was acked elsewhere, and lets it wait no more.",
        "`tests/model/cursor/test_key_order.py`",
    ),
    OwnBug(
        "L0",
        "After a seek whose write failed but had reached the disk, receipts still counted as durable and the gauge did "
        "not change: after a crash the cursor was reset, and their acks were lost.",
        "From before a reset is written until it, or a persist, has succeeded, no receipt counts, and the gauge "
        "reports the worse of the two outcomes.",
        "`tests/unit/cursor/test_failed_seek.py`",
    ),
    OwnBug(
        "L0",
        "An ack through the cursor that divided a hole: while the gate was closed by the number of ranges, only the "
        "lower part was filled.",
        "A dispatch notices that something was acked elsewhere, and examines the holes again.",
        "`tests/unit/cursor/test_subscription.py`",
    ),
    OwnBug(
        "L0",
        "After two failed seeks between two persists, the un-persisted bytes were those of the lower seek, which may "
        "be fewer.",
        "All that may have happened are compared.",
        "`tests/unit/cursor/test_failed_seek.py`",
    ),
)
