"""In Pulsar's format the cursor behaves like that of managed-ledger 5.0.0-M1, in every recorded case.

After each operation ours must equal `Model`, a plain account of its promises, and the recording. Where the two differ a
`Deviation` must have its reason there; then ours goes on from the recorded state, so that every operation is compared.
K8 and the like are numbers of Pulsar's known defects, which are not copied; K5, a limit that keeps one range too many,
is of 4.2.4 and not in this recording.

Fields: `config` (`batchIndex`, `longArray`, limits); `declared`, ledgers before the first open; `injectedEmpty`, empty
ledgers put back after it; of each op `r` ("ok", a value, or `{"err", "msg"}`), `ledgers` and `lac` of the log
afterwards, and `s`, the state: `md`, `rp`, `pmd` (persisted mark-delete), `ind`, `backlog`, `entries`, `batch`,
`props`. `closeReopen` may have an ack between closing and opening.
"""

import gzip
import json
import re
from collections import Counter
from enum import Enum
from pathlib import Path

import pytest

from ackstate import (
    CursorClosedError,
    CursorConfig,
    DeletedRanges,
    Format,
    InvalidPositionError,
    LedgerMap,
    ManagedCursor,
    MemoryStore,
    Position,
)
from ackstate.wire.pulsar import LimitRule, Limits, RangeForm, limit_ranges

VECTORS = Path(__file__).parents[2] / "vectors" / "cursor.jsonl.gz"
RANGE = re.compile(r"\((\d+):(-?\d+)\.\.\d+:(\d+)\]")


class CursorDeviation(Enum):
    """Why a recording may differ from ours."""

    HALF_APPLIED = "K8: Pulsar refuses a call and keeps a part of it in memory; ours keeps nothing of it"
    NEVER_HAD = "K9: Pulsar takes positions that the log never had; ours refuses them and has none in its state"
    BELOW = "Pulsar refuses a position beyond the last entry, though the mark-delete is past it; ours takes it as acked"
    LATE = "Pulsar forgets batches at or below the mark-delete only at a later write; ours at once"
    UNACKED = "a cumulative ack of a batch replaces the words in Pulsar; in ours acked messages stay acked"
    ENTRY_LIMIT = "K1: in words Pulsar's limit counts entries and keeps whole ledgers; ours keeps the lowest ranges"
    LONE_BATCH = "K2: Pulsar does not write a batch ack while no range is there; ours does"
    METADATA_BATCH = "K4: Pulsar does not read batches back from the metadata record; ours does"
    COMPLETED = "of a batch whose last ack is over the limit Pulsar loses the acks before it, too; ours keeps them"
    RESET = "K7: the record of a reset has the acks from before it in Pulsar; in ours it has none"


ON_REOPEN = {
    CursorDeviation.HALF_APPLIED: {"md", "rp", "ind", "backlog", "batch"},
    CursorDeviation.ENTRY_LIMIT: {"md", "rp", "ind", "backlog"},
    CursorDeviation.LONE_BATCH: {"batch"},
    CursorDeviation.METADATA_BATCH: {"batch"},
    CursorDeviation.COMPLETED: {"batch"},
    CursorDeviation.RESET: {"ind", "backlog", "batch"},
}


CALLS = {"delete": "delete", "markDelete": "mark_delete", "read": "read", "skip": "skip", "rewind": "rewind",
         "resetCursor": "reset"}  # fmt: skip


def recorded():
    with gzip.open(VECTORS, "rt") as lines:
        return list(map(json.loads, lines))


def mask_of(words):
    return sum((word % 2**64) << 64 * index for index, word in enumerate(words))


def words_of(mask):
    """The words of 64 bits, signed, as Pulsar's `BitSet` gives them."""
    count = -(-mask.bit_length() // 64)
    return [int.from_bytes((mask >> 64 * i & 2**64 - 1).to_bytes(8), signed=True) for i in range(count)]


def entries_of(text):
    return {
        Position(int(ledger), entry)
        for ledger, lower, upper in RANGE.findall(text)
        for entry in range(int(lower) + 1, int(upper) + 1)
    }


def ranges_of(text):
    ranges = DeletedRanges()
    for position in entries_of(text):
        ranges.add(position)
    return ranges


def observed(state):
    """The compared part of a recorded state; words end with one that is not 0."""
    batch = state["batch"]
    if batch is not None:
        batch = {text: words_of(mask_of(words)) for text, words in batch.items()}
    return {**{name: state[name] for name in ("md", "rp", "ind", "backlog")}, "batch": batch,
            "props": state.get("props", {})}  # fmt: skip


class EnumeratedCursor:
    """The expected state of ours: sets of entries, all rules by enumeration."""

    def __init__(self, log, state):
        """Begin with a recorded state, without the parts that ours never holds: see NEVER_HAD, HALF_APPLIED and
        LATE."""
        self.log, self.has_batches, self.props = log, state["batch"] is not None, state["props"]
        self.acked, batch = entries_of(state["ind"]), state["batch"] or {}
        self.acked &= set(self.written())
        self.completed = {}  # batches as they were before their last ack, while that is excluded from the durable state
        self.batch = {p: mask_of(words) for text, words in batch.items() if (p := Position.parse(text)) in log}
        ledger_id, entry_id = state["md"]
        self.md, self.rp = Position(ledger_id, min(entry_id, log.entry_count(ledger_id) - 1)), Position(*state["rp"])
        self.settle()

    def written(self):
        return [Position(ledger_id, entry_id) for ledger_id, n in self.log.counts().items() for entry_id in range(n)]

    def settle(self):
        """Move the mark-delete over the acks that follow it, and forget those."""
        while (following := self.log.next_valid(self.md)) in self.acked:
            self.md = following
        self.acked = {position for position in self.acked if position > self.md}
        self.batch = {p: mask for p, mask in self.batch.items() if p > self.md and p not in self.acked}
        self.rp = self.rp if self.rp > self.md else self.log.next_valid(self.md)

    def has(self, position):
        return position <= self.md or position in self.acked

    def observed(self):
        batch = {str(position): words_of(self.batch[position]) for position in sorted(self.batch)}
        return {"md": list(self.md), "rp": list(self.rp), "ind": self.text(), "backlog": self.backlog(),
                "batch": batch if self.has_batches else None, "props": self.props}  # fmt: skip

    def text(self):
        firsts = [p for p in sorted(self.acked) if (p[0], p[1] - 1) not in self.acked]
        lasts = [p for p in sorted(self.acked) if (p[0], p[1] + 1) not in self.acked]
        return "[" + ",".join(f"({p[0]}:{p[1] - 1}..{q[0]}:{q[1]}]" for p, q in zip(firsts, lasts, strict=True)) + "]"

    def backlog(self):
        return sum(not self.has(position) for position in self.written())

    def refuses(self, op):
        name, *args = op
        if name == "delete":
            return any(not self.has(p) and p not in self.log for p in (Position(*each[:2]) for each in args[0]))
        if name != "markDelete":
            return False
        position, words = Position(*args[0][:2]), args[0][2] if len(args[0]) > 2 else ()
        if any(words):
            return position <= self.md or position not in self.log
        is_start = position.entry_id == -1 and self.log.has_ledger(position.ledger_id)
        return position < self.md or not (is_start or position == self.md or position in self.log)

    def ack(self, position, words):
        unacked = self.batch.get(position, -1) & mask_of(words)
        if self.has(position) or (any(words) and not self.has_batches):
            return
        if unacked:
            self.batch[position] = unacked
            return
        self.acked.add(position)
        if position in self.batch:
            self.completed[position] = self.batch.pop(position)

    def delete(self, positions):
        for ledger_id, entry_id, *words in positions:
            self.ack(Position(ledger_id, entry_id), words[0] if words else ())
        self.settle()

    def mark_delete(self, position, props):
        position, words = Position(*position[:2]), position[2] if len(position) > 2 else ()
        self.props = props or {}
        if any(words):
            self.ack(position, words)
            position = max(self.log.previous(position), self.md)
        self.md = position
        self.settle()

    def read(self, count):
        found = []
        for position in self.written():
            if position >= self.rp and len(found) < count:
                found += [] if position in self.acked else [list(position)]
                self.rp = Position(position.ledger_id, position.entry_id + 1)
        return found

    def skip(self, count, mode):
        above = [p for p in self.written() if p > self.md and (mode == "Include" or p not in self.acked)]
        self.mark_delete([self.md, *above][min(count, len(above))], None)

    def rewind(self):
        self.rp = self.log.next_valid(self.md)

    def reset(self, position):
        self.rp = self.log.next_valid(Position(position[0], position[1] - 1))
        self.md, self.acked, self.batch, self.props = self.log.previous(self.rp), set(), {}, {}
        self.completed = {}

    def cut(self, config, *, is_closed=False):
        """The acked entries that a persist leaves out; a closed cursor with few ranges holds them as a list."""
        range_count_max = config.range_count_max
        firsts = [p for p in sorted(self.acked) if (p[0], p[1] - 1) not in self.acked]
        is_list = config.range_form is RangeForm.LIST or (is_closed and len(firsts) <= config.closing_range_count_max)
        if config.range_limit_rule is not LimitRule.EXACT and not is_list:
            below = Counter({p: sum(other[0] < p[0] for other in self.acked) for p in self.acked})
            return {position for position in self.acked if below[position] > range_count_max}
        limit = firsts[range_count_max] if range_count_max < len(firsts) else None
        return {position for position in self.acked if limit is not None and position >= limit}

    def persist(self, config):
        cut = self.cut(config)
        self.completed = {position: mask for position, mask in self.completed.items() if position in cut}

    def reopen(self, log, config, *, is_closed):
        """The acks that the last persist made durable, on the log as it is then."""
        self.log = log
        self.acked -= self.cut(config, is_closed=is_closed)
        self.batch = dict(sorted((self.batch | self.completed).items())[: config.batch_count_max])
        following = min((each for each in log if each > self.md.ledger_id), default=None)
        is_gone = self.md.entry_id < 0 and not log.has_ledger(self.md.ledger_id)
        is_at_end = 0 <= self.md.entry_id == log.entry_count(self.md.ledger_id) - 1
        self.md = Position(following, -1) if following is not None and (is_gone or is_at_end) else self.md
        self.completed = {}
        self.settle()
        self.rewind()


class CursorVectorReplay:
    """One recorded case, on a cursor of ours."""

    def __init__(self, case, rule=LimitRule.EXACT):
        limits = case["config"]
        self.rule = Limits(limits["maxUnackedRangesToPersist"], rule=LimitRule.PULSAR_5_0_M1)
        self.config = CursorConfig(
            format=Format.PULSAR,
            range_form=RangeForm.WORDS if limits["longArray"] else RangeForm.LIST,
            batch_index_acks=limits["batchIndex"],
            range_count_max=limits["maxUnackedRangesToPersist"],
            range_limit_rule=rule,
            metadata_range_count_max=limits["maxUnackedRangesToPersistInMetadataStore"],
            batch_count_max=limits["maxBatchDeletedIndexToPersist"],
        )
        self.case, self.counts = case, Counter()
        self.unwritten = set()  # why Pulsar's durable state is not its state in memory
        self.before = observed(case["init"])

    def play(self):
        counts = dict(self.case["ledgers"])
        # Empty ledgers were put back after the first open.
        injected = self.case.get("injectedEmpty", ())
        self.log, self.store = (
            LedgerMap.from_counts({i: n for i, n in counts.items() if i not in injected}),
            MemoryStore(),
        )
        self.open()
        assert self.observed() == self.before
        self.begin(LedgerMap.from_counts(counts), self.before)
        for number, op in enumerate(self.case["ops"]):
            self.where = f"case {self.case['id']}, operation {number}: {op['op']}"
            self.step(op, observed(op["s"]))
        return self.counts

    def open(self):
        self.cursor = ManagedCursor.open(
            self.store, topic="t", subscription="s", ledgers=self.log, config=self.config, now_ms=0
        )

    def begin(self, log, state):
        """Go on from a recorded state, by calls that lead to it."""
        self.log, self.model, self.store = log, EnumeratedCursor(log, state), MemoryStore()
        self.open()
        model = self.model
        self.cursor.mark_delete(model.md, properties=model.props, now_ms=0)
        self.cursor.ack_many(sorted(model.acked), now_ms=0)
        for position, mask in model.batch.items():
            self.cursor.ack_batch(position, words_of(mask), now_ms=0)
        self.cursor.persist(now_ms=0)
        self.cursor.reader.rewind(model.rp)
        assert self.observed() == model.observed()

    def observed(self):
        cursor = self.cursor
        cursor._check()
        batch = {str(position): list(words) for position, words in cursor.view.batch.items()}
        return {"md": list(cursor.mark_delete_position), "rp": list(cursor.read_position), "ind": str(cursor.deleted),
                "backlog": cursor.backlog, "batch": batch if self.config.batch_index_acks else None,
                "props": dict(cursor.view.properties)}  # fmt: skip

    def step(self, op, after):
        (name, *args), was_refused = op["op"], isinstance(op["r"], dict)
        is_refused, tainted = self.model.refuses(op["op"]), self.taint(self.before)
        allowed = self.called(name, args, is_refused, was_refused) if name in CALLS else self.reopened(name)
        if name not in CALLS:
            answer = expected = None
            self.change_log(name, args, dict(op["ledgers"]))
        else:
            expected = "refused" if is_refused else getattr(self.model, CALLS[name])(*args)
            self.model.persist(self.config)
            try:
                answer = getattr(self, CALLS[name])(*args)
            except InvalidPositionError:
                answer = "refused"
            self.cursor.persist(now_ms=0)
        assert answer == expected, self.where
        assert self.observed() == self.model.observed(), self.where
        self.note_unwritten(name, after, was_refused)
        was = "refused" if was_refused else None if op["r"] == "ok" else op["r"]
        self.compare(after, allowed, tainted, is_same_answer=answer == was, is_call=name in CALLS)
        self.before = after

    def compare(self, after, allowed, tainted, *, is_same_answer, is_call):
        ours = self.observed()
        differing = {name for name, value in ours.items() if value != after[name]}
        if not differing and is_same_answer:
            self.counts["equal"] += 1
            return
        reasons = {why for why, names in allowed.items() if differing <= names}
        # A position that the log never had takes the place of another within a limit, and may come to exist.
        has_effect = CursorDeviation.NEVER_HAD in tainted and not is_call
        if not reasons and (has_effect or EnumeratedCursor(self.log, after).observed() == ours):
            reasons = tainted | self.taint(after)
        assert reasons, f"{self.where}: {differing} of {ours} differ from {after}"
        self.counts.update(reasons)
        self.begin(self.log, after)

    def change_log(self, name, args, counts):
        if name == "addEntries":
            for ledger_id, count in counts.items():
                if not self.log.has_ledger(ledger_id):
                    self.log.roll(ledger_id)
                if ledger_id == self.log.current_ledger_id:
                    self.log.append(count - self.log.entry_count(ledger_id))
            assert self.log.counts() == counts
            return
        if name == "closeReopen":
            self.cursor.close(now_ms=0)
            if args[0] is not None:
                with pytest.raises(CursorClosedError):
                    self.cursor.ack(Position(*args[0][:2]), now_ms=0)
        self.log, self.store = LedgerMap.from_counts(counts), MemoryStore(self.store.disk)
        self.model.reopen(self.log, self.config, is_closed=name == "closeReopen")
        self.open()

    def delete(self, positions):
        for ledger_id, entry_id, *_ in positions:
            if not self.cursor.is_acked(Position(ledger_id, entry_id)):
                self.log.check_written(Position(ledger_id, entry_id))
        for ledger_id, entry_id, *words in positions:
            self.cursor.ack_batch(Position(ledger_id, entry_id), words[0] if words else (), now_ms=0)

    def mark_delete(self, position, props):
        words = position[2] if len(position) > 2 else ()
        self.cursor.mark_delete(Position(*position[:2]), unacked_words=words, properties=props or {}, now_ms=0)

    def read(self, count):
        return list(map(list, self.cursor.reader.read(count)))

    def skip(self, count, mode):
        self.cursor.skip(count, counts_acked=mode == "Include", properties={}, now_ms=0)

    def rewind(self):
        self.cursor.reader.rewind()

    def reset(self, position):
        self.cursor.reset(Position(*position), now_ms=0)

    def taint(self, state):
        """The parts of a recorded state that ours never has."""
        md, acked, found = Position(*state["md"]), entries_of(state["ind"]), set()
        batches = set(map(Position.parse, state["batch"] or ()))
        named = acked | batches | ({md} if md.entry_id >= 0 else set())
        if any(position not in self.log for position in named) or Position(*state["rp"]) <= md:
            found.add(CursorDeviation.NEVER_HAD)
        if self.log.next_valid(md) in acked:
            found.add(CursorDeviation.HALF_APPLIED)
        if any(position <= md or position in acked for position in batches):
            found.add(CursorDeviation.LATE)
        return found

    def called(self, name, args, is_refused, was_refused):
        """The deviations that a call may show, each with the differences that it allows."""
        everything = set(self.before)
        if is_refused:
            return {CursorDeviation.HALF_APPLIED if was_refused else CursorDeviation.NEVER_HAD: everything}
        if was_refused:
            beyond = name == "delete" and any(Position(*each[:2]) > self.log.last_confirmed for each in args[0])
            return {CursorDeviation.BELOW: everything} if beyond else {}
        if name == "markDelete" and Position(*args[0][:2]) in self.model.batch:
            return {CursorDeviation.UNACKED: {"batch"}}
        return {}

    def reopened(self, name):
        """The same for a crash or a close, and the state that is read back after it."""
        if name == "addEntries":
            return {}
        reasons = set(self.unwritten)
        held = ranges_of(self.before["ind"])
        kept = limit_ranges(held, form=self.config.range_form, limits=self.rule).kept
        is_exact = self.config.range_limit_rule is LimitRule.EXACT
        if (
            is_exact
            and kept != limit_ranges(held, form=self.config.range_form, limits=Limits(self.config.range_count_max)).kept
        ):
            reasons.add(CursorDeviation.ENTRY_LIMIT)
        if name == "closeReopen" and self.model.batch:
            reasons.add(CursorDeviation.METADATA_BATCH)
        if self.model.completed:
            reasons.add(CursorDeviation.COMPLETED)
        together = set().union(*(ON_REOPEN[each] for each in reasons))
        return dict.fromkeys(reasons, together)

    def note_unwritten(self, name, after, was_refused):
        is_changed, has_ranges = after != self.before, {after["ind"], self.before["ind"]} != {"[]"}
        if "Reopen" in name:
            self.unwritten = set()
        elif was_refused:
            self.unwritten |= {CursorDeviation.HALF_APPLIED} if is_changed else set()
        elif name == "resetCursor":
            self.unwritten = {CursorDeviation.RESET} if has_ranges or self.before["batch"] else set()
        elif name in {"markDelete", "skip"} or (name == "delete" and (has_ranges or after["md"] != self.before["md"])):
            self.unwritten = set()
        elif name == "delete" and is_changed:
            self.unwritten.add(CursorDeviation.LONE_BATCH)


def replay_all(rule=LimitRule.EXACT):
    counts = Counter()
    for case in recorded():
        counts += CursorVectorReplay(case, rule).play()
    return counts


@pytest.mark.slow
def test_every_recorded_operation_is_ours_but_for_named_deviations():
    counts = replay_all()
    print(*(f"{count} {why if why == 'equal' else why.name}" for why, count in counts.most_common()), sep=", ")  # noqa: T201
    assert set(counts) == {"equal", *CursorDeviation}


@pytest.mark.slow
def test_with_pulsars_rule_the_limit_is_no_deviation():
    counts = replay_all(LimitRule.PULSAR_5_0_M1)
    assert set(counts) == {"equal", *CursorDeviation} - {CursorDeviation.ENTRY_LIMIT}
