"""The planted bugs of the kill ledger, each a change in one place, with the tests and crash layers that notice it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class Planted(NamedTuple):
    """One bug.

    Attributes:
        name: Its name in the report.
        file: The file, from the root of the repository.
        old: A text that occurs once in the file.
        new: The text instead.
        harm: The effect.
        killers: Ids of tests, and layers as ``layer L0``, each of which notices it; empty if nothing does.
    """

    name: str
    file: str
    old: str
    new: str
    harm: str
    killers: tuple[str, ...]


_CURSOR, _MODEL = "tests/unit/cursor/test_", "tests/model/cursor/test_"
_JOURNAL, _PLANNER = "ackstate/cursor/journal.py", "ackstate/cursor/persist.py"
_ACKS, _BATCHES = "ackstate/cursor/state.py", "ackstate/cursor/state.py"
_ROUNDS, _MESSAGES = "ackstate/dispatch/rounds.py", "ackstate/dispatch/messages.py"
_STORES = "ackstate/stores/"
_SQLITE, _UNREADABLE = f"{_CURSOR}sqlite.py::test_", f"{_CURSOR}sqlite_unreadable.py::test_"
_SQLITE_LOG = f"{_CURSOR}sqlite_log.py::test_"

# Changes that once went unnoticed, or are like one that did.
UNNOTICED = (
    Planted(
        "J6", _JOURNAL,
        "ledger_id, self._open_ledger = self._open_ledger, None", "ledger_id = self._open_ledger",
        "A ledger is appended to again after an append of unknown outcome: the cursor becomes unreadable.",
        (f"{_MODEL}managed_model.py::test_without_its_bug_each_story_ends_well", "layer L0"),
    ),
    Planted(
        "A3", _ACKS,
        "self.covered.update(self.in_flight.take_at_most(mark_delete))", "self.in_flight.take_at_most(mark_delete)",
        "A failed persist forgets acks that the mark-delete covered meanwhile: a receipt lies.",
        ("layer L0",
         f"{_CURSOR}fallback.py::test_what_the_mark_delete_passes_during_a_write_that_fails_is_not_durable"),
    ),
    Planted(
        "S3", f"{_STORES}sqlite_database.py", "    sync_names_above(directory)\n", "",
        "Names of the directories above a store are lost at a power cut.",
        ("layer L2",),
    ),
    Planted(
        "A6", "ackstate/deleted_ranges.py", "range_first_bytes(last + 1)\n", "range_first_bytes(last)\n",
        "The record bytes of a range that is cut are wrong at entries 127 and 16,383.",
        ("tests/unit/ackstate/test_deleted_ranges.py::test_a_range_that_is_cut_takes_what_its_rest_takes",),
    ),
    Planted(
        "P8", _PLANNER, "            self._ledger_begun_ms = now_ms\n", "            pass\n",
        "After the roll-over time each persist writes a whole snapshot.",
        (f"{_CURSOR}managed.py::test_an_old_ledger_is_replaced_once_an_interval_and_not_at_every_persist_after_it",),
    ),
    Planted(
        "J2", _JOURNAL,
        "self.snapshot_bytes, self.delta_bytes = len(encoded), 0", "self.snapshot_bytes = len(encoded)",
        "After the first compaction nearly each persist writes a whole snapshot.",
        (f"{_CURSOR}managed.py::test_each_compaction_is_paid_for_by_the_deltas_before_it",),
    ),
    Planted(
        "P6", _PLANNER, "0 < self._retry_at_ms - now_ms <= _RETRY_MS_MAX", "now_ms < self._retry_at_ms",
        "A clock that went back does not end the pause: persists stay in the metadata store.",
        (f"{_CURSOR}pace.py::test_a_ledger_that_failed_is_tried_again_after_a_clock_went_back",),
    ),
    Planted(
        "R2", "ackstate/cursor/recovery.py", " or bool(snapshot.batch)", "",
        "An orphan journal of batch acks alone is not looked for: the cursor opens as new.",
        (f"{_CURSOR}managed.py::test_an_orphan_journal_of_batch_acks_alone_is_not_absent",),
    ),
    Planted(
        "G2", "ackstate/limits/broker.py", "gone = self._counted + self._promised\n", "gone = self._counted\n",
        "A promise is kept when a gate closes: the broker's total stays above 0.",
        ("tests/unit/limits/test_gate_broker.py"
         "::test_a_subscription_that_leaves_takes_what_it_was_promised_with_it",),
    ),
    Planted(
        "Z1", f"{_STORES}zookeeper.py",
        "    if found_version != version:\n", "    if found is None != version:\n",
        "Versions of values in ZooKeeper are not compared.",
        ("tests/system/cursor/test_bookkeeper.py::test_it_keeps_the_contract",),
    ),
    Planted(
        "Z2", f"{_STORES}sqlite.py",
        '            connection.execute("UPDATE ledgers SET fenced = 1 WHERE id = ?", (ledger_id,))\n', "",
        "A fence in SQLite is not set.",
        ("tests/system/cursor/test_store_conformance.py::test_sqlite_store_keeps_the_contract",),
    ),
    Planted(
        "Y1", "ackstate/analysis/replay/cursor_replay.py",
        "            if self._cursor.view.is_persist_due(now_ms=at_ms):\n                return at_ms\n", "",
        "The replay looks at young acks only once.",
        ("tests/model/analysis/replay/test_replay.py::test_each_story_agrees",),
    ),
    Planted(
        "Y2", "ackstate/analysis/replay/cursor_replay.py",
        "        self._waiting.clear()\n        self._flush_at = self.tick_at(at_ms + self._flush_ms)\n",
        "        self._waiting.clear()\n",
        "In the replay the old flush interval continues after a reset.",
        ("tests/unit/analysis/replay/test_persist_ticks.py::test_the_flush_interval_starts_again_after_a_reset",),
    ),
    Planted(
        "D1", "ackstate/delay/index.py", "min(self._fresh_first_ms, int(due_ms.min()))", "int(due_ms.min())",
        "Delayed messages are handed out late: a later one hides the first.",
        ("tests/model/delay/test_calendar_model.py::TestCalendar::runTest",),
    ),
    Planted(
        "F1", f"{_STORES}sqlite_log.py",
        "_ends_after(frames, bad, header[4:6]) > 1", "_ends_after(frames, bad, header[4:6]) > 0",
        "The torn tail of SQLite's log passes as damage.",
        (f"{_SQLITE_LOG}a_last_transaction_may_be_torn_anywhere",),
    ),
    Planted(
        "overdrawn permits", "ackstate/dispatch/consumers.py",
        "self.total += max(after, 0) - max(before, 0)", "self.total += after - before",
        "A consumer that a batch brought below zero stops all others.",
        (f"{_CURSOR}rounds.py::test_a_consumer_that_a_batch_overdrew_stops_no_other",),
    ),
    Planted(
        "permits of a failed round", _ROUNDS,
        "self._permits.add(name, batch.permits_before - self._permits.of(name))", "pass",
        "A round that failed takes permits.",
        (f"{_CURSOR}rounds.py::test_a_round_that_fails_after_it_sent_returns_the_permits",),
    ),
    Planted(
        "young after a reset", "ackstate/cursor/persist.py", "            persister.young_age.clear()\n", "",
        "After a seek young acks are persisted as old.",
        (f"{_CURSOR}generations.py::test_what_was_sent_before_a_reset_is_young_again_after_it",),
    ),
    Planted(
        "empty last ledger", "ackstate/topic/retention.py",
        "(mark_delete > ledgers.last_confirmed and mark_delete.entry_id >= 0)", "mark_delete > ledgers.last_confirmed",
        "A mark-delete before the first entry of the empty last ledger keeps the log for ever.",
        (f"{_CURSOR}retention.py::test_a_mark_delete_before_the_empty_last_ledger_holds_nothing",),
    ),
    Planted(
        "empty ledgers", "ackstate/ledger_map.py",
        "if count or log._last_confirmed.entry_id < 0:", "if count:",
        "The end of a log of empty ledgers is before its first ledger.",
        ("tests/unit/ackstate/test_ledger_map.py"
         "::test_a_log_of_empty_ledgers_ends_before_the_first_entry_of_the_last",),
    ),
    Planted(
        "truncated batches", "ackstate/cursor/persist.py",
        "if taken.cut_count or taken.batch_cut_count:", "if taken.cut_count:",
        "A truncation by the limit on batches alone is neither logged nor counted.",
        (f"{_CURSOR}pulsar_mode.py::test_batches_beyond_the_limit_are_a_truncation_though_no_range_is_cut",),
    ),
    Planted(
        "pause", "ackstate/cursor/pace.py", "max(interval_ms, _PAUSE_MS)", "interval_ms",
        "A broker with a flush interval of 0 does not pause after a persist that failed.",
        (f"{_CURSOR}pace.py::test_a_persist_that_failed_is_not_tried_again_at_once",),
    ),
    Planted(
        "due for others", "ackstate/delay/buckets.py",
        "        self.due_log.append(due)\n        return False\n", "        return False\n",
        "A message that one view delivers before the index says is lost for the other views.",
        ("tests/unit/delay/test_shared_use.py"
         "::test_a_message_that_is_due_earlier_than_the_index_says_comes_to_every_view",),
    ),
    Planted(
        "round after a dead letter", _ROUNDS,
        "self._left <= 0 or self._handed_over_count > before", "self._left <= 0",
        "None: the ack of the dead letter makes room during the round, which wakes the waiter too.",
        (),
    ),
    Planted(
        "closed meanwhile", "ackstate/cursor/persist.py",
        "isinstance(outcome, AckStateError) and not isinstance(outcome, CursorClosedError)",
        "isinstance(outcome, AckStateError)",
        "A cursor that another thread closes meanwhile is reported as one that could not be closed.",
        (f"{_CURSOR}threads.py::test_a_cursor_that_another_thread_closes_meanwhile_is_closed_without_an_error",),
    ),
    Planted(
        "creeping clock", _MESSAGES,
        "        if back_ms <= 0 or back_ms > _JITTER_MS_MAX:\n            self._latest_ms",
        "        if True:\n            self._latest_ms",
        "A clock that creeps back is never noticed, and delays last longer.",
        (f"{_CURSOR}dispatch_parts.py::test_a_clock_that_creeps_back_shortens_a_wait_as_one_that_jumps",),
    ),
    Planted(
        "key that waits", _MESSAGES,
        "if lowest_timed is None or position < lowest_timed:\n            owner", "if True:\n            owner",
        "A message passes an earlier one of its key that waits for a time.",
        (f"{_MODEL}key_order.py::test_later_messages_of_a_key_wait_with_one_given_back_with_a_delay",),
    ),
    Planted(
        "key that waits, many at once", _MESSAGES, "if key in self._timed_of_key:", "if False:",
        "Messages that are read ahead pass an earlier one of their key that waits for a time.",
        (f"{_CURSOR}rounds.py::test_messages_of_a_key_that_are_read_ahead_wait_with_one_that_waits_for_a_time",),
    ),
    Planted(
        "error of the store", "ackstate/dispatch/subscription.py",
        "self._admission.persisted(outcome, now_ms=self._latest_ms)",
        "self._admission.persisted(None, now_ms=self._latest_ms)",
        "A blocked subscription does not name the store that fails.",
        (f"{_CURSOR}explain_holes.py::test_the_byte_rule_names_the_store_that_fails",),
    ),
    Planted(
        "error of the store, forgotten", "ackstate/dispatch/subscription.py",
        "self._admission.store_error if outcome.route is PersistTarget.NOTHING else None", "None",
        "A persist that wrote nothing takes the blame off the store.",
        (f"{_CURSOR}explain_holes.py::test_a_persist_with_nothing_to_write_does_not_clear_the_store",),
    ),
    Planted(
        "cleared delays", "ackstate/dispatch/subscription.py", "            self._messages.delayed.forget()\n", "",
        "A cleared backlog leaves its delayed messages in the tracker.",
        (f"{_CURSOR}delayed_subscription.py::test_a_cleared_backlog_stays_clear",),
    ),
)  # fmt: skip

# Bugs of our own that crash layers or models once found: `museum.found` has their stories, in the same order.
# O21 is left out: the holes that it kept are no longer kept.
FOUND = (
    Planted(
        "O1", _ACKS, "any(each is not None and each[0] < up_to for each in lowest)",
        "any(each is not None for each in lowest)",
        "After a failed promotion the next persist writes a record with nothing new in it.",
        (f"{_CURSOR}promotion.py::test_after_a_failed_promotion_a_persist_writes_nothing_until_an_ack_is_old",),
    ),
    Planted(
        "O2", _BATCHES, "        if position in self._unwritten:\n            return True\n", "",
        "Excluded acks in a batch count as durable once a mark-delete has passed the batch.",
        (f"{_CURSOR}batch_receipts.py::test_a_mark_delete_that_is_not_durable_makes_it_no_more_durable",),
    ),
    Planted(
        "O3", _BATCHES, "self._unwritten |= self._cut", "self._unwritten = set(self._cut)",
        "The same while a write that holds the batch is under way, and after it has failed.",
        (f"{_CURSOR}batch_receipts.py::test_a_write_that_fails_makes_it_no_more_durable",),
    ),
    Planted(
        "O4", _BATCHES, "sorted((*self._partly, *self._excluded()))", "sorted(self._partly)",
        "The same where the last ack of the batch was held back as young.",
        (f"{_CURSOR}batch_receipts.py::test_nor_does_a_mark_delete_over_a_batch_whose_last_ack_was_too_young",),
    ),
    Planted(
        "O5", f"{_STORES}sqlite.py",
        "or google_crc32c.extend(salted, row) != SEALED", "",
        "A flipped bit in a row of SQLite invents acks.",
        (f"{_SQLITE}a_row_that_is_not_as_it_was_written_is_found_when_it_is_read",),
    ),
    Planted(
        "O6", f"{_STORES}sqlite_log.py",
        "if bad < len(frames) and _ends_after(frames, bad, header[4:6]) > 1:", "if False:",
        "A flipped bit in SQLite's log silently drops every later transaction.",
        (f"{_SQLITE_LOG}a_flipped_bit_before_the_last_transaction_is_refused_with_its_frame",),
    ),
    Planted(
        "O7", f"{_STORES}sqlite_database.py", "PRAGMA integrity_check(1)", "PRAGMA quick_check(1)",
        "A flipped bit in an index of SQLite makes a cursor look new.",
        (f"{_SQLITE}an_index_that_disagrees_with_its_table_is_refused",),
    ),
    Planted(
        "O8", f"{_STORES}sqlite_database.py",
        "        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)\n", "",
        "After a failed sync an opening trusts the kernel's cache.",
        (f"{_UNREADABLE}opening_takes_what_the_disk_has_of_the_log_and_not_what_the_cache_has",),
    ),
    Planted(
        "O9", f"{_STORES}sqlite_database.py",
        "if unread and int(unread[1]) & 0xFF == sqlite3.SQLITE_IOERR:", "if False:",
        "A page that cannot be read is reported as damage.",
        (f"{_UNREADABLE}a_page_that_cannot_be_read_is_no_damage",),
    ),
    Planted(
        "O10", f"{_STORES}sqlite_connection.py",
        "survived = sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_CORRUPT", "survived = (sqlite3.SQLITE_TOOBIG,)",
        "A repair that meets the damaged ledger ends the store for all.",
        (f"{_CURSOR}offered_repairs.py"
         "::test_a_cursor_whose_ledger_the_store_finds_damaged_is_repaired_written_and_opened_again",),
    ),
    Planted(
        "O11", f"{_STORES}sqlite.py",
        "WHERE sought.ledger_id = ? AND found.ledger_id = ? LIMIT ?", "WHERE sought.ledger_id = ? AND 0 < ? LIMIT ?",
        "A damaged index has a row of another ledger deleted.",
        (f"{_UNREADABLE}a_ledger_is_deleted_without_a_row_of_another_that_a_damaged_index_names",),
    ),
    Planted(
        "O12", f"{_STORES}sqlite_connection.py",
        "_ERRORS = (sqlite3.Error, UnicodeDecodeError)", "_ERRORS = (sqlite3.Error,)",
        "Damage that SQLite quotes in an error raises `UnicodeDecodeError`.",
        (f"{_UNREADABLE}a_complaint_that_quotes_damaged_bytes_is_damage",),
    ),
    Planted(
        "O13", f"{_STORES}sqlite.py", "google_crc32c.value(self._database.salt)", 'google_crc32c.value(b"")',
        "A row of another store passes for one of this store.",
        (f"{_SQLITE}a_row_that_is_not_as_it_was_written_is_found_when_it_is_read",),
    ),
    Planted(
        "O14", f"{_STORES}sqlite.py", "if not isinstance(last, int) or count != last + 1 or", "if count != last + 1 or",
        "A number that a flipped bit turned into text raises `TypeError`.",
        (f"{_SQLITE}an_entry_whose_number_has_become_a_text_is_damage",),
    ),
    Planted(
        "O15", f"{_STORES}sqlite_database.py",
        "        if check_pages:\n            _check_pages(database, connection)\n", "",
        "What is written next to a damaged key of an index cannot be read later.",
        (f"{_UNREADABLE}a_damaged_index_is_refused_before_anything_is_written_beside_it",),
    ),
    Planted(
        "O16", f"{_STORES}sqlite_log.py",
        "frames.checks_out | (frames.has_header_in_one_sector & np.append(frames.checks_out[1:], False))",
        "frames.checks_out",
        "A missing frame of SQLite's log silently drops three short transactions.",
        (f"{_SQLITE_LOG}a_lost_frame_is_refused_where_short_transactions_follow_it",),
    ),
    Planted(
        "O18", "ackstate/cursor/persist.py", "copy(error) for _ in appends", "error for _ in appends",
        "Cursors that could not be written together share one error, with the outcomes of all of them.",
        (f"{_CURSOR}persist_all.py::test_a_closed_store_answers_each_cursor_with_an_error_of_its_own",),
    ),
    Planted(
        "O19", _MESSAGES, "        for position in acked:\n            self.waiting.take(position)\n", "",
        "A waiting message that was acked through the cursor keeps all others of its key from filling holes.",
        (f"{_MODEL}key_order.py::test_what_was_acked_past_the_subscription_does_not_hold_its_key_up",),
    ),
    Planted(
        "O20", "ackstate/cursor/persist.py", "            state.begin_reset(mark_delete)\n", "",
        "After a seek whose write failed but reached the disk, receipts still count as durable.",
        (f"{_CURSOR}failed_seek.py::test_no_receipt_counts_that_a_crash_may_void",),
    ),
    Planted(
        "O22", "ackstate/cursor/view.py",
        "for each in state.resets_begun)\n            return max(state.unp",
        "for each in (min(state.resets_begun),))\n            return max(state.unp",
        "After two failed seeks the un-persisted bytes are those of the lower one, which may be fewer.",
        (f"{_CURSOR}failed_seek.py::test_of_two_that_failed_the_one_counts_that_leaves_more_bytes",),
    ),
)  # fmt: skip

# Bugs that models, machines and stories were once shown to find, each with one test that notices it.
_MODELLED = json.loads(Path(__file__).with_name("planted.json").read_text(encoding="utf-8"))
MODELLED = tuple(Planted(**{**row, "killers": tuple(row["killers"])}) for row in _MODELLED)

PLANTED = (*UNNOTICED, *FOUND, *MODELLED)
