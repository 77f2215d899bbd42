"""One owner at a time writes a message log: whatever an earlier one does, no message with a position is lost."""

import struct
from contextlib import suppress
from itertools import count
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ackstate import (
    CorruptStateError,
    CursorFencedError,
    LogFencedError,
    ManagedCursor,
    MemoryStore,
    Message,
    Position,
    SqliteStore,
    StoreError,
    UnsupportedVersionError,
)
from ackstate.inspect import inspect_store
from ackstate.stores.memory import Fault, FaultKind
from ackstate.topic import MessageLog, Retention, trim_log
from ackstate.topic.log import LogRecord, decode_log_record, encode_log_record, log_owner, log_path
from wrapped_store import before_each_call

GOLDEN = Path(__file__).parents[2] / "golden"
FAULTS = (FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER, FaultKind.FULL)


def batch(*payloads):
    return [Message(payload) for payload in payloads]


def opened(store, **named):
    return MessageLog.open(store, topic="t", **named)


def positions_of(log):
    return [
        Position(ledger_id, entry_id) for ledger_id, size in log.ledgers.counts().items() for entry_id in range(size)
    ]


def payloads_of(log):
    return [message.payload for message in log.read(positions_of(log))]


def disk_state(store):
    ids = store.ledgers.owned_by(log_owner("t"))
    return [(ledger_id, store.ledgers.last(ledger_id)) for ledger_id in ids], store.metadata.get(log_path("t"))


@pytest.fixture(params=["memory", "two memory stores", "sqlite"])
def stores(request, tmp_path):
    """The stores of two owners."""
    store = SqliteStore(tmp_path / "store.db") if request.param == "sqlite" else MemoryStore()
    yield store, MemoryStore(store.disk) if request.param == "two memory stores" else store
    store.close()


@pytest.mark.parametrize("entries_per_ledger_max", [1, 2, 50])
def test_an_older_owner_is_fenced_and_changes_nothing(stores, entries_per_ledger_max):
    older = opened(stores[0], entries_per_ledger_max=entries_per_ledger_max)
    older.publish(batch(b"1"))
    newer = opened(stores[1], entries_per_ledger_max=entries_per_ledger_max)
    before = disk_state(stores[1])
    for payload in (b"lost", b"lost too"):
        with pytest.raises(LogFencedError, match="message log of topic 't' has been opened by another owner"):
            older.publish(batch(payload))
        assert disk_state(stores[1]) == before
    newer.publish(batch(b"2", b"3"))
    with pytest.raises(CursorFencedError):
        older.publish(batch(b"lost", b"lost", b"lost"))
    newer.publish(batch(b"4"))
    assert payloads_of(newer) == payloads_of(opened(stores[1])) == [b"1", b"2", b"3", b"4"]


class _WithPuts:
    """A store that calls back before and after each put."""

    def __init__(self, store, *, before=lambda: None, after=lambda: None):
        self.ledgers, self.metadata = store.ledgers, self
        self.get, self._put = store.metadata.get, store.metadata.put
        self._before, self._after = before, after

    def put(self, *args, **named):
        self._before()
        version = self._put(*args, **named)
        self._after()
        return version


@pytest.mark.parametrize("published", [1, 2, 3])
@pytest.mark.parametrize("kind", ["the answer of its record is lost", "it is slow to write its record"])
def test_a_former_owner_deletes_no_ledger_that_it_created(stores, published, kind):
    """The next owner's log has it, at least as an empty one, and a cursor may stand before its first entry."""
    store, newer = stores[0], []
    log = opened(store, entries_per_ledger_max=published)
    log.publish(batch(*[b"%d" % number for number in range(published)]))

    def lose():
        raise StoreError("the answer was lost")

    def take_over():
        if not newer:
            newer.append(opened(stores[1]))

    is_slow = kind == "it is slow to write its record"
    log.store = log._ownership._store = _WithPuts(store, **{"before": take_over} if is_slow else {"after": lose})
    with pytest.raises(LogFencedError if is_slow else StoreError):
        log.publish(batch(b"lost"))
    take_over()
    newest_id = newer[0].ledgers.current_ledger_id
    cursor = ManagedCursor.open(stores[1], topic="t", subscription="s", ledgers=newer[0].ledgers, now_ms=0)
    cursor.mark_delete(Position(newest_id, -1), now_ms=0)
    cursor.persist(now_ms=0)
    with pytest.raises(LogFencedError):
        log.publish(batch(b"lost"))
    assert stores[1].ledgers.last(newest_id) == -1
    newer[0].publish(batch(b"new"))
    assert trim_log(newer[0], Retention(), {"s": cursor}, now_ms=0) == 2
    log = opened(stores[1])
    assert stores[1].ledgers.owned_by(log_owner("t")) == list(log.ledgers)
    assert payloads_of(log) == [b"new"]
    assert ManagedCursor.open(stores[1], topic="t", subscription="s", ledgers=log.ledgers, now_ms=0).backlog == 1


def happens_before_call(number, happen):
    numbers = count()
    return lambda _: happen() if next(numbers) == number else None


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("number", range(5))
def test_a_publish_at_any_moment_of_a_takeover(size, number):
    store, published = MemoryStore(), [b"1"]
    older = opened(store, entries_per_ledger_max=3)
    older.publish(batch(b"1"))

    def publish():
        with suppress(LogFencedError):
            older.publish(batch(*[b"2"] * size))
            published.extend([b"2"] * size)

    newer = opened(before_each_call(MemoryStore(store.disk), happens_before_call(number, publish)))
    before = payloads_of(newer)
    assert before == published
    newer.publish(batch(b"new"))
    publish()
    assert payloads_of(opened(store)) == [*before, b"new"]


@pytest.mark.parametrize("number", range(5))
def test_of_two_that_open_the_log_at_once_one_writes_it(number):
    """The one that finished first, or the other: whichever has raised the term last."""
    store, owners = MemoryStore(), []
    opened(store).publish(batch(b"1"))
    happen = happens_before_call(number, lambda: owners.append(opened(MemoryStore(store.disk))))
    owners.append(opened(before_each_call(MemoryStore(store.disk), happen)))
    published = [b"1"]
    for payload, owner in zip((b"a", b"b", b"c", b"d"), owners * 2, strict=False):
        with suppress(LogFencedError):
            owner.publish(batch(payload))
            published.append(payload)
    assert len(published) == 3
    assert payloads_of(opened(store)) == published


def test_a_ledger_named_by_a_write_of_unknown_outcome_is_not_the_older_owners_any_more():
    store = MemoryStore()
    older = opened(store, entries_per_ledger_max=1)
    older.publish(batch(b"1"))
    store.inject(Fault(store.mutation_count + 2, FaultKind.FAIL_AFTER))  # it closes a ledger, creates one, names it
    with pytest.raises(StoreError):
        older.publish(batch(b"2"))
    errors = []

    def publish(name):
        if name == "fence":
            with pytest.raises(LogFencedError) as caught:
                older.publish(batch(b"lost"))
            errors.append(caught.value)

    newer = opened(before_each_call(MemoryStore(store.disk), publish))
    assert len(errors) == 1
    newer.publish(batch(b"3"))
    assert payloads_of(opened(store)) == [b"1", b"3"]


def test_opening_a_long_log_fences_one_ledger():
    store = MemoryStore()
    log = opened(store, entries_per_ledger_max=1)
    for number in range(50):
        log.publish(batch(b"%d" % number))
    before = store.mutation_count
    opened(store)
    assert store.mutation_count - before == 2  # the record and the fence


def test_a_log_that_is_found_is_only_read(stores):
    assert MessageLog.find(stores[0], topic="t") is None
    assert disk_state(stores[0]) == ([], None)
    log = opened(stores[0])
    log.publish(batch(b"1"))
    before = disk_state(stores[0])
    found = MessageLog.find(stores[1], topic="t")
    list(inspect_store(stores[1]))
    assert payloads_of(found) == [b"1"]
    with pytest.raises(ValueError, match="opened to be read"):
        found.publish(batch(b"lost"))
    assert disk_state(stores[0]) == before
    assert log.publish(batch(b"2")) == [Position(1, 1)]


@pytest.mark.parametrize("damage", [b"", b"ACKL", b"\xff" * 28, encode_log_record(LogRecord(9, 1))[:-1] + b"\xff"])
def test_a_record_that_cannot_be_read_is_replaced_and_every_ledger_fenced(damage):
    store = MemoryStore()
    older = opened(store)
    older.publish(batch(b"1"))
    version = store.metadata.get(log_path("t")).version
    store.metadata.put(log_path("t"), damage, expected_version=version)
    newer = opened(MemoryStore(store.disk), entries_per_ledger_max=1)
    for payload in (b"2", b"3"):
        with pytest.raises(LogFencedError):
            older.publish(batch(b"lost"))
        newer.publish(batch(payload))
    assert payloads_of(opened(store)) == [b"1", b"2", b"3"]


def test_a_record_of_a_newer_release_is_left_alone():
    store = MemoryStore()
    log = opened(store)
    newer = b"ACKL\x03" + bytes(40)
    store.metadata.put(log_path("t"), newer, expected_version=store.metadata.get(log_path("t")).version)
    before = disk_state(store)
    with pytest.raises(UnsupportedVersionError, match="version 3; this release reads version 2"):
        opened(store)
    assert disk_state(store) == before
    assert log.publish(batch(b"1"))


# The record


UNSIGNED = st.integers(0, 2**64 - 1)
SIZES = st.dictionaries(UNSIGNED, UNSIGNED, max_size=5).map(lambda sizes: tuple(sorted(sizes.items())))
SIZED = LogRecord(9, 17, 12, ((12, 5_000), (15, 70_000)))
GOLDEN_RECORDS = {
    "2": SIZED,
    "2-times": SIZED._replace(published_ms=((12, 1_790_000_000_000), (15, 1_790_000_000_500))),
}


@given(st.builds(LogRecord, UNSIGNED, st.none() | st.integers(0, 2**63 - 1), UNSIGNED, SIZES, SIZES))
def test_a_record_comes_back_as_it_was_written(record):
    assert decode_log_record(encode_log_record(record)) == record


@pytest.mark.parametrize("name", GOLDEN_RECORDS)
def test_the_golden_record_is_what_is_written_and_read(name):
    data = (GOLDEN / f"log-record-v{name}.bin").read_bytes()
    assert decode_log_record(data) == GOLDEN_RECORDS[name]
    assert encode_log_record(GOLDEN_RECORDS[name]) == data


def sealed(covered):
    return covered + struct.pack("<I", google_crc32c.value(covered))


def test_a_record_whose_lengths_or_ids_are_wrong_is_refused():
    new = encode_log_record(SIZED)[:-4]
    swapped = new[:36] + new[52:] + new[36:52]
    damaged = [new[:24], new[:35], new[:-1], new + b"\0", new[:-16], new[:4] + b"\0" + new[5:], swapped]
    timed = (GOLDEN / "log-record-v2-times.bin").read_bytes()[:-4]
    damaged += [timed[:-1], timed[:-32] + timed[-16:] + timed[-32:-16]]
    for covered in damaged:
        with pytest.raises(CorruptStateError, match="message log record: at byte"):
            decode_log_record(sealed(covered))


# Any number of owners, with faults, in any order


class Owners(RuleBasedStateMachine):
    """Every position that a publish returned is in the log of each later owner, with its payload."""

    @initialize()
    def begin(self):
        self.store = MemoryStore()
        self.acknowledged, self.numbers, self.owners = {}, count(), []
        self.open()

    @rule(faults=st.sets(st.integers(0, 4), max_size=2), kind=st.sampled_from(FAULTS))
    def open(self, faults=frozenset(), kind=FaultKind.FULL):
        store = MemoryStore(self.store.disk, faults=[Fault(number, kind) for number in faults])
        with suppress(StoreError):
            log = MessageLog.open(store, topic="t", entries_per_ledger_max=5)
            assert self.acknowledged.keys() <= set(positions_of(log))
            self.owners.append((log, store))

    @precondition(lambda self: self.owners)
    @rule(
        data=st.data(),
        size=st.integers(1, 4),
        faults=st.sets(st.integers(0, 4), max_size=2),
        kind=st.sampled_from(FAULTS),
    )
    def publish(self, data, size, faults, kind):
        number = data.draw(st.integers(0, len(self.owners) - 1))
        log, store = self.owners[number]
        for ahead in sorted(faults):
            store.inject(Fault(store.mutation_count + ahead, kind))
        payloads = [b"%d" % next(self.numbers) for _ in range(size)]
        with suppress(StoreError, LogFencedError):
            positions = log.publish(batch(*payloads))
            assert number == len(self.owners) - 1
            assert positions_of(log) == positions_of(MessageLog.find(self.store, topic="t"))
            assert not self.acknowledged.keys() & set(positions)
            self.acknowledged |= dict(zip(positions, payloads, strict=True))

    @invariant()
    def every_acknowledged_message_is_in_the_log(self):
        found = MessageLog.find(self.store, topic="t")
        assert self.acknowledged.keys() <= (set() if found is None else set(positions_of(found)))
        messages = [] if found is None else found.read(list(self.acknowledged))
        assert [message.payload for message in messages] == list(self.acknowledged.values())


TestOwners = Owners.TestCase
