"""The redelivery lies within the bounds: for real brokers that were killed, and for a model that knows the truth."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from pyroaring import BitMap

from ackstate.analysis.pulsar import bounds
from ackstate.analysis.pulsar.bounds import comes_back, most_within_bytes
from ackstate.analysis.pulsar.broker_settings import BrokerSettings, broker_settings
from ackstate.analysis.pulsar.cursor_look import CursorLook
from ackstate.analysis.pulsar.internal_stats import CursorInternals, TopicInternals, TopicStats, acked, read_object
from ackstate.analysis.pulsar.judgement import Looks, judge
from ackstate.analysis.pulsar.sources import RecordedAnswers, TopicAnswers
from ackstate.deleted_ranges import DeletedRanges
from ackstate.position import Position
from ackstate.wire.pulsar import LimitRule, PositionInfo, RangeForm, encode_position_info, limit_ranges

VECTORS = Path(__file__).parents[3] / "vectors" / "internal-stats"
KILLED = ["flush60-alternate-small", "smoke-alternate"]
CLOSED = "graceful-alternate-small"


def ranges(*runs, ledger_id=3):
    found = DeletedRanges()
    for first, end in runs:
        found.add_run(ledger_id, first, end)
    return found


def size_of(deleted, form):
    """Bytes of the ranges as Pulsar counts them, by the encoder: without the tag and length of each element."""
    written = len(encode_position_info(PositionInfo(Position(0, 0), deleted), form=form))
    empty = len(encode_position_info(PositionInfo(Position(0, 0))))
    if form is RangeForm.LIST:
        return written - empty - 2 * deleted.range_count
    framed = written - empty
    sizes = [each - empty for each in _words_alone(deleted)]
    return framed - sum(2 if size < 130 else 3 for size in sizes)


def _words_alone(deleted):
    for ledger_id, bitmap in deleted.bitmaps():
        alone = DeletedRanges.from_bitmaps([(ledger_id, bitmap.copy())])
        yield len(encode_position_info(PositionInfo(Position(0, 0), alone)))


# --- Real brokers


def judged(name, source=None):
    source = source or RecordedAnswers([VECTORS])
    (found,) = judge(name, Looks(source.read(name)), source.settings(name))
    return found


def measured(name):
    """Acked entries that the restarted broker did not know."""
    before = judged(name).look
    after = judged(f"after-restart-{name}").look
    lost = before.deleted.copy()
    lost.difference_update(after.deleted)
    assert before.mark_delete == after.mark_delete
    return len(lost)


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_broker_redelivers_within_the_bounds(name):
    back = judged(name).comes_back
    assert back.low.entries <= measured(name) <= back.high.entries


def test_the_size_of_the_last_record_says_what_it_cannot_have_held():
    assert measured("smoke-alternate") == 27
    assert judged("smoke-alternate").comes_back.low == (
        27,
        "the last record held ranges of 6 bytes, and no more fit in",
    )


def test_a_broker_that_closes_in_good_order_redelivers_what_is_said_of_unloading():
    found = judged(CLOSED)
    assert measured(CLOSED) == found.if_unloaded == 0
    # Killed, it had brought back some: the last record was too small for all.
    assert found.comes_back.low.entries == 3


@pytest.mark.parametrize("name", [*KILLED, CLOSED])
def test_the_record_that_would_hold_all_has_the_size_that_brokers_tell(name):
    """Where all was written, our encoder and the broker agree on its bytes; else it is more."""
    found = judged(name)
    ours = size_of(found.look.deleted, RangeForm.WORDS)
    assert (ours == found.look.laid_out_bytes) == (name == "flush60-alternate-small")
    assert ours >= found.look.laid_out_bytes


def memory_at_the_kill(run):
    """The broker's state in memory, from the commands that it got: counts, mark-delete, ranges."""
    positions = [Position(ledger, entry) for ledger, first, last in run["entries"] for entry in range(first, last + 1)]
    left, done = {}, set()
    is_by_index = run["config"].get("acknowledgmentAtBatchIndexLevelEnabled") != "false"
    for entry in chain.from_iterable(entries for _, _, entries in run["broker_acks_ms"]):
        if isinstance(entry, int):
            done.add(entry)
        elif is_by_index:
            index, words = entry
            left[index] = [before & now for before, now in zip(left.get(index, [-1] * len(words)), words, strict=True)]
            done |= set() if any(left[index]) else {index}
    below = next((index for index in range(len(positions)) if index not in done), len(positions))
    held = DeletedRanges()
    for index in sorted(done):
        if index >= below:
            held.add(positions[index])
    mark_delete = positions[below - 1] if below else Position(positions[0].ledger_id, -1)
    return {ledger: last + 1 for ledger, _, last in run["entries"]}, mark_delete, held


def recorded_runs():
    with gzip.open(VECTORS.parent / "broker-redelivery.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("run", recorded_runs(), ids=lambda run: run["topic"])
def test_a_recorded_run_redelivers_within_the_bounds(run):
    counts, mark_delete, held = memory_at_the_kill(run)
    before, after = run["memory_before"], run["durable_after"]
    assert (str(mark_delete), held.range_count) == (before["markDelete"], before["ranges"])
    look = CursorLook(counts, mark_delete, held, cursor_ledger=before["cursorLedger"], last_entry=before["lastEntry"])
    settings = broker_settings({name: str(value) for name, value in run["config"].items()}, run["pulsar"])
    back = comes_back(look, settings)
    durable = durable_ranges(after)
    truth = look.advanced_since(CursorLook(counts, durable.mark_delete, durable.deleted))
    lost = held.copy()
    lost.difference_update(durable.deleted)
    durable.deleted.difference_update(held)
    truth += len(lost) - len(durable.deleted)
    assert back.low.entries <= truth <= back.high.entries
    if run["batch_sizes"] is None:
        assert truth == run["n_redelivered_acked"]
    if (cut := bounds.cut_now(look, settings)) == run["n_redelivered_acked"] > 0:
        assert back.low.entries > cut * 0.4


def durable_ranges(after):
    cursor = CursorInternals.model_validate(
        {
            "markDeletePosition": after["markDelete"],
            "individuallyDeletedMessages": after["individuallyDeleted"],
            "state": "",
        }
    )
    return acked(cursor, {}, what="")


# --- A model that knows the durable acks

FORMS = [
    ("4.0.1", RangeForm.LIST),
    ("4.2.4", RangeForm.WORDS),
    ("5.0.0-M1", RangeForm.LIST),
    ("5.0.1", RangeForm.LIST),
    ("5.0.1", RangeForm.WORDS),
]


class LimitedCursor:
    """A cursor that acks in any order and writes now and then, under limits; at most two writes are under way."""

    def __init__(self, seed, version, form, limit):
        self.random = random.Random(seed)
        self.counts = {3: 90, 5: 40, 8: 90}
        self.settings = BrokerSettings(version=version, form=form, range_count_max=limit)
        self.log = [Position(ledger, entry) for ledger, count in self.counts.items() for entry in range(count)]
        self.index = {position: index for index, position in enumerate(self.log)}
        self.waiting = self.log.copy()
        if self.random.random() < 0.7:
            width = self.random.choice([5, 40, 400])
            self.waiting.sort(key=lambda position: self.index[position] + self.random.randrange(width))
        self.acked = set()
        self.durable = set()  # the acks that the last written record covers
        self.durable_mark = 0
        self.under_way = []
        self.laid_out_bytes = 0
        self.last_entry = -1
        self.write()
        self.finish()

    @property
    def mark_index(self):
        return next((index for index, position in enumerate(self.log) if position not in self.acked), len(self.log))

    def held(self):
        mark_index, above = self.mark_index, DeletedRanges()
        for ledger_id, count in self.counts.items():
            mine = (Position(ledger_id, entry) for entry in range(count))
            above.add_entries(
                ledger_id, [each[1] for each in mine if each in self.acked and self.index[each] > mark_index]
            )
        return above

    def write(self):
        above = self.held()
        kept = limit_ranges(above, form=self.settings.form, limits=self.settings.limits).kept
        in_words = self.settings.form is RangeForm.WORDS and not is_left_empty(above, self.settings)
        self.laid_out_bytes = size_of(kept, RangeForm.WORDS if in_words else RangeForm.LIST) if kept else 0
        covered = {Position(ledger, entry) for ledger, bitmap in kept.bitmaps() for entry in bitmap}
        self.under_way.append(covered | set(self.log[: self.mark_index]))

    def finish(self):
        self.durable = self.under_way.pop(0)
        self.last_entry += 1

    def step(self):
        for _ in range(self.random.choice([0, 1, 3, 20])):
            if self.waiting:
                self.acked.add(self.waiting.pop(0))
        if self.under_way and self.random.random() < 0.6:
            self.finish()
        if len(self.under_way) < 2 and self.random.random() < 0.4:
            self.write()

    def look(self):
        index = self.mark_index
        mark = self.log[index - 1] if index else Position(3, -1)
        return CursorLook(
            self.counts, mark, self.held(), cursor_ledger=7, last_entry=self.last_entry,
            laid_out_bytes=self.laid_out_bytes, is_mark_delete_loaded=not index,
        )  # fmt: skip

    @property
    def comes_back(self):
        return len(self.acked - self.durable)


def is_left_empty(deleted, settings):
    first = next(deleted.bitmaps(), None)
    return settings.rule is LimitRule.PULSAR_5_0 and first is not None and len(first[1]) > settings.range_count_max


def check(seed, *, version, form):
    """Look at a model now and then, and return by how much the bounds are narrower than all or nothing."""
    model = LimitedCursor(seed, version, form, limit=random.Random(seed).choice([3, 20, 60, 1000]))
    earlier, narrowed = None, 0
    for _ in range(14):
        for _ in range(model.random.choice([1, 6])):
            model.step()
        now, truth = model.look(), model.comes_back
        while model.under_way and model.random.random() < 0.9:
            model.finish()
        # Only once nothing is under way does a later look show whether something was.
        later = None if model.under_way else model.look()
        low, high = comes_back(now, model.settings, earlier=earlier, later=later)
        assert low.entries <= truth <= high.entries, (seed, low, truth, high)
        everything = bounds._everything(now).entries
        narrowed += everything - (high.entries - low.entries)
        earlier = now
    return narrowed


@pytest.mark.slow
@pytest.mark.parametrize(("version", "form"), FORMS)
def test_the_truth_of_a_model_lies_within_the_bounds(version, form):
    assert sum(check(seed, version=version, form=form) for seed in range(12)) > 0


def written(held, settings):
    """The acks of a record."""
    return limit_ranges(held, form=settings.form, limits=settings.limits).kept


def test_the_list_form_may_hold_one_range_over_the_limit():
    """4.x keeps a range over the limit in the list form."""
    settings = BrokerSettings(version="4.0.1", form=RangeForm.LIST, range_count_max=1)
    held = ranges((5, 9), (10, 12))
    look = CursorLook({3: 90}, Position(3, 1), held, cursor_ledger=7, last_entry=2)
    truth = len(held) - len(written(held, settings))
    assert comes_back(look, settings).low.entries <= truth == 0


def test_an_earlier_record_may_have_held_a_longer_range():
    """An earlier record may have held a longer range than the lowest of now."""
    settings = BrokerSettings(version="5.0.1", form=RangeForm.LIST, range_count_max=1)
    held = ranges((5, 6), (20, 27))
    look = CursorLook({3: 90}, Position(3, 1), held, cursor_ledger=7, last_entry=2)
    truth = len(held) - len(written(ranges((20, 27)), settings))
    assert comes_back(look, settings).low.entries == truth == 1


# --- Direct stories


def test_nothing_acked_for_longer_than_a_flush_is_all_written():
    settings = BrokerSettings()
    first = CursorLook({3: 90}, Position(3, 1), ranges((5, 9)), cursor_ledger=7, last_entry=2, answered_ms=1_000)
    second = CursorLook({3: 90}, Position(3, 1), ranges((5, 9)), cursor_ledger=7, last_entry=2, asked_ms=63_000)
    assert settings.quiet_seconds == 62
    low, high = comes_back(second, settings, earlier=first)
    assert (low.entries, high.entries) == (0, 0)
    too_soon = CursorLook({3: 90}, Position(3, 1), ranges((5, 9)), cursor_ledger=7, last_entry=2, asked_ms=62_900)
    assert comes_back(too_soon, settings, earlier=first).high.entries == 6


def test_the_first_entry_of_a_cursor_ledger_may_lack_the_ranges():
    first, second = (
        CursorLook({3: 90}, Position(3, 1), ranges((5, 9)), cursor_ledger=8, last_entry=0, asked_ms=at, answered_ms=at)
        for at in (0, 100_000)
    )
    assert comes_back(second, BrokerSettings(), earlier=first).high.entries == 6
    without = [replace(look, deleted=DeletedRanges()) for look in (first, second)]
    assert comes_back(without[1], BrokerSettings(), earlier=without[0]).high.entries == 0


def test_acks_since_an_earlier_look_are_not_durable_if_the_ledger_stands():
    before = CursorLook({3: 90}, Position(3, 1), ranges((5, 9)), cursor_ledger=7, last_entry=2)
    now = CursorLook({3: 90}, Position(3, 3), ranges((5, 9), (11, 14)), cursor_ledger=7, last_entry=2)
    assert comes_back(now, BrokerSettings(), earlier=before).low.entries == 0
    low, _ = comes_back(now, BrokerSettings(), earlier=before, later=now)
    assert low == (5, "the cursor ledger has not grown since the earlier look")


def test_a_seek_between_two_looks_makes_the_earlier_one_useless():
    before = CursorLook({3: 90}, Position(3, 30), ranges((35, 39)), cursor_ledger=7, last_entry=2)
    now = CursorLook({3: 90}, Position(3, 3), ranges(), cursor_ledger=7, last_entry=9)
    assert comes_back(now, BrokerSettings(), earlier=before).high.entries == 4


def test_most_within_bytes_is_all_at_the_size_of_all():
    held = DeletedRanges.from_bitmaps([(3, BitMap(range(1, 300, 2))), (900, BitMap([0, 7, 8, 4000]))])
    for form in RangeForm:
        assert most_within_bytes(held, size_of(held, form), form=form) == len(held)
        assert most_within_bytes(held, 0, form=form) == 0


def test_a_cursor_that_is_no_subscription_and_one_that_is_not_durable():
    cursor = {"markDeletePosition": "3:4", "state": "Open"}
    internals = {"ledgers": [{"ledgerId": 3, "entries": 9}], "cursors": {"pulsar.dedup": cursor, "a+b": cursor}}
    stats = read_object(TopicStats, {"subscriptions": {"a b": {"isDurable": False}}}, what="")
    answers = TopicAnswers(read_object(TopicInternals, internals, what=""), stats)
    reader, dedup = judge("t", Looks(answers), BrokerSettings())
    assert (reader.subscription, reader.comes_back) == ("a b", None)
    assert dedup.comes_back.high.entries == 5
    assert "not a subscription" in dedup.remarks[0]
