"""The bytes of a BookKeeper store: nodes of ZooKeeper, entries of BookKeeper, and the names of both."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate.errors import CorruptStateError, UnsupportedVersionError
from ackstate.stores import zookeeper as nodes
from ackstate.stores.bookkeeper import decode_entry, encode_batch
from ackstate.stores.zookeeper import NodeKind

TEXT = st.text(st.characters(codec="utf-8"))


@given(payloads=st.lists(st.binary(), min_size=1))
def test_only_the_last_entry_of_a_batch_ends_it(payloads):
    found = [decode_entry(entry, "entry") for entry in encode_batch(payloads)]
    assert [payload for payload, _ in found] == payloads
    assert [index for _, index in found] == [*range(len(payloads) - 1), None]


def test_the_bytes_of_each_version_are_for_ever():
    golden = {
        nodes.encode(NodeKind.DIRECTORY, "/metadata"): "41434b5a 0202 0000 00000000",
        nodes.encode(NodeKind.VALUE, "/metadata/a%20b/%2E", b"value"): "41434b5a 0206 0000 05000000 76616c7565",
        nodes.encode(NodeKind.BOOKKEEPER_STORE, ""): "41434b5a 0207 0000 00000000",
        nodes.encode(NodeKind.BOOKKEEPER_LEDGER, "/ledgers/7", "ä".encode()): "41434b5a 0208 0000 02000000 c3a4",
    }
    for encoded, text in golden.items():
        # The checksum between them is tested below.
        assert (encoded[:12] + encoded[16:]).hex() == text.replace(" ", "")
    assert nodes.encode(NodeKind.BOOKKEEPER_STORE, "")[12:].hex() == ROOT_CHECKSUM
    assert [each.hex() for each in encode_batch([b"a", b"b"])] == ["01010000000061", "01020100000062"]


ROOT_CHECKSUM = "278013ec"


@given(kind=st.sampled_from(NodeKind), path=TEXT, body=st.binary())
def test_a_node_comes_back_as_it_was_written(kind, path, body):
    encoded = nodes.encode(kind, path, body)
    assert nodes.decode(path, encoded) == (kind, body)
    assert nodes.decode_as(kind, path, encoded) == body
    assert len(encoded) == nodes.FRAME_BYTES + len(body)


def test_every_changed_bit_and_every_cut_of_a_node_is_found():
    path = "/metadata/a"
    encoded = nodes.encode(NodeKind.VALUE, path, b"value")
    for bit in range(len(encoded) * 8):
        damaged = bytearray(encoded)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises((CorruptStateError, UnsupportedVersionError)):
            nodes.decode(path, bytes(damaged))
    for size in range(len(encoded)):
        with pytest.raises(CorruptStateError):
            nodes.decode(path, encoded[:size])
    with pytest.raises(CorruptStateError, match="body"):
        nodes.decode(path, encoded + b"\0")


def test_a_node_belongs_to_its_path_its_kind_and_its_version():
    encoded = nodes.encode(NodeKind.DIRECTORY, "/a")
    with pytest.raises(CorruptStateError, match="CRC"):
        nodes.decode("/b", encoded)
    with pytest.raises(CorruptStateError, match="kind VALUE"):
        nodes.decode_as(NodeKind.VALUE, "/a", encoded)
    for version in (1, 3):  # Refused before the checksum is read.
        with pytest.raises(UnsupportedVersionError, match=f"version {version}"):
            nodes.decode("/a", encoded[:4] + bytes([version]) + encoded[5:])


@given(TEXT)
def test_names_of_nodes_are_reversible_and_fit_for_zookeeper(name):
    encoded = nodes.node_name(name)
    assert nodes.name_of_node(encoded, "/owners") == name
    assert encoded.isascii()
    assert encoded.isprintable()
    assert "/" not in encoded
    assert encoded not in {"", ".", ".."}


@pytest.mark.parametrize("name", ["%2e", "a%", "a b", "%ff"])
def test_a_name_that_we_do_not_write_is_damage(name):
    with pytest.raises(CorruptStateError, match="/owners"):
        nodes.name_of_node(name, "/owners")


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", CorruptStateError),
        (b"\1\2\0\0\0", CorruptStateError),
        (b"\0\2\0\0\0\0", CorruptStateError),
        (b"\2\2\0\0\0\0", UnsupportedVersionError),
        (b"\1\0\0\0\0\0", CorruptStateError),
        (b"\1\3\0\0\0\0", CorruptStateError),
    ],
)
def test_a_foreign_entry_is_refused(data, error):
    with pytest.raises(error, match="entry 5"):
        decode_entry(data, "entry 5")


@given(st.binary(max_size=30))
def test_any_bytes_are_an_entry_or_damage(data):
    try:
        payload, _ = decode_entry(data, "entry")
    except (CorruptStateError, UnsupportedVersionError):
        return
    assert data.endswith(payload)
