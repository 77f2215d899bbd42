"""Export and import of ack states without a broker: the file and the refusals."""

import json
import re
from dataclasses import replace
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate import (
    AckStateError,
    BatchIndexes,
    CorruptStateError,
    CursorConfig,
    DeletedRanges,
    Format,
    ManagedCursor,
    Position,
    UnsupportedVersionError,
)
from ackstate.analysis.pulsar.ack_state_file import (
    AckStateFile,
    ExportedCursor,
    Fingerprint,
    decode_ack_states,
    encode_ack_states,
    exported_cursors,
    read_ack_states,
    write_ack_states,
)
from ackstate.analysis.pulsar.import_through_broker import (
    ImportedCursor,
    OtherTopicError,
    checked,
    import_through_broker,
)
from ackstate.analysis.pulsar.sources import LiveBroker
from ackstate.cursor.formats import CursorState
from pulsar_nodes import NODE, TOPIC, layout_of, new_nodes

GOLDEN = Path(__file__).parents[3] / "golden" / "ack-states-v1.ack"
SEALED = b'%s{"crc32c":"%08x"}\n'


def state_of(mark_delete, runs=(), batches=()):
    deleted, batch = DeletedRanges(), BatchIndexes()
    for each in runs:
        deleted.add_run(*each)
    for position, words in batches:
        batch.ack(Position(*position), words)
    return CursorState(Position(*mark_delete), deleted, batch, {"horizon": -7})


GOLDEN_STATE = state_of((3, 7), [(3, 9, 20), (3, 22, 23), (5, 0, 4)], [((3, 20), [0b101]), ((5, 7), [-1, 3])])
GOLDEN_CURSOR = ExportedCursor(
    TOPIC, "billing", GOLDEN_STATE, {3: 50, 5: 8}, {"owner": "team é"},
    (Fingerprint(Position(3, 22), 0xDCE456D5, 1_795_523_497_557),),
)  # fmt: skip
GOLDEN_FILE = AckStateFile("pulsar+zk://127.0.0.1:2181", 1_795_523_993_067, (GOLDEN_CURSOR,))


def sealed(*objects):
    body = b"".join(json.dumps(each).encode() + b"\n" for each in objects)
    return SEALED % (body, google_crc32c.value(body))


def test_the_golden_file_is_what_is_written_and_read(tmp_path):
    assert encode_ack_states(GOLDEN_FILE) == GOLDEN.read_bytes()
    assert read_ack_states(GOLDEN) == GOLDEN_FILE
    assert write_ack_states(tmp_path / "file", GOLDEN_FILE) == len(GOLDEN.read_bytes())
    assert (tmp_path / "file").read_bytes() == GOLDEN.read_bytes()


def test_the_members_are_those_of_the_documentation():
    text = (GOLDEN.parents[2] / "docs" / "wire-format.md").read_text(encoding="utf-8")
    section = text.split("## Ack states, version 1\n")[1].split("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    lines = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
    assert named == [name for line in lines for name in line]


@given(
    st.sets(st.integers(0, 400), max_size=60),
    st.integers(-1, 300),
    st.dictionaries(st.text(), st.text(), max_size=3),
    st.text(min_size=1),
)
def test_what_is_written_is_read(entries, mark_delete, properties, name):
    deleted = DeletedRanges()
    deleted.add_entries(4, [entry for entry in entries if entry > mark_delete])
    content = CursorState(Position(4, mark_delete), deleted, BatchIndexes(), {})
    properties = {key: text for key, text in properties.items() if _is_utf8(key + text)}
    cursor = ExportedCursor(TOPIC, name if _is_utf8(name) else "s", content, {4: 401}, properties)
    contents = AckStateFile("x", 0, (cursor, cursor))
    assert decode_ack_states(encode_ack_states(contents)) == contents


def _is_utf8(text):
    return not any(0xD800 <= ord(each) < 0xE000 for each in text)


def test_every_damaged_byte_is_found():
    data = GOLDEN.read_bytes()
    for at in range(len(data)):
        with pytest.raises(CorruptStateError):
            decode_ack_states(data[:at])
        for bit in (0, 3, 7):
            damaged = bytes([*data[:at], data[at] ^ 1 << bit, *data[at + 1 :]])
            with pytest.raises((CorruptStateError, UnsupportedVersionError)):
                decode_ack_states(damaged)


def test_a_file_with_the_right_checksum_and_wrong_fields_is_refused():
    header, cursor, _ = (json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines())
    assert decode_ack_states(sealed(header, cursor)) == GOLDEN_FILE
    for name, value in {
        "topic": 1, "subscription": None, "mark_delete": "3:8", "cursor_properties": {"a": 1},
        "ledgers": [[5, 8], [3, 50]], "fingerprints": [[1, 2, 3]], "state": "CAM=",
    }.items():  # fmt: skip
        with pytest.raises(CorruptStateError, match="export"):
            decode_ack_states(sealed(header, cursor | {name: value}))
    for name, value in {"state": "?", "ledgers": [], "cursor_properties": []}.items():
        with pytest.raises(CorruptStateError, match="export"):
            decode_ack_states(sealed(header, cursor | {name: value}))
    for wrong in (header | {"cursor_count": 2}, header | {"source": 1}, header | {"exported_at_ms": True}):
        with pytest.raises(CorruptStateError, match="export"):
            decode_ack_states(sealed(wrong, cursor))
    with pytest.raises(UnsupportedVersionError, match="version 2; this release reads up to 1"):
        decode_ack_states(sealed(header | {"ackstate_export": 2}, cursor))
    for foreign in (b"", b"\n", b"{}\n{}\n", b"PAR1", b"[1]\n"):
        with pytest.raises(CorruptStateError):
            decode_ack_states(foreign)


@pytest.fixture
def nodes():
    """A topic with two ledgers in its store, whose entries are numbers."""
    found = new_nodes()
    ledgers = found.store.ledgers
    ids = [ledgers.create("log") for _ in range(2)]
    for ledger_id, count in zip(ids, (6, 4), strict=True):
        for entry in range(count):
            ledgers.append(ledger_id, [_entry(ledger_id * 100 + entry)])
    first, last = ids
    found.set(NODE, b"\n\x06\x08%c\x10\x06\x20\x05\n\x04\x08%c \x00" % (first, last))
    found.ids = ids
    return found


def _entry(number):
    metadata = b"\x0a\x01p\x10%c\x18%c" % (number % 128, number % 128)
    rest = len(metadata).to_bytes(4, "big") + metadata
    return b"\x0e\x01" + google_crc32c.value(rest).to_bytes(4, "big") + rest


def opened(nodes, name):
    store = layout_of(nodes)
    log = store.find_message_log(TOPIC).ledgers
    return ManagedCursor.open(
        store, topic=TOPIC, subscription=name, ledgers=log, config=CursorConfig(format=Format.PULSAR), now_ms=0
    )


def exported(nodes):
    cursor = opened(nodes, "s")
    first, last = nodes.ids
    cursor.mark_delete(Position(first, 1), now_ms=1)
    cursor.ack_many([Position(first, 3), Position(last, 0), Position(last, 2)], now_ms=1)
    cursor.ack_batch(Position(last, 3), [0b110], now_ms=1)
    cursor.set_cursor_properties({"owner": "billing"})
    cursor.persist(now_ms=2)
    return exported_cursors(layout_of(nodes), TOPIC)


class Client:
    """A client of Pulsar that has messages to read, by when they were published; it refuses to subscribe.

    It is its own reader and message.
    """

    def __init__(self, published_ms):
        self.published_ms = published_ms

    def create_reader(self, topic, start, **_):
        assert topic == TOPIC
        self.start = start
        return self

    def has_message_available(self):
        return (self.start.ledger_id(), self.start.entry_id()) in self.published_ms

    def read_next(self, _timeout_ms):
        return self

    def message_id(self):
        return self.start

    def publish_timestamp(self):
        return self.published_ms[self.start.ledger_id(), self.start.entry_id()]

    def close(self):
        pass

    def subscribe(self, *_, **__):
        raise SubscribedError


class SubscribedError(Exception):
    """The topic was taken for the one that was exported."""


def test_an_import_into_another_topic_sends_no_ack():
    same = {(3, 22): GOLDEN_CURSOR.fingerprints[0].publish_time_ms}
    for published_ms, words in {
        (): "has none of the 1 messages by which the file recognises its topic",
        (((3, 22), 1),): "the message at 3:22 is not the one that was exported",
    }.items():
        with pytest.raises(OtherTopicError, match=words):
            import_through_broker(Client(dict(published_ms)), GOLDEN_CURSOR, topic=TOPIC, subscription="s")
    with pytest.raises(SubscribedError):
        import_through_broker(Client(same), GOLDEN_CURSOR, topic=TOPIC, subscription="s")


class Admin:
    """Answers of a broker in order, the last one again and again."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def get(self, path):
        assert path == "/admin/v2/persistent/public/default/t1/internalStats"
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def broker(*answers):
    return LiveBroker(Admin(*answers))


def internals(mark_delete, ranges):
    ledgers = [{"ledgerId": 3, "entries": 50}, {"ledgerId": 5, "entries": 0}]
    cursor = {"markDeletePosition": mark_delete, "individuallyDeletedMessages": ranges, "state": "Open"}
    return {"ledgers": ledgers, "currentLedgerEntries": 8, "cursors": {"a%2Fb": cursor}}


def test_acks_that_did_not_reach_the_broker_are_counted():
    outcome = ImportedCursor(TOPIC, "a/b", 0)
    for mark_delete, ranges, missing in (
        ("3:7", "[(3:8..3:19],(3:21..3:22],(5:-1..5:3]]", 0),
        ("5:3", "[]", 0),
        ("3:-1", "[]", 8 + 11 + 1 + 4),
        ("3:4", "[(3:5..3:6],(3:8..3:19],(5:-1..5:1]]", 2 + 1 + 2),
    ):
        found = checked(broker(internals(mark_delete, ranges)), GOLDEN_CURSOR, outcome, pause_s=0)
        assert (found.missing_acks, str(found.mark_delete)) == (missing, mark_delete)
        assert bool(found.remarks) is bool(missing)
    late = broker(internals("3:-1", "[]"), internals("5:3", "[]"))
    assert checked(late, GOLDEN_CURSOR, outcome, pause_s=0).missing_acks == 0
    with pytest.raises(AckStateError, match="has no such subscription"):
        checked(broker(internals("3:-1", "[]")), GOLDEN_CURSOR, replace(outcome, subscription="c"), pause_s=0)


def test_an_export_names_what_there_is(nodes):
    exported(nodes)
    store = layout_of(nodes)
    for own in ("__compaction", "pulsar.dedup", "pulsar.repl.east"):
        nodes.set(f"{NODE}/{own}", nodes.get(f"{NODE}/s").data)
    assert [each.subscription for each in exported_cursors(store, TOPIC)] == ["s"]
    assert [each.subscription for each in exported_cursors(store, TOPIC, subscriptions=["pulsar.dedup"])] == [
        "pulsar.dedup"
    ]
    for own in ("__compaction", "pulsar.dedup", "pulsar.repl.east"):
        nodes.delete(f"{NODE}/{own}", expected_version=nodes.get(f"{NODE}/{own}").version)
    with pytest.raises(AckStateError, match="has no subscription 'x'; its subscriptions are: 's'"):
        exported_cursors(store, TOPIC, subscriptions=["x"])
    with pytest.raises(AckStateError, match="has no topic persistent://public/default/none"):
        exported_cursors(store, "persistent://public/default/none")
    nodes.set(f"{NODE}p-partition-1", nodes.get(NODE).data)
    nodes.set(f"{NODE}p-partition-10", nodes.get(NODE).data)
    nodes.set(f"{NODE}p-partition-2/s", nodes.get(f"{NODE}/s").data)
    nodes.set(f"{NODE}p-partition-2", nodes.get(NODE).data)
    nodes.set(f"{NODE}p-partition-10/s", nodes.get(f"{NODE}/s").data)
    found = exported_cursors(store, f"{TOPIC}p")
    assert [each.topic for each in found] == [f"{TOPIC}p-partition-2", f"{TOPIC}p-partition-10"]
