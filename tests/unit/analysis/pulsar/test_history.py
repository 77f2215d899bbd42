"""The history of a cursor ledger against plain sets of entries, its limits, and the command that shows it."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate import AckStateError, BatchIndexes, CorruptStateError, DeletedRanges, Position
from ackstate.analysis.pulsar.history import HoleAge, cursor_history
from ackstate.wire.pulsar import CursorInfo, PositionInfo, RangeForm, encode_cursor_info, encode_position_info
from command_line import run
from pulsar_nodes import CURSOR_RECORD, NODE, TOPIC, layout_of, new_nodes

COUNTS = {3: 6, 4: 0, 5: 7, 9: 5}
ENTRIES = [Position(ledger, entry) for ledger, count in COUNTS.items() for entry in range(count)]


def entry_of(mark_delete, acked=(), batches=(), form=RangeForm.WORDS):
    batch = BatchIndexes()
    for position, words in batches:
        batch.ack(Position(*position), words)
    deleted = DeletedRanges(Position(*each) for each in acked)
    return encode_position_info(PositionInfo(Position(*mark_delete), deleted, batch), form=form)


def cluster_of(*entries):
    """A cluster whose topic has one cursor, `s`, with these entries in its ledger."""
    nodes = new_nodes()
    infos = (b"\x08%c\x10%c \x05" % (ledger, count) for ledger, count in COUNTS.items())
    nodes.set(NODE, b"".join(b"\n%c" % len(info) + info for info in infos))
    ledger_id = nodes.store.ledgers.create("cursor of a broker")
    for entry in entries:
        nodes.store.ledgers.append(ledger_id, [entry])
    nodes.set(f"{NODE}/s", encode_cursor_info(CursorInfo(ledger_id, Position(3, -1))))
    return layout_of(nodes)


def history_of(*entries, top=10):
    return cursor_history(cluster_of(*entries), TOPIC, "s", top=top)


@st.composite
def states(draw):
    """A mark-delete position, and acked entries, often those of the state before and some more."""
    found, acked, mark_delete = [], frozenset(), Position(3, -1)
    for _ in range(draw(st.integers(1, 9))):
        if draw(st.integers(0, 3)):
            acked |= draw(st.frozensets(st.sampled_from(ENTRIES), max_size=4))
        else:
            acked = draw(st.frozensets(st.sampled_from(ENTRIES), max_size=8))
        if not draw(st.integers(0, 2)):
            mark_delete = draw(st.sampled_from(ENTRIES))
        found.append((mark_delete, acked, draw(st.sampled_from(RangeForm))))
    return found


def holes_in(mark_delete, acked):
    """The unacked entries below an acked one."""
    above = {each for each in acked if each > mark_delete}
    return {each for each in ENTRIES if each > mark_delete and each not in above and each < max(above, default=each)}


@given(states())
def test_what_is_acked_and_lost_and_since_when_holes_exist_are_those_of_plain_sets(found):
    history = history_of(*(entry_of(each[0], sorted(each[1]), form=each[2]) for each in found), top=99)
    acked = [{each for each in ENTRIES if each <= mark_delete} | set(above) for mark_delete, above, _ in found]
    gains = [len(now - before) for before, now in pairwise(acked)]
    losses = [len(before - now) for before, now in pairwise(acked)]
    assert (history.record_count, history.acked, history.lost) == (len(found), sum(gains), sum(losses))
    assert [(each.record, each.acked, each.lost) for each in history.changes] == [
        (number, *numbers) for number, numbers in enumerate(zip(gains, losses, strict=True), 1) if any(numbers)
    ]
    since = {}
    for number, (mark_delete, above, _) in enumerate(found):
        since = {each: since.get(each, number) for each in holes_in(mark_delete, above)}
    present = holes_in(found[-1][0], found[-1][1])
    starts = [each for each in sorted(present) if Position(each.ledger_id, each.entry_id - 1) not in present]
    ages = {}
    for each in starts:
        ages.setdefault(since[each], []).append(each)
    assert history.holes == [HoleAge(number, len(ages[number]), str(ages[number][0])) for number in sorted(ages)]


@pytest.mark.parametrize(
    ("states", "why"),
    [
        ([((3, 0), [(3, 2), (5, 1)]), ((3, 0), [(3, 2), (3, 4)])], ["cut"]),
        ([((3, 0), [(3, 2), (5, 1)]), ((3, 0), [(5, 1)])], ["load"]),
        # A seek back and forth: the ranges from before it go with the next record.
        ([((5, 2), [(5, 4)]), ((3, 1), [(5, 4)]), ((3, 1), []), ((3, 1), [(3, 3)])], ["reset", "reset"]),
        ([((3, 0), [(5, 4)]), ((5, 2), [(5, 4)]), ((5, 2), [])], ["cut"]),
        ([((3, 0), [], [((3, 2), [5]), ((5, 2), [5])]), ((3, 0), [], [((3, 2), [1])])], ["cut"]),
        ([((3, 0), [], [((3, 2), [5]), ((5, 2), [5])]), ((3, 0), [], [((3, 2), [7]), ((5, 2), [5])])], ["load"]),
        # Acked as a whole, or below the mark-delete position: nothing is lost.
        ([((3, 0), [], [((3, 2), [5]), ((5, 2), [5])]), ((3, 2), [(5, 2)])], []),
    ],
)
def test_a_loss_has_the_reason_that_two_records_show(states, why):
    history = history_of(*(entry_of(*each) for each in states))
    assert [each.why for each in history.changes if each.why] == why
    assert history.losses == len(why)


def test_only_the_entries_of_some_megabytes_are_read_at_once(monkeypatch):
    cluster = cluster_of(*(entry_of((3, entry)) for entry in range(6)))
    asked, read = [], cluster.ledgers.read
    monkeypatch.setattr(cluster.ledgers, "read", lambda *words: asked.append(words[2] - words[1]) or read(*words))
    monkeypatch.setattr("ackstate.analysis.pulsar.history._BYTES_AT_ONCE", 2 * len(entry_of((3, 1))))
    assert cursor_history(cluster, TOPIC, "s", top=1).record_count == 6
    assert asked == [1, 2, 2, 1]


def test_a_state_in_the_metadata_store_and_an_empty_ledger_have_no_history(capsys, monkeypatch):
    nodes = new_nodes()
    nodes.set(f"{NODE}/s", b"\x08" + b"\xff" * 9 + b"\x01" + CURSOR_RECORD[2:])
    for cluster, text in ((layout_of(nodes), "in the metadata store"), (cluster_of(), "not written yet")):
        monkeypatch.setattr("ackstate.analysis.cli.store.opened_cluster", lambda _, cluster=cluster: cluster)
        outcome = run(capsys, "pulsar", "history", "pulsar+zk://h:1", TOPIC, "s")
        assert (outcome.status, outcome.out) == (0, f"{TOPIC}, s\nthe state is {text}: it has no history\n")


def test_what_cannot_be_read_is_named():
    cluster = cluster_of(entry_of((3, 1)), b"\x08\x03\x10")
    with pytest.raises(CorruptStateError, match=r"record 1 of cursor ledger \d+: .* protobuf can read"):
        cursor_history(cluster, TOPIC, "s", top=1)
    with pytest.raises(AckStateError, match=r"has no subscription 't'; its subscriptions are: 's'"):
        cursor_history(cluster, TOPIC, "t", top=1)
    with pytest.raises(AckStateError, match="has no topic"):
        cursor_history(cluster, f"{TOPIC}1", "s", top=1)
    cluster.nodes.set(f"{NODE}2-partition-0", b"")
    with pytest.raises(AckStateError, match=r"has partitions: name one of them, such as .*t12-partition-0"):
        cursor_history(cluster, f"{TOPIC}2", "s", top=1)
    (ledger_id,) = cluster.ledgers.owned_by("cursor of a broker")
    cluster.ledgers.delete(ledger_id)
    with pytest.raises(AckStateError, match=f"cursor ledger {ledger_id} is gone, its owner has begun another"):
        cursor_history(cluster, TOPIC, "s", top=1)


def test_the_command_shows_the_oldest_holes_and_its_limits(capsys, monkeypatch):
    entries = [
        entry_of((3, 0), [(3, 2)]),
        entry_of((3, 0), [(3, 2), (5, 1), (9, 3)]),
        entry_of((3, 0), [(3, 2), (5, 1)], [((5, 3), [6])]),
        entry_of((3, 0), [(3, 2), (5, 1), (5, 4)]),
    ]
    monkeypatch.setattr("ackstate.analysis.cli.store.opened_cluster", lambda _: cluster_of(*entries))
    words = ("pulsar", "history", "pulsar+zk://h:1", "t1", "s")
    answer = json.loads(run(capsys, *words, "--json").out)
    document = (Path(__file__).parents[4] / "docs" / "json-output.md").read_text(encoding="utf-8")
    section = document.partition("## `pulsar history --json`")[2].partition("\n## ")[0]
    assert {key for key in {*answer, *answer["last"], *answer["holes"][0]} if f"`{key}`" not in section} == set()
    assert (answer["acked"], answer["lost"], answer["losses"], answer["hole_count"]) == (3, 1, 2, 4)
    assert [(each["record"], each["lost"], each["batches_lost"], each["why"]) for each in answer["changes"]] == [
        (1, 0, 0, ""), (2, 1, 0, "cut"), (3, 0, 1, "cut"),
    ]  # fmt: skip
    assert answer["holes"] == [
        {"since_record": 0, "hole_count": 1, "first": "3:1"},
        {"since_record": 1, "hole_count": 2, "first": "3:3"},
        {"since_record": 3, "hole_count": 1, "first": "5:2"},
    ]
    assert answer["last"] | {"size_bytes": 0} == {
        "record": 3, "size_bytes": 0, "mark_delete": "3:0", "range_count": 3, "entry_count": 3, "batch_count": 0,
        "acked": 1, "lost": 0, "batches_lost": 1, "why": "cut",
    }  # fmt: skip
    assert [each["since_record"] for each in json.loads(run(capsys, *words, "--json", "--top=1").out)["holes"]] == [0]
    out = run(capsys, *words, "--top=1").out
    assert "4 records" in out
    assert "all records: 3 entries acked, 1 acked entry lost in 2 records" in out
    assert "cut: the highest acks are missing, as by a limit on ranges or batches, or a seek" in out
    assert re.search(r"0 or before +│ +1 +│ 3:1 *\nand 3 more, since later records\n", out)
    assert "Records have no times. The next owner of the topic deletes them" in out
