"""The bytes of a BookKeeper store, and the parts of its client that need no cluster."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate.errors import CorruptStateError, UnsupportedVersionError
from ackstate.stores import bookkeeper_nodes as nodes
from ackstate.stores import zookeeper
from ackstate.stores.base import LedgerFencedError, LedgerNotFoundError, StoreError
from ackstate.stores.bookkeeper_bookies import unavailable_bookies
from ackstate.stores.bookkeeper_client import find_jars
from ackstate.stores.bookkeeper_entries import (
    ENTRY_ROOM_BYTES,
    Entry,
    EntryKind,
    Group,
    decode_entry,
    encode_batch,
)
from ackstate.stores.bookkeeper_errors import BookKeeperError, error_of
from ackstate.stores.bookkeeper_frames import Failure, FrameReader, frame
from ackstate.stores.bookkeeper_ledger import Replication
from ackstate.stores.bookkeeper_nodes import Segment, SegmentedLedger, SegmentStatus, WriterState
from ackstate.stores.zookeeper import LedgerStatus, NodeKind

uint64 = st.integers(0, 2**64 - 1)
groups = st.none() | st.builds(Group, uint64, uint64)
LEDGER = SegmentedLedger(
    LedgerStatus.OPEN, "ä", (Segment(7, 3, SegmentStatus.SEALED), Segment(2**40, 0, SegmentStatus.OPEN))
)


# Entries


@given(payloads=st.lists(st.binary(), min_size=1), group=groups)
def test_a_batch_is_decoded_as_it_was_encoded(payloads, group):
    found = [decode_entry(entry, "entry") for entry in encode_batch(payloads, group)]
    end = EntryKind.END if group is None else EntryKind.GROUP_END
    assert found[-1] == Entry(end, len(payloads) - 1, group, payloads[-1])
    assert found[:-1] == [Entry(EntryKind.CONTINUED, *each) for each in _continued(payloads[:-1])]


def _continued(payloads):
    return [(index, None, payload) for index, payload in enumerate(payloads)]


def test_a_header_is_no_larger_than_the_room_for_it():
    sizes = {len(entry) for group in (None, Group(2**64 - 1, 1)) for entry in encode_batch([b"", b""], group)}
    assert max(sizes) == ENTRY_ROOM_BYTES


def test_the_bytes_of_version_1_are_for_ever():
    encoded = {
        "010100000000 61": encode_batch([b"a", b"b"], None)[0],
        "010201000000 62": encode_batch([b"a", b"b"], None)[1],
        "010300000000 0900000000000000 0500000000000000 61": encode_batch([b"a"], Group(9, 5))[0],
        "41434b5a 0108 0000 21000000 00000000"
        "00 02000000 c3a4"
        "0700000000000000 03000000 02"
        "0000000000010000 00000000 01": nodes.encode_ledger(7, LEDGER),
        "41434b5a 0109 0000 09000000 00000000 0500000000000000 01": nodes.encode_writer(9, WriterState(5, True)),
    }
    for text, found in encoded.items():
        wanted = bytes.fromhex(text)
        if found.startswith(b"ACKZ"):
            # The checksum is tested with those of the other kinds.
            assert (found[:12], found[16:]) == (wanted[:12], wanted[16:]), text
        else:
            assert found == wanted, text
    assert nodes.writer_path(9) == "/writers/0000000000000009"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", CorruptStateError),
        (b"\1\2\0\0\0", CorruptStateError),
        (b"\0\2\0\0\0\0", CorruptStateError),
        (b"\2\2\0\0\0\0", UnsupportedVersionError),
        (b"\1\0\0\0\0\0", CorruptStateError),
        (b"\1\4\0\0\0\0", CorruptStateError),
        (b"\1\3\0\0\0\0" + bytes(15), CorruptStateError),
    ],
)
def test_a_foreign_entry_is_refused(data, error):
    with pytest.raises(error, match="entry 5"):
        decode_entry(data, "entry 5")


@given(st.binary(max_size=30))
def test_any_bytes_are_an_entry_or_damage(data):
    try:
        entry = decode_entry(data, "entry")
    except (CorruptStateError, UnsupportedVersionError):
        return
    assert data.endswith(entry.payload)


# Nodes


def test_a_ledger_and_a_writer_are_decoded_as_they_were_encoded():
    assert nodes.decode_ledger(7, nodes.encode_ledger(7, LEDGER)) == LEDGER
    assert (LEDGER.sealed_count, LEDGER.unsealed) == (3, LEDGER.segments[1])
    empty = SegmentedLedger(LedgerStatus.FENCED, "", ())
    assert nodes.decode_ledger(8, nodes.encode_ledger(8, empty)) == empty
    assert empty.unsealed is None
    state = WriterState(2**64 - 1, is_closed=True)
    assert nodes.decode_writer(9, nodes.encode_writer(9, state)) == state


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0\1\0\0\0",
        b"\3\0\0\0\0",
        b"\0\1\0\0\0\xff",
        b"\0\0\0\0\0" + bytes(12),
        b"\0\0\0\0\0" + bytes(12) + b"\3",
        b"\0\0\0\0\0" + bytes(12) + b"\1" + bytes(12) + b"\2",
    ],
)
def test_segments_that_make_no_sense_are_damage(body):
    data = zookeeper.encode(NodeKind.BOOKKEEPER_LEDGER, zookeeper.ledger_path(7), body)
    with pytest.raises(CorruptStateError, match="segment"):
        nodes.decode_ledger(7, data)


@pytest.mark.parametrize("body", [b"", bytes(8), bytes(8) + b"\2"])
def test_a_writer_that_makes_no_sense_is_damage(body):
    data = zookeeper.encode(NodeKind.BOOKKEEPER_WRITER, nodes.writer_path(9), body)
    with pytest.raises(CorruptStateError, match="group number"):
        nodes.decode_writer(9, data)


# The client without a cluster


def test_frames_are_read_as_they_were_written_until_the_stream_ends():
    left, right = socket.socketpair()
    contents = [(1, "append", ([(7, b"x" * 50_000)],)), (2, None, {"a": [1, 2]}), (3, True, ())]
    with right:
        with left:
            left.sendall(frame(contents[0]) + frame(contents[1])[:5])
            reader = FrameReader(right)
            assert reader.read() == contents[0]
            left.sendall(frame(contents[1])[5:] + frame(contents[2]) + b"\1")
        assert [reader.read(), reader.read(), reader.read()] == [*contents[1:], None]


def test_errors_of_bookkeeper_become_ours():
    assert isinstance(error_of(Failure(-101, "fenced")), LedgerFencedError)
    assert isinstance(error_of(Failure(-25, "no ledger")), LedgerNotFoundError)
    error = error_of(Failure(-6, "Not enough non-faulty bookies available"))
    assert isinstance(error, BookKeeperError)
    assert (error.code, str(error)) == (-6, "BookKeeper: Not enough non-faulty bookies available (code -6)")


@pytest.mark.parametrize(
    "values", [{"ensemble_size": 1}, {"ack_quorum": 0}, {"write_quorum": 1}, {"digest_type": "MD5"}]
)
def test_replication_that_makes_no_sense_is_refused(values):
    with pytest.raises(ValueError, match="must be"):
        Replication(**values)


def test_the_class_path_comes_from_the_option_then_the_environment_then_pulsar(tmp_path, monkeypatch):
    folders = {name: tmp_path / name for name in ("option", "variable", "pulsar/lib")}
    for name, folder in folders.items():
        folder.mkdir(parents=True)
        (folder / f"{Path(name).name}.jar").touch()
    monkeypatch.delenv("ACKSTATE_BOOKKEEPER_CLASSPATH", raising=False)
    monkeypatch.delenv("PULSAR_HOME", raising=False)
    with pytest.raises(StoreError, match=r"^BookKeeper's Java client is missing: name a folder .* PULSAR_HOME$"):
        find_jars(None)
    monkeypatch.setenv("PULSAR_HOME", str(tmp_path / "pulsar"))
    assert find_jars(None) == [str(folders["pulsar/lib"] / "lib.jar")]
    monkeypatch.setenv("ACKSTATE_BOOKKEEPER_CLASSPATH", f"{folders['variable']}/*")
    assert find_jars(None) == [str(folders["variable"] / "variable.jar")]
    jar = folders["option"] / "option.jar"
    assert find_jars(f"{jar}:{folders['variable']}") == [str(jar), str(folders["variable"] / "variable.jar")]
    with pytest.raises(StoreError, match=f"{tmp_path}/nothing has no jars"):
        find_jars(f"{tmp_path}/nothing")


def test_bookies_that_do_not_answer_or_are_not_registered_are_named():
    def answer():
        for _ in range(2):
            connection, _ = bookie.accept()
            with connection:
                connection.sendall(connection.recv(24))

    with (
        socket.create_server(("127.0.0.1", 0)) as bookie,
        socket.create_server(("127.0.0.1", 0)) as hanging,
        socket.socket() as unheard,
        ThreadPoolExecutor(1) as thread,
    ):
        bookie.settimeout(5)
        unheard.bind(("127.0.0.1", 0))
        up, hangs, down = (f"127.0.0.1:{each.getsockname()[1]}" for each in (bookie, hanging, unheard))
        answered = thread.submit(answer)
        assert unavailable_bookies([up, hangs, down], {up, hangs, down}) == [hangs, down]
        assert unavailable_bookies([up, down, "a-name"], {down}) == [up, down, "a-name"]
        answered.result()
