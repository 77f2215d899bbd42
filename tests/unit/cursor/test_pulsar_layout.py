"""Pulsar's own layout as a store, on a directory of nodes in memory: paths, names, refusals, the message log."""

import base64

import pytest

from ackstate import CorruptStateError, CursorConfig, Format, ManagedCursor, Position
from ackstate.analysis.pulsar.ack_state_file import topics_of
from ackstate.inspect import find_cursors, inspect_cursor
from ackstate.ledger_map import LedgerMap
from ackstate.stores.base import StoreError, VersionMismatchError
from ackstate.stores.pulsar import (
    TopicOwnedError,
    check_topic,
    cursor_metadata,
    decoded,
    find_owner,
    hold_topic,
    is_pulsar_url,
    managed_ledger_name,
    parse_pulsar_url,
    pulsar_path,
    quoted,
    topic_hash,
)
from ackstate.wire.pulsar import Compression, decode_cursor_info
from ackstate.wire.pulsar.codec import MessageLedger, decode_ledger_info
from ackstate.wire.pulsar.compression import compress
from ackstate.wire.pulsar.message_entry import decode_message_times
from pulsar_nodes import CURSOR_RECORD, NODE, OWNED, TOPIC, TOPIC_RECORD, layout_of, new_nodes


@pytest.fixture
def nodes():
    return new_nodes()


def test_names_are_those_of_a_broker():
    for path, expected in {
        "/managed-ledgers/persistent%3A%2F%2Fpublic%2Fdefault%2Ft1": NODE,
        "/managed-ledgers/persistent%3A%2F%2Fa%2Fb%2Fx%20y%2Fz/s%2F1": "/managed-ledgers/a/b/persistent/x+y%2Fz/s%2F1",
        "/managed-ledgers/persistent%3A%2F%2Fa%2Fb%2F~%C3%BC/%2B": "/managed-ledgers/a/b/persistent/%7E%C3%BC/%2B",
        "/cursor-terms": None,
        "/managed-ledgers/persistent%3A%2F%2Fa%2Fb%2Fc/s/more": None,
    }.items():
        assert pulsar_path(path) == expected
    assert decoded("x+y%2Fz") == "x y/z"
    for damaged in ("", "%ff", "a b", "%zz", "~"):
        with pytest.raises(CorruptStateError):
            decoded(damaged)
    segment = "segment://a/b/x y/z/8000-ffff-12"
    assert managed_ledger_name(segment) == "a/b/segment/x+y%2Fz/8000-ffff-12"
    assert cursor_metadata(f"cursor /managed-ledgers/{quoted(segment)}/s")["pulsar/cursor"] == b"s"
    assert cursor_metadata(f"cursor /managed-ledgers/{quoted(segment)}") is None
    others = (
        "orders",
        "non-persistent://a/b/c",
        "persistent://a/b",
        "topic://a/b/c",
        "segment://a/b/c",
        f"{segment}/s",
    )
    for other in others:
        with pytest.raises(ValueError, match="persistent://TENANT/NAMESPACE/TOPIC"):
            managed_ledger_name(other)


def test_urls_name_the_metadata_store():
    assert parse_pulsar_url("pulsar+zk://h:1,i:2/a/b/c/d")[:3] == ("h:1,i:2", "a/b/c/d", "")
    assert parse_pulsar_url("zk:h:1")[:3] == ("h:1", "", "")
    # As in a broker's metadataStoreUrl.
    assert parse_pulsar_url("zk:h:1,i:2/p/q/r")[:3] == ("h:1,i:2", "", "/p/q/r")
    assert parse_pulsar_url("pulsar+zk://h:1/a/b/c?d?chroot=/p&ledgers=/l&digest=MAC&password_file=f") == (
        "h:1", "a/b/c?d", "/p", "/l", "MAC", "f",
    )  # fmt: skip
    assert parse_pulsar_url("pulsar+zk://h:1/a/b/c?d").within == "a/b/c?d"
    for url, words in {
        "etcd:h:1": "metadata in etcd is not supported",
        "pulsar+oxia://h:1": "metadata in Oxia is not supported",
        "memory:local": "memory of a broker is not supported",
        "pulsar+zk://": "expected pulsar\\+zk://HOST:PORT",
        "pulsar+zk:///a/b": "expected pulsar\\+zk://HOST:PORT",
        "pulsar+zk://h:1//b": "expected pulsar\\+zk://HOST:PORT",
        "pulsar+zk://h:1?chrot=/p": "unknown option 'chrot' of the URL; there are chroot, ",
        "pulsar+zk://h:1?chroot=p": "path must be a metadata path such as /a/b, got 'p'",
        "pulsar+rocksdb:/var/m": "metadata in RocksDB is not supported",
        "pulsar+http://h": "expected pulsar\\+zk://HOST:PORT",
    }.items():
        assert is_pulsar_url(url)
        with pytest.raises(ValueError, match=words):
            parse_pulsar_url(url)
    assert not is_pulsar_url("zookeeper://h:1/r")
    assert not is_pulsar_url("data/zk")
    assert check_topic("t") == "persistent://public/default/t"
    assert check_topic("a/b/c") == "persistent://a/b/c"
    with pytest.raises(ValueError, match="persistent"):
        check_topic("non-persistent://a/b/c")


def test_a_brokers_cursor_is_opened_in_place_and_written_back(nodes):
    ledger = nodes.store.ledgers.create("cursor of a broker")
    nodes.store.ledgers.append(ledger, [base64.b64decode("CAAQATINCAAQqP2q1arVqgEQAA==")])
    nodes.set(f"{NODE}/s%2F1", b"\x08%c" % ledger + CURSOR_RECORD[2:])
    store = layout_of(nodes)
    assert [(each.topic, each.subscription) for each in find_cursors(store)] == [(TOPIC, "s/1")]
    cursor = ManagedCursor.open(
        store, topic=TOPIC, subscription="s/1", ledgers=LedgerMap.from_counts({0: 50}),
        config=CursorConfig(format=Format.PULSAR), now_ms=0,
    )  # fmt: skip
    assert (str(cursor.mark_delete_position), cursor.deleted.range_count) == ("0:1", 22)
    cursor.ack(Position(0, 2), now_ms=1)
    cursor.close(now_ms=2)
    found = decode_cursor_info(nodes.get(f"{NODE}/s%2F1").data)
    assert (found.mark_delete, found.cursors_ledger_id, found.deleted.range_count) == (Position(0, 3), -1, 21)


def test_a_version_of_a_node_is_compared(nodes):
    store = layout_of(nodes)
    path = "/managed-ledgers/persistent%3A%2F%2Fpublic%2Fdefault%2Ft1/s"
    version = store.metadata.put(path, CURSOR_RECORD, expected_version=-1)
    nodes.set(f"{NODE}/s", CURSOR_RECORD)
    with pytest.raises(VersionMismatchError):
        store.metadata.put(path, b"", expected_version=version)
    for foreign in ("/cursor-terms", "/managed-ledgers/persistent%3A%2F%2Fpublic%2Fdefault%2Ft1"):
        with pytest.raises(StoreError, match="no place in Pulsar's layout"):
            store.metadata.put(foreign, b"1", expected_version=-1)
    assert store.metadata.get("/cursor-terms") is None


def test_only_the_cursors_within_a_url_are_listed(nodes):
    for topic in ("public/default/persistent/t1/s", "public/other/persistent/t1/s", "acme/x/persistent/a%2Fb/s"):
        nodes.set(f"/managed-ledgers/{topic}", CURSOR_RECORD)
    for within, expected in {
        "": ["acme/x/a/b", "public/default/t1", "public/other/t1"],
        "public": ["public/default/t1", "public/other/t1"],
        "public/other": ["public/other/t1"],
        "acme/x/a/b": ["acme/x/a/b"],
        "public/default/none": [],
    }.items():
        names = find_cursors(layout_of(nodes, within))
        assert sorted(each.topic for each in names) == [f"persistent://{name}" for name in expected]


def test_the_segments_of_a_scalable_topic_are_topics(nodes):
    nodes.set("/managed-ledgers/acme/x/segment/a%2Fb/0000-ffff-0", TOPIC_RECORD)
    for topic in ("acme/x/segment/a%2Fb/0000-ffff-0", "acme/x/segment/other/0000-7fff-1", "acme/x/segment/a%2Fb/odd"):
        nodes.set(f"/managed-ledgers/{topic}/s", CURSOR_RECORD)
    segment = "segment://acme/x/a/b/0000-ffff-0"
    for within, expected in {"": 2, "acme/x": 2, "acme/x/a/b": 1, "acme/x/b": 0}.items():
        store = layout_of(nodes, within)
        names = find_cursors(store)
        odd = "/managed-ledgers/acme/x/segment/a%2Fb/odd"
        assert (len(names), [*store.metadata.unread]) == (expected, [odd] * (within != "acme/x/b"))
        assert [each.topic for each in names[:1]] == [segment][:expected]
    store = layout_of(nodes)
    (cursor, _) = find_cursors(store)
    assert inspect_cursor(store, cursor).log_end == Position(0, -1)
    assert topics_of(store, segment) == [segment]


def test_a_name_that_pulsar_does_not_write_hides_no_other(nodes):
    for path in (
        "public/default/persistent/t1/s",
        "public/default/persistent/%zz/s",
        "a/standalone/ns1/persistent/t/s",
    ):
        nodes.set(f"/managed-ledgers/{path}", CURSOR_RECORD)
    nodes.set(f"{NODE}/%ff", CURSOR_RECORD)
    store = layout_of(nodes)
    assert [(each.topic, each.subscription) for each in find_cursors(store)] == [(TOPIC, "s")]
    assert {path: why.partition(",")[0] for path, why in store.metadata.unread.items()} == {
        "/managed-ledgers/a/standalone/ns1": "a namespace of Pulsar 1",
        "/managed-ledgers/public/default/persistent/%zz": "name in the metadata store: at byte 0 expected a name as"
        " Pulsar encodes it",
        f"{NODE}/%ff": "name in the metadata store: at byte 0 expected a name as Pulsar encodes it",
    }
    assert topics_of(store, TOPIC) == [TOPIC]


def test_an_inspection_knows_the_message_log(nodes):
    nodes.set(NODE, b"\n\x06\x08\x00\x10\x32\x20\x05\n\x04\x08\x07 \x00")
    record = b"\x08" + b"\xff" * 9 + b"\x01\x10\x00\x18\x03"
    nodes.set(f"{NODE}/s", record)
    (name,) = find_cursors(layout_of(nodes))
    found = inspect_cursor(layout_of(nodes), name)
    assert (found.log_end, found.content.mark_delete, found.problems) == (Position(0, 49), Position(0, 3), ())
    nodes.set(NODE, b"\n\x06\x08\x00\x10\x02\x20\x05")
    (problem,) = inspect_cursor(layout_of(nodes), name).problems
    assert "up to the end of the message log, 0:1" in problem.expected
    nodes.set(NODE, b"\n\x06\x08\x00")
    (problem,) = inspect_cursor(layout_of(nodes), name).problems
    assert problem.what == "managed ledger info"


def test_a_topic_is_held_only_while_no_broker_owns_it(nodes):
    path = (
        f"/namespace/public/default/{'0x80000000_0xffffffff' if topic_hash(TOPIC) >> 31 else '0x00000000_0x80000000'}"
    )
    assert topic_hash(TOPIC) == 0xC1EC4B02
    with hold_topic(nodes, TOPIC):
        assert b'"disabled": true' in nodes.get(path).data
        with pytest.raises(TopicOwnedError, match="holds-this-bundle"), hold_topic(nodes, TOPIC):
            pytest.fail("two held it")
    assert nodes.get(path) is None
    nodes.set("/namespace/public/default/0x00000000_0x80000000", OWNED)
    assert find_owner(nodes, TOPIC) is None
    nodes.set(path, OWNED)
    with pytest.raises(TopicOwnedError, match=r"owned by pulsar://127\.0\.0\.1:6650"), hold_topic(nodes, TOPIC):
        pytest.fail("a broker owns it")
    assert nodes.get(path).data == OWNED


def test_ownership_that_cannot_be_checked_is_refused(nodes):
    with pytest.raises(StoreError, match="no bundle for"), hold_topic(nodes, "persistent://a/b/c"):
        pytest.fail("there is no such namespace")
    nodes.set("/loadbalance/brokers/b:1", b'{"loadManagerClassName":"x.extensions.ExtensibleLoadManagerImpl"}')
    with pytest.raises(StoreError, match="broker b:1 keeps the ownership of topics in a topic"):
        find_owner(nodes, TOPIC)
    nodes.set("/loadbalance/brokers/b:1", b"\xff")
    with pytest.raises(CorruptStateError, match="/loadbalance/brokers/b:1"):
        find_owner(nodes, TOPIC)
    nodes.set("/loadbalance/brokers/b:1", b"{}")
    nodes.set("/namespace/public/default/all", OWNED)
    with pytest.raises(CorruptStateError, match="bundle of namespace public/default"):
        find_owner(nodes, TOPIC)


def test_the_record_of_a_topic_names_its_ledgers():
    open_one = b"\x0a\x04\x08\x09\x20\x00"
    closed = b"\x0a\x0a\x08\x03\x10\x32\x18\xb0\x0e\x20\x05\x78" + b"\x01"
    offloaded = b"\x0a\x0a\x08\x05\x10\x02\x2a\x04\x18\x01\x20\x01"
    record = closed[:1] + bytes([len(closed) - 2]) + closed[2:] + offloaded + open_one
    expected = (MessageLedger(3, 50), MessageLedger(5, 2, is_offloaded=True), MessageLedger(9, 0))
    assert decode_ledger_info(record) == expected
    still_there = b"\x0a\x08\x08\x05\x10\x02\x2a\x02\x18\x01"
    assert decode_ledger_info(still_there) == (MessageLedger(5, 2),)
    padded = record + b"\x1a\x7e" + b"\x0a\x7c" + b"x" * 124
    assert decode_ledger_info(compress(padded, Compression.ZLIB)) == expected
    for damaged in (record[:-1], record + b"\x0a", open_one + closed, b"\x0a\x00", b"\x0a\x02\x08\xff", b"\x0b"):
        with pytest.raises(CorruptStateError):
            decode_ledger_info(damaged)


def test_the_times_of_a_message_are_in_its_entry():
    entry = _entry(publish_time_ms=1_795_523_497_557, deliver_at_ms=1_795_523_500_000, message_count=10)
    assert decode_message_times(entry) == (1_795_523_497_557, 1_795_523_500_000, 10)
    assert decode_message_times(b"\x0e\x02\x00\x00\x00\x03abc" + entry) == decode_message_times(entry)
    assert decode_message_times(entry[6:]) == decode_message_times(entry)
    assert decode_message_times(_entry(publish_time_ms=5)) == (5, 0, 1)
    with pytest.raises(CorruptStateError, match="checksum"):
        decode_message_times(entry + b"!")


def _entry(*, publish_time_ms, deliver_at_ms=0, message_count=1):
    import google_crc32c

    metadata = b"\x0a\x01p\x10\x07\x18" + _varint(publish_time_ms)
    if message_count > 1:
        metadata += b"\x58" + _varint(message_count)
    if deliver_at_ms:
        metadata += b"\x98\x01" + _varint(deliver_at_ms)
    rest = len(metadata).to_bytes(4, "big") + metadata + b"payload"
    return b"\x0e\x01" + google_crc32c.value(rest).to_bytes(4, "big") + rest


def _varint(number):
    found = b""
    while number > 127:
        found += bytes([number & 127 | 128])
        number >>= 7
    return found + bytes([number])
