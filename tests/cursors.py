"""Stories of one cursor, told as words."""

import re

from ackstate import CursorConfig, Format, LedgerMap, ManagedCursor, MemoryStore, Position
from ackstate.cursor import ReceiptStatus
from ackstate.cursor.recovery import Recovery
from ackstate.selection import Keep
from ackstate.stores.memory import Fault, FaultKind
from topics import Storyteller

ENTRY = re.compile(r"(?:\d+:)?-?\d+")
_VALUES = {"none": None, **Format.__members__, **Keep.__members__}


def settings_of(words):
    """Return the settings that some words like `keep=WIDEST` give."""
    pairs = (word.split("=") for word in words if "=" in word)
    return {name: _VALUES[value] if value in _VALUES else int(value) for name, value in pairs}


class StoryCursor(Storyteller):
    """A cursor whose steps are words: `begin 3*10 6*10 flush_interval_ms=0; ack 5 6:2; persist -> DELTA 2; disk -> 5`.

    Entries have no ledger if it is the first one, and receipts are named by the first entry that they are of.
    """

    def __init__(self, counts, **settings):
        self.counts, self.settings, self.now_ms, self.record = counts, settings, 0, None
        self.do("begin", ())

    def open(self):
        config = CursorConfig(**self.settings)
        return ManagedCursor.open(
            self.store, topic="t", subscription="s", ledgers=self.log, config=config, now_ms=self.now_ms
        )

    def check(self):
        self.cursor._check()

    def position(self, word):
        ledger, _, entry = word.rpartition(":")
        return Position(int(ledger or self.first), int(entry))

    def name(self, position):
        return str(position).removeprefix(f"{self.first}:")

    def ranges(self, deleted):
        runs = [(self.name(Position(ledger, first)), first, end) for ledger, first, end in deleted.runs()]
        return " ".join(name if end == first + 1 else f"{name}-{end - 1}" for name, first, end in runs)

    def given(self, word, receipt):
        assert receipt.status is ReceiptStatus.ACCEPTED
        self.receipts.append((word, receipt))
        return receipt.newly_acked

    def do(self, verb, words):  # noqa: PLR0911, PLR0912, PLR0915 - one case a verb
        now, positions = {"now_ms": self.now_ms}, [self.position(word) for word in words if ENTRY.fullmatch(word)]
        match verb:
            case "begin":  # another story, with these ledgers
                self.counts = dict(map(int, word.split("*")) for word in words if "*" in word) or self.counts
                self.settings, self.store = self.settings | settings_of(words), MemoryStore()
                self.log, self.first = LedgerMap.from_counts(self.counts), next(iter(self.counts))
                self.cursor, self.receipts, self.begun = self.open(), [], self.store.mutation_count
            case "at":
                self.now_ms = int(words[0])
            case "ack":
                given = zip(words, (self.cursor.ack(each, **now) for each in positions), strict=True)
                return str(sum(self.given(*each) for each in given))
            case "entries":  # at once, of one ledger
                entries = [each.entry_id for each in positions]
                return str(self.given(words[0], self.cursor.ack_entries(positions[0].ledger_id, entries, **now)))
            case "batch":
                return str(self.given(words[0], self.cursor.ack_batch(positions[0], [int(words[1], 2)], **now)))
            case "upto":
                more = {"properties": settings_of(words)} if "=" in words[-1] else {}
                more |= {"unacked_words": [int(words[1], 2)]} if words[-1].startswith("0b") else {}
                return str(self.given(words[0], self.cursor.mark_delete(positions[0], **more, **now)))
            case "lost":
                return str(self.cursor.mark_lost(*positions, **now).newly_acked)
            case "delivered":
                self.cursor.delivered(positions[0], **now)
            case "persist" | "tick" | "close" | "promote" | "reset":
                more = {"promote": (0,), "reset": positions}.get(verb, ())
                result = getattr(self.cursor, verb)(*more, **now)
                self.written = result and result.bytes_written
                if result is None:
                    return ""
                counts = {"cut": result.messages_cut, "held": result.messages_held_back, "batches": result.batches_cut}
                told = [f"{name} {count}" for name, count in counts.items() if count]
                return " ".join([result.route.name, str(result.messages_covered), *told])
            case "durable":
                return " ".join(word for word, receipt in self.receipts if self.cursor.durable(receipt))
            case "marked":
                return self.name(self.cursor.mark_delete_position)
            case "persisted":
                return self.name(self.cursor.persisted_mark_delete_position)
            case "reads":  # from there
                return self.name(self.cursor.read_position)
            case "read":
                return " ".join(map(self.name, self.cursor.reader.read(int(words[0]))))
            case "acked":
                return " ".join(self.name(each) for each in positions if self.cursor.is_acked(each))
            case "ranges":
                return self.ranges(self.cursor.deleted)
            case "disk":  # the ranges that a crash now would leave; the store is not touched
                found = Recovery(MemoryStore(self.store.disk), "/managed-ledgers/t/s", self.log).find([])
                return self.ranges(found.recovered.content.deleted)
            case "batches":
                batches = sorted(self.cursor.view.batch.items())
                return " ".join(f"{self.name(each)}={' '.join(map(bin, left))}" for each, left in batches)
            case "backlog":
                return str(self.cursor.backlog)
            case "gauge":
                return str(self.cursor.redelivery_if_crashed)
            case "stat":
                return " ".join(str(getattr(self.cursor.stats(), word)) for word in words)
            case "report":
                report = self.cursor.recovery_report
                read = f"{report.records_replayed} records, {report.range_count} ranges"
                return f"{report.source.name} {self.name(report.mark_delete)} of {read}, less {report.bytes_discarded}"
            case "due":
                return "yes" if self.cursor.view.is_persist_due(**now) else "no"
            case "dirty":
                return "yes" if self.cursor.view.is_dirty else "no"
            case "ticks":  # next
                return str(self.cursor.view.next_tick_ms)
            case "wrote":  # so many bytes, the last persist
                return str(self.written)
            case "unpersisted":
                return str(self.cursor.view.unpersisted_record_bytes)
            case "record":  # since it was last asked
                before, self.record = self.record, self.store.disk.values.get("/managed-ledgers/t/s")
                return "same" if before == self.record else "new"
            case "owners":
                return " ".join(self.store.ledgers.owners())
            case "writes":  # since it was last asked
                before, self.begun = self.begun, self.store.mutation_count
                return str(self.begun - before)
            case "broken":
                self.store.break_ledgers()
            case "mended":
                self.store.mend_ledgers()
            case "works":
                self.store.forget_faults()
            case "fault":  # of some writes
                for ahead in range(int(words[1]) if words[1:] else 1):
                    self.store.inject(Fault(self.store.mutation_count + ahead, FaultKind[words[0]]))
            case "crash":  # and open another, with some settings
                self.settings, self.store = self.settings | settings_of(words), MemoryStore(self.store.disk)
                self.cursor, self.receipts, self.begun = self.open(), [], self.store.mutation_count
            case "rival":  # takes over, with a store of its own
                store, self.store = self.store, MemoryStore(self.store.disk)
                self.older, self.cursor, self.store = self.cursor, self.open(), store
            case "older":  # does something, the one that was taken over
                newer, self.cursor = self.cursor, self.older
                try:
                    return self.do(words[0], words[1:])
                finally:
                    self.cursor = newer
            case "trim":
                self.log.trim(int(words[0]))
            case "roll":
                self.log.roll(int(words[0]))
            case "append":
                self.log.append()
            case _:
                raise ValueError(verb)
        return ""
