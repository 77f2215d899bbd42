"""The mutants: changes to the product that once went unnoticed, or are like one that did."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One change to one file.

    Attributes:
        name: Its name in the report.
        file: The file, from the root of the repository.
        old: A text that occurs once in the file.
        new: The text instead.
        harm: The effect of the change.
        tests: Paths of the tests that kill it.
        layer: The crash layer that kills it if the tests do not; empty if they have to.
    """

    name: str
    file: str
    old: str
    new: str
    harm: str
    tests: tuple[str, ...]
    layer: str = ""


_CURSOR, _MODEL = "tests/unit/cursor", "tests/model/cursor"
_JOURNAL = "cursor/journal/journal.py"
_PLANNER = "cursor/persist/planner.py"
_STORES = "cursor/stores"
_REPLAY = "tests/model/analysis/replay/test_replay.py::test_a_story_tells_of_a_planted_bug"

MUTANTS = (
    Mutant(
        "J6", _JOURNAL,
        "ledger_id, self._open_ledger = self._open_ledger, None", "ledger_id = self._open_ledger",
        "A ledger is appended to again after an append of unknown outcome: the cursor becomes unreadable.",
        (f"{_CURSOR}/test_fallback.py", f"{_MODEL}/test_managed_model.py"), "L0",
    ),
    Mutant(
        "A3", "cursor/state/unpersisted_acks.py",
        "self.covered.update(self.in_flight.take_at_most(mark_delete))", "self.in_flight.take_at_most(mark_delete)",
        "A failed persist forgets acks that the mark-delete covered meanwhile: a receipt lies.",
        (f"{_CURSOR}/test_phases.py", f"{_MODEL}/test_managed_model.py"), "L0",
    ),
    Mutant(
        "K1", f"{_STORES}/kernel_directory.py", "        sync_path(self._path)\n", "        pass\n",
        "Names in a directory are lost at a power cut.",
        ("tests/system/analysis/crash/test_system_calls.py",), "L2",
    ),
    Mutant(
        "S3", f"{_STORES}/kernel_directory.py",
        "                sync_names_above(self._path)\n", "                pass\n",
        "Names of the directories above a store are lost at a power cut.",
        ("tests/system/analysis/crash/test_system_calls.py",), "L2",
    ),
    Mutant(
        "A6", "ackstate/deleted_ranges.py", "range_first_bytes(last + 1)\n", "range_first_bytes(last)\n",
        "The record bytes of a range that is cut are wrong at entries 127 and 16,383.",
        ("tests/unit/ackstate/test_deleted_ranges.py", "tests/model/ackstate/test_deleted_ranges_model.py"),
    ),
    Mutant(
        "P8", _PLANNER, "            self._ledger_begun_ms = now_ms\n", "            pass\n",
        "After the roll-over time each persist writes a whole snapshot.",
        (f"{_CURSOR}/test_managed.py",), "L0",
    ),
    Mutant(
        "J2", _JOURNAL,
        "self.snapshot_bytes, self.delta_bytes = len(encoded), 0", "self.snapshot_bytes = len(encoded)",
        "After the first compaction nearly each persist writes a whole snapshot.",
        (f"{_CURSOR}/test_managed.py",), "L0",
    ),
    Mutant(
        "P6", _PLANNER,
        "0 < self._retry_at_ms - now_ms <= _RETRY_MS_MAX", "now_ms < self._retry_at_ms",
        "A clock that went back does not end the pause: persists stay in the metadata store.",
        (f"{_CURSOR}/test_fallback.py", f"{_CURSOR}/test_pace.py", f"{_CURSOR}/test_managed.py"), "L0",
    ),
    Mutant(
        "R2", "cursor/journal/recovery.py", " or bool(snapshot.batch)", "",
        "An orphan journal of batch acks alone is not looked for: the cursor opens as new.",
        (f"{_CURSOR}/test_managed.py",),
    ),
    Mutant(
        "G2", "limits/broker.py", "gone = self._counted + self._promised\n", "gone = self._counted\n",
        "A promise is kept when a gate closes: the broker's total stays above 0.",
        ("tests/unit/limits", "tests/model/limits"),
    ),
    Mutant(
        "Z1", f"{_STORES}/zookeeper_metadata.py",
        "    if found_version != version:\n", "    if found is None != version:\n",
        "Versions of values in ZooKeeper are not compared.",
        ("tests/system/cursor/test_store_conformance.py", f"{_MODEL}/test_store_model.py"),
    ),
    Mutant(
        "Z2", f"{_STORES}/zookeeper_ledgers.py", "state._replace(status=LedgerStatus.FENCED)", "state",
        "A fence in ZooKeeper is not set.",
        ("tests/system/cursor/test_store_conformance.py", f"{_MODEL}/test_store_model.py"),
    ),
    Mutant(
        "Y1", "analysis/replay/cursor_replay.py",
        "            if self._cursor.view.is_persist_due(now_ms=at_ms):\n                return at_ms\n", "",
        "The replay looks at young acks only once.",
        (_REPLAY,),
    ),
    Mutant(
        "Y2", "analysis/replay/persist_ticks.py",
        "        self._waiting.clear()\n        self._flush_at = self.tick_at(at_ms + self._flush_ms)\n",
        "        self._waiting.clear()\n",
        "In the replay the old flush interval continues after a reset.",
        ("tests/unit/analysis/replay/test_persist_ticks.py",),
    ),
    Mutant(
        "D1", "delay/calendar.py",
        "min(self._fresh_first_ms, int(due_ms.min()))", "int(due_ms.min())",
        "Delayed messages are handed out late: a later one hides the first.",
        ("tests/unit/delay/test_calendar.py", "tests/model/delay/test_calendar_model.py"),
    ),
    Mutant(
        "F1", f"{_STORES}/file_log.py",
        "return bool(google_crc32c.value(data[:_HEADER_CHECKED]) == HEADER.unpack_from(data)[-1])", "return True",
        "Damage before a valid record of a file store passes as a torn tail, or the other way round.",
        (f"{_CURSOR}/test_file_store_damage.py", f"{_CURSOR}/test_file_store_reading.py"), "L5",
    ),
)  # fmt: skip
