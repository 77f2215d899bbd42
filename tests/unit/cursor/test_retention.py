"""The trim of a message log, and the report of its backlog."""

import pickle
from contextlib import closing

import pytest

from ackstate import (
    BacklogQuotaExceededError,
    CorruptStateError,
    LogFencedError,
    ManagedCursor,
    MemoryStore,
    Message,
    Position,
    SqliteStore,
    StoreError,
)
from ackstate.cursor.journal import cursor_path
from ackstate.dispatch.explain import explain_stored
from ackstate.inspect import Status, inspect_store
from ackstate.stores.base import Versioned
from ackstate.stores.memory import Fault, FaultKind
from ackstate.topic import BacklogPolicy, BacklogReport, MessageLog, Retention, backlog_report, trim_log
from ackstate.topic.log import decode_log_record, encode_log_record, log_owner, log_path

NOTHING_KEPT = Retention()
ENTRY_BYTES = 16 + 4  # of a message without a key and with four bytes


def opened(store, *, entries_per_ledger_max=10):
    return MessageLog.open(store, topic="t", entries_per_ledger_max=entries_per_ledger_max)


def publish(log, count=50, *, begin_ms=0):
    """Publish messages one by one, a millisecond apart, so that each ledger is filled."""
    return [log.publish([Message(b"%4d" % number)], now_ms=begin_ms + number)[0] for number in range(count)]


def cursor_of(store, log, name="s", *, config=None):
    return ManagedCursor.open(store, topic="t", subscription=name, ledgers=log.ledgers, config=config, now_ms=0)


def acked_up_to(cursor, position):
    """Ack everything up to a position, durably."""
    cursor.mark_delete(position, now_ms=0)
    cursor.persist(now_ms=0)


def ids_on_disk(store):
    return store.ledgers.owned_by(log_owner("t"))


@pytest.fixture
def topic():
    """A log of ledgers 1 and 3 to 6, ten messages each, and a subscription that has acked nothing."""
    store = MemoryStore()
    log = opened(store)
    cursor = cursor_of(store, log)
    positions = publish(log)
    assert list(log.ledgers) == ids_on_disk(store) == [1, 3, 4, 5, 6]
    return store, log, cursor, positions


def test_whole_ledgers_that_every_subscription_has_acked_durably_are_deleted(topic):
    store, log, cursor, positions = topic
    assert trim_log(log, NOTHING_KEPT, {}, now_ms=0) == 0
    for position, expected in (
        (positions[8], [1, 3, 4, 5, 6]),
        (positions[9], [3, 4, 5, 6]),
        (positions[15], [3, 4, 5, 6]),
        (positions[40], [6]),
        (positions[49], [6]),  # the last one stays: it is appended to
    ):
        acked_up_to(cursor, position)
        trim_log(log, NOTHING_KEPT, {}, now_ms=0)
        assert list(log.ledgers) == ids_on_disk(store) == expected
        cursor._check()
    assert log.publish([Message(b"next")]) == [Position(max(ids_on_disk(store)), 0)]


def test_acks_that_are_not_durable_free_nothing(topic):
    _, log, cursor, positions = topic
    cursor.mark_delete(positions[-1], now_ms=0)
    for cursors in ({}, {"s": cursor}):
        assert trim_log(log, NOTHING_KEPT, cursors, now_ms=0) == 0
    cursor.persist(now_ms=0)
    assert trim_log(log, NOTHING_KEPT, {}, now_ms=0) == 4


def test_a_subscription_that_is_not_open_holds_its_messages(topic):
    store, log, cursor, positions = topic
    other = cursor_of(store, log, "other")
    acked_up_to(other, positions[12])
    other.close(now_ms=0)
    acked_up_to(cursor, positions[-1])
    assert trim_log(log, NOTHING_KEPT, {}, now_ms=0) == 1
    report = backlog_report(log, NOTHING_KEPT, {})
    assert (report.held_by, report.held_from, report.entry_count) == ("other", positions[13], 37)


@pytest.mark.parametrize("kind", ["damaged record", "lost record", "beyond the log"])
def test_a_subscription_that_cannot_be_opened_holds_everything(topic, kind):
    store, log, cursor, positions = topic
    acked_up_to(cursor, positions[-1])
    path = cursor_path("t", "s")
    if kind == "damaged record":
        store.disk.values[path] = Versioned(b"ACKP", store.disk.values[path].version)
    elif kind == "lost record":
        del store.disk.values[path]
    marks = {"s": Position(99, 0)} if kind == "beyond the log" else None
    assert trim_log(log, NOTHING_KEPT, {}, now_ms=0, stored=marks) == 0
    report = backlog_report(log, NOTHING_KEPT, {}, stored=marks)
    assert (report.held_by, report.held_from, report.entry_count) == ("s", positions[0], 50)
    assert report.unreadable == (() if marks else ("s",))


@pytest.mark.parametrize(
    ("retention", "deleted"),
    [
        (Retention(size_bytes=1), 4),
        (Retention(size_bytes=10 * ENTRY_BYTES), 4),
        (Retention(size_bytes=10 * ENTRY_BYTES + 1), 3),
        (Retention(size_bytes=40 * ENTRY_BYTES), 1),
        (Retention(size_bytes=2**63 - 1), 0),
        (Retention(age_ms=91), 1),
        (Retention(age_ms=92), 0),
        (Retention(age_ms=71), 3),
        (Retention(age_ms=71, size_bytes=40 * ENTRY_BYTES), 1),
        (Retention(age_ms=91, size_bytes=1), 1),
    ],
)
@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_minimum_of_size_and_of_age_is_kept(topic, retention, deleted, is_reopened):
    store, log, cursor, positions = topic
    acked_up_to(cursor, positions[-1])
    if is_reopened:
        log = opened(store)
    assert trim_log(log, retention, {}, now_ms=100) == deleted
    assert len(ids_on_disk(store)) == 5 - deleted


def test_a_refused_number_names_its_argument():
    for wrong, error in (
        ({"size_bytes": -1}, ValueError),
        ({"age_ms": 1.5}, TypeError),
        ({"size_bytes": None}, TypeError),
    ):
        with pytest.raises(error, match=next(iter(wrong))):
            Retention(**wrong)
    with pytest.raises(ValueError, match=r"backlog_bytes_max must be in 0\.\..*got -1"):
        Retention(backlog_bytes_max=-1)
    with pytest.raises(TypeError, match="backlog_policy"):
        Retention(backlog_policy="producer_exception")


def test_only_the_owner_trims(topic):
    store, log, cursor, positions = topic
    acked_up_to(cursor, positions[-1])
    with pytest.raises(ValueError, match="opened to be read; open it to trim"):
        trim_log(MessageLog.find(store, topic="t"), NOTHING_KEPT, {}, now_ms=0)
    newer = opened(store)
    with pytest.raises(LogFencedError):
        trim_log(log, NOTHING_KEPT, {}, now_ms=0)
    assert ids_on_disk(store) == [1, 3, 4, 5, 6]
    with pytest.raises(TypeError):
        newer.trim("3")
    assert trim_log(newer, NOTHING_KEPT, {}, now_ms=0) == 4


def test_the_backlog_is_reported_with_its_holder_and_its_limit(topic):
    store, log, cursor, positions = topic
    acked_up_to(cursor, positions[9])
    acked_up_to(cursor_of(store, log, "fast"), positions[30])
    trim_log(log, NOTHING_KEPT, {}, now_ms=0)
    limited = Retention(backlog_bytes_max=40 * ENTRY_BYTES)
    report = backlog_report(log, limited, {})
    assert report == BacklogReport(40, 40 * ENTRY_BYTES, 40, 40 * ENTRY_BYTES, "s", positions[10], (), 40 * ENTRY_BYTES)
    assert not report.is_exceeded
    report.check("t")
    log.publish([Message(b"more")])
    report = backlog_report(log, limited, {})
    assert report.is_exceeded
    message = (
        "backlog of topic 't' must have at most 800 bytes .backlog_bytes_max., got 820; subscription 's' .* 3:0 on"
    )
    with pytest.raises(BacklogQuotaExceededError, match=message) as caught:
        report.check("t")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    acked_up_to(cursor, positions[14])  # half of a ledger, of which the average entry counts
    assert backlog_report(log, limited, {})[:2] == (36, 36 * ENTRY_BYTES)
    assert not backlog_report(log, limited, {}).is_exceeded
    acked_up_to(even := cursor_of(store, log, "even"), positions[14])
    assert backlog_report(log, limited, {"s": cursor, "even": even}).held_by == "even"  # the first by name
    assert BacklogPolicy("producer_exception") is BacklogPolicy.REFUSE_PUBLISH


def test_an_explanation_of_a_trimmed_log_has_no_lost_messages(topic):
    store, log, cursor, positions = topic
    acked_up_to(cursor, positions[19])
    cursor.ack(positions[22], now_ms=0)
    cursor.persist(now_ms=0)
    trim_log(log, NOTHING_KEPT, {}, now_ms=0)
    (found,) = inspect_store(store)
    holes = explain_stored(found.content, MessageLog.find(store, topic="t"), top=9, now_ms=0)
    assert (holes.backlog, [(each.first, each.entry_count) for each in holes.holes]) == (29, [(positions[20], 2)])


@pytest.mark.parametrize("failing", range(3))
def test_after_a_crash_within_a_trim_the_log_is_as_before_or_as_after(topic, failing):
    store, log, cursor, positions = topic
    acked_up_to(cursor, positions[20])
    store.inject(Fault(store.mutation_count + failing, FaultKind.FAIL_BEFORE))
    with pytest.raises(StoreError):
        trim_log(log, NOTHING_KEPT, {}, now_ms=0)
    survivor = MemoryStore(store.disk)
    assert [found.status for found in inspect_store(survivor)] == [Status.OK]
    expected = [1, 3, 4, 5, 6] if failing == 0 else [4, 5, 6]
    assert list(MessageLog.find(survivor, topic="t").ledgers) == expected
    log = opened(survivor)
    assert list(log.ledgers) == ids_on_disk(survivor) == expected
    reopened = cursor_of(survivor, log)
    assert reopened.reader.read(1) == [positions[21]]
    trim_log(log, NOTHING_KEPT, {}, now_ms=0)
    assert ids_on_disk(survivor) == [4, 5, 6]


def test_a_mark_delete_before_the_empty_last_ledger_holds_nothing(topic):
    store, log, cursor, positions = topic
    acked_up_to(cursor, positions[-1])
    empty_id = store.ledgers.create(log_owner("t"))  # as an owner leaves it that is taken over as it begins a ledger
    log = opened(store)
    acked_up_to(cursor_of(store, log), Position(empty_id, -1))
    report = backlog_report(log, NOTHING_KEPT, {})
    assert (report.held_by, report.entry_count, report.byte_count) == (None, 0, 0)
    assert trim_log(log, NOTHING_KEPT, {}, now_ms=0) == 5
    assert ids_on_disk(store) == [empty_id]


def test_a_ledger_that_cannot_be_read_counts_no_bytes(topic, monkeypatch):
    store, *_ = topic

    def damaged(*_):
        raise CorruptStateError("ledger", offset=0, expected="entries", found="none")

    monkeypatch.setattr(type(store.ledgers), "read", damaged)
    report = backlog_report(MessageLog.find(store, topic="t"), NOTHING_KEPT, {}, stored={})
    assert (report.log_entry_count, report.log_byte_count) == (50, 40 * ENTRY_BYTES)  # The record has the other sizes.


YEAR_MS = 365 * 24 * 3_600_000
NOW_MS = 50 * YEAR_MS


def trimmed_to(log, *, now_ms, age_ms=1_000):
    trim_log(log, Retention(age_ms=age_ms), {}, now_ms=now_ms, stored={})
    return list(log.ledgers)


@pytest.mark.parametrize("publish_time_ms", [0, 1, NOW_MS - YEAR_MS, NOW_MS + 3_000, NOW_MS + YEAR_MS, 2**63 - 1])
@pytest.mark.parametrize("odd", [range(1), range(9, 10), range(10, 20), range(30)])
@pytest.mark.parametrize("is_reopened", [False, True])
def test_the_age_of_a_ledger_goes_by_the_clock_of_the_broker(publish_time_ms, odd, is_reopened):
    store = MemoryStore()
    log = opened(store)
    for number in range(35):
        message = Message(b"x", publish_time_ms=publish_time_ms if number in odd else NOW_MS)
        log.publish([message], now_ms=NOW_MS + 10 * (number // 10))
    if is_reopened:
        log = opened(MemoryStore(store.disk))
    one, two, three, four = log.ledgers
    assert trimmed_to(log, now_ms=NOW_MS + 999) == [one, two, three, four]
    assert trimmed_to(log, now_ms=NOW_MS + 1_009) == [two, three, four]
    assert trimmed_to(log, now_ms=NOW_MS + 1_020) == [four]


@pytest.mark.parametrize("kind", ["time", "no time", "damaged record", "record without times"])
def test_a_ledger_of_unknown_time_is_kept_from_when_it_is_seen_first(kind):
    """The owner that appended to the last one crashed; or no times were given, or they were lost with the record."""
    store = MemoryStore()
    log = opened(store)
    for _ in range(25):
        log.publish([Message(b"x", publish_time_ms=1)], now_ms=None if kind == "no time" else NOW_MS)
    path, version = log_path("t"), store.metadata.get(log_path("t")).version
    record = decode_log_record(store.metadata.get(path).data)
    if kind == "damaged record":
        store.metadata.put(path, b"damage", expected_version=version)
    elif kind == "record without times":
        store.metadata.put(path, encode_log_record(record._replace(published_ms=())), expected_version=version)
    opened_ms = NOW_MS + 2_000
    log = MessageLog.open(MemoryStore(store.disk), topic="t", entries_per_ledger_max=10, now_ms=opened_ms)
    *closed, last = log.ledgers
    assert trimmed_to(log, now_ms=opened_ms) == ([last] if kind == "time" else [*closed, last])
    later = log.publish([Message(b"x")], now_ms=opened_ms + 500)[0].ledger_id  # which records all times
    for each in (log, MessageLog.open(MemoryStore(store.disk), topic="t", now_ms=opened_ms + 600)):
        assert trimmed_to(each, now_ms=opened_ms + 999)[-2:] == [last, later]
    assert trimmed_to(each, now_ms=opened_ms + 1_000) == [later]


def test_the_report_names_the_ledger_from_which_the_retention_keeps_the_log(topic):
    _, log, cursor, positions = topic  # of ledgers 1 and 3 to 6, published to until 9, 19, 29, 39 and 49
    acked_up_to(cursor, positions[24])

    def retained(retention, now_ms=100):
        return backlog_report(log, retention, {}, now_ms=now_ms).retained_ledger_id

    assert retained(NOTHING_KEPT) is None
    assert retained(Retention(age_ms=92)) == retained(Retention(size_bytes=50 * ENTRY_BYTES)) == 1
    assert retained(Retention(age_ms=91)) == 3
    assert retained(Retention(age_ms=81)) is None  # the subscription needs ledger 4
    assert retained(Retention(age_ms=1), now_ms=None) == 1  # none has an age without a time
    text = str(backlog_report(log, Retention(age_ms=91), {}, now_ms=100))
    assert "25 entries in 500 bytes, which subscription 's' needs from 4:5 on" in text
    assert "50 entries in 1000 bytes, which the retention keeps from ledger 3 on" in text
    acked_up_to(cursor, positions[49])
    assert retained(Retention(age_ms=62)) == 5
    assert retained(Retention(age_ms=1)) is None  # the last one stays in any case
    assert "retention" not in str(backlog_report(log, NOTHING_KEPT, {}))


def test_a_topic_that_is_published_to_acked_and_trimmed_for_ever_needs_bounded_space(tmp_path):
    """A hundred ledgers of 160 KiB; SQLite's write-ahead log takes up to 4 MiB of the space, and keeps it."""
    size_max = 0
    with closing(SqliteStore(tmp_path / "store")) as store:
        log = opened(store, entries_per_ledger_max=4)
        cursor = cursor_of(store, log)
        for _ in range(100):
            positions = log.publish([Message(b"x" * 40_960)] * 4)
            acked_up_to(cursor, positions[-1])
            trim_log(log, NOTHING_KEPT, {}, now_ms=0)
            size_max = max(size_max, sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file()))
        assert len(ids_on_disk(store)) == 1
    assert size_max < 5_500_000
