"""A recording of a cursor equals the cursor's own numbers, after every single step."""

import os
import random
import threading
from contextlib import suppress

import numpy as np
import pytest

from ackstate import AckStateError, CursorConfig, LedgerMap, ManagedCursor, MemoryStore, Position
from ackstate.analysis.estimate.engine import LocalSource
from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.replay.acked import EventChunk
from ackstate.analysis.replay.curves import RedeliveryFold
from ackstate.analysis.trace.convert import convert
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.analysis.trace.recording import (
    EntrySet,
    Frame,
    Recorder,
    Recording,
    histories,
    read_recording,
    torn_bytes,
)
from ackstate.cursor import CursorListener, persist_all
from ackstate.cursor.formats import Format
from ackstate.selection import Keep
from ackstate.stores.base import StoreError
from ackstate.stores.memory import Fault, FaultKind
from topics import NumberedTopic
from traces import replay

ACK = Event(5, EventKind.ACK, 3, 7, 7, 1)
FRAMES = [
    Frame("t", "s", [ACK]),
    Frame("t", "", [Event(6, EventKind.PUBLISH, 2**63 - 1, 0, 2**32 - 1, -1)]),
    Frame("persistent://ü", "a/b", [ACK, Event(-1, EventKind.CRASH)]),
]


def record(directory, frames):
    with Recorder(directory) as recorder:
        for frame in frames:
            recorder.record(*frame)
    return recorder.path


def test_a_frame_is_readable_before_the_recorder_is_closed(tmp_path):
    with Recorder(tmp_path) as recorder:
        recorder.record(*FRAMES[0])
        assert list(read_recording(tmp_path)) == FRAMES[:1]


def test_a_cut_anywhere_leaves_the_whole_frames_before_it(tmp_path):
    path = record(tmp_path, FRAMES)
    whole = path.read_bytes()
    assert torn_bytes(path) == 0
    seen, ends = [], {}
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        found = list(read_recording(tmp_path))
        assert found == FRAMES[: len(found)]
        seen.append(len(found))
        # Of a header that is cut short nothing is missing.
        begin = ends.setdefault(len(found), max(length, 12))
        assert torn_bytes(path) == max(0, length - begin)
    assert sorted(set(seen)) == list(range(len(FRAMES)))


def test_a_flipped_bit_of_each_byte_is_found_and_named(tmp_path):
    path = record(tmp_path, FRAMES)
    whole = path.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(AckStateError, match=r"000001\.events"):
            list(read_recording(tmp_path))


def test_a_directory_without_a_recording_and_other_kinds_of_events_are_refused(tmp_path):
    with pytest.raises(TraceError, match="no recording here"):
        list(read_recording(tmp_path))
    record(tmp_path, FRAMES)
    record(tmp_path, [Frame("t", "s", [Event(1, 15)])])
    with pytest.raises(TraceError, match=r"000002\.events: the frame at byte 12 is invalid: 15 is not a valid"):
        list(read_recording(tmp_path))


TOPIC, NAME = "persistent://public/default/t", "s"
CONFIGS = {
    "native": CursorConfig(),
    "native, 3 ranges": CursorConfig(range_count_max=3),
    "native, young": CursorConfig(become_old_ack_record_seconds=2),
    "native, young, 2 widest ranges": CursorConfig(
        become_old_ack_record_seconds=1, range_count_max=2, keep=Keep.WIDEST
    ),
    "Pulsar's, 2 widest ranges": CursorConfig(format=Format.PULSAR, range_count_max=2, keep=Keep.WIDEST),
    "Pulsar's, fall-back of 1 range": CursorConfig(format=Format.PULSAR, metadata_range_count_max=1),
}


def events_of(directory):
    return [event for frame in read_recording(directory) if frame.subscription == NAME for event in frame.events]


def folded(events, *, chunk=7):
    """Replay as Spark's workers do, in chunks, and return the redelivery of a crash after each event."""
    fold, found = RedeliveryFold(), []
    columns = np.array([event[:5] for event in events], np.int64)
    for begin in range(0, len(columns), chunk):
        found += fold.fold(EventChunk(*columns[begin : begin + chunk].T)).redelivery.tolist()
    return found


class Life:
    """A cursor that random things happen to, and its gauge after each, with the number of events recorded by then."""

    def __init__(self, directory, config, seed):
        self.chance = random.Random(seed)
        self.directory, self.config = directory, config
        self.ledgers = LedgerMap.from_counts({3: 40, 5: 40, 9: 40})
        self.store, self.now_ms, self.gauges = MemoryStore(), 1_000, []
        self.count = 0
        self.record()
        self.open()

    def record(self):
        """Begin a segment, and count the events recorded from now on."""
        self.recording = Recording(self.directory)
        record = self.recording.record

        def counted(topic, subscription, events):
            record(topic, subscription, events)
            self.count += len(events)

        self.recording.record = counted

    def open(self):
        self.cursor = ManagedCursor.open(
            self.store, topic=TOPIC, subscription=NAME, ledgers=self.ledgers, config=self.config, now_ms=self.now_ms
        )
        self.recording.follow(self.cursor, topic=TOPIC, subscription=NAME, now_ms=self.now_ms)
        self.note()

    def note(self):
        self.gauges.append((self.count, self.cursor.redelivery_if_crashed))

    def position(self):
        return Position(self.chance.choice((3, 5, 9)), self.chance.randrange(40))

    def step(self):
        self.now_ms += self.chance.choice((0, 1, 300))
        cursor, now_ms, position, choice = self.cursor, self.now_ms, self.position, self.chance.choice
        acts = {
            lambda: cursor.ack(position(), now_ms=now_ms): 8,
            lambda: cursor.ack_many([position() for _ in range(6)], now_ms=now_ms): 2,
            self.ack_entries: 2,
            lambda: cursor.ack_batch(position(), [choice((0, 1, 3))], now_ms=now_ms): 3,
            self.mark_delete: 1,
            lambda: cursor.delivered(position(), now_ms=now_ms - 1_500): 2,
            lambda: cursor.persist(now_ms=now_ms): 3,
            self.persist_in_vain: 1,
            lambda: persist_all([cursor], now_ms=now_ms): 1,
            lambda: cursor.reset(position(), now_ms=now_ms): 0.5,
            lambda: cursor.clear_backlog(now_ms=now_ms): 0.1,
            lambda: cursor.skip(self.chance.randrange(4), now_ms=now_ms): 0.3,
            lambda: cursor.promote(10, now_ms=now_ms): 0.5,
            self.crash: 0.5,
            self.close: 0.3,
        }
        self.chance.choices(list(acts), list(acts.values()))[0]()
        self.note()

    def ack_entries(self):
        ledger_id, entry_id = self.position()
        self.cursor.ack_entries(ledger_id, range(entry_id, min(40, entry_id + 4)), now_ms=self.now_ms)

    def mark_delete(self):
        position = self.chance.choice((self.position(), Position(5, self.chance.randrange(10))))
        words = self.chance.choice(([], [2], [1]))
        if position > self.cursor.mark_delete_position:
            self.cursor.mark_delete(position, now_ms=self.now_ms, unacked_words=words)

    def persist_in_vain(self):
        kind = self.chance.choice((FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER))
        for later in range(self.chance.choice((1, 3))):
            self.store.inject(Fault(self.store.mutation_count + later, kind))
        with suppress(StoreError):
            if self.chance.random() < 0.5:
                self.cursor.persist(now_ms=self.now_ms)
            else:
                persist_all([self.cursor], now_ms=self.now_ms)
        self.store.forget_faults()

    def crash(self):
        """The process dies: recorded events stay, and a new one opens both."""
        self.record()
        self.store = MemoryStore(self.store.disk)
        self.open()

    def close(self):
        self.cursor.close(now_ms=self.now_ms)
        self.recording.close()
        self.record()
        self.open()


def check_gauges(life):
    """Refuse a life whose trace says otherwise than its cursor, after any step."""
    events = events_of(life.directory)
    by_sets = [state.redelivery for state in replay(events)]
    assert folded(events) == by_sets
    told = [(count, gauge) for count, gauge in life.gauges if count]
    assert [by_sets[count - 1] for count, _ in told] == [gauge for _, gauge in told]
    assert [event.ts_ms for event in events] == sorted(event.ts_ms for event in events)
    history = histories(read_recording(life.directory))[TOPIC, NAME]
    recovered = EntrySet()
    for ledger, first, last in life.cursor.view.acked_runs():
        recovered.add_run(ledger, first, last + 1)
    assert list(history.accepted.runs()) == list(recovered.runs())
    return {event.kind for event in events}


def lived(directory, config, seed, *, steps=120):
    life = Life(directory, config, seed)
    for _ in range(steps):
        life.step()
    return life


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_gauge_of_the_cursor_is_that_of_the_trace_after_every_step(tmp_path, config):
    kinds = set().union(*(check_gauges(lived(tmp_path / str(seed), config, seed)) for seed in range(2)))
    assert kinds >= {
        EventKind.ACK, EventKind.MARK_DELETE, EventKind.PERSIST_BEGUN, EventKind.PERSIST_ENDED,
        EventKind.PERSIST_FAILED, EventKind.CRASH, EventKind.RECOVER, EventKind.REDELIVER, EventKind.RESET,
    }  # fmt: skip
    assert (EventKind.HELD_BACK in kinds) == (config.become_old_ack_record_seconds != 0)
    assert (EventKind.CUT_OFF in kinds) == (bool(config.range_count_max) or config.format is Format.PULSAR)
    assert EventKind.DISPLACED not in kinds or config.format is Format.PULSAR


class Noting(CursorListener):
    """A listener that asks the cursor for its gauge at every change, and passes the change on."""

    def __init__(self, cursor, follower):
        self.cursor, self.follower, self.gauges = cursor, follower, []

    def changed(self, change, runs, *, now_ms):
        self.follower.changed(change, runs, now_ms=now_ms)
        self.gauges += [None] * (max(len(runs), 1) - 1) + [self.cursor.redelivery_if_crashed]


def test_many_threads_are_recorded_in_the_order_in_which_they_took_effect(tmp_path):
    ledgers = LedgerMap.from_counts({3: 4_000})
    with Recording(tmp_path) as recording:
        cursor = ManagedCursor.open(MemoryStore(), topic=TOPIC, subscription=NAME, ledgers=ledgers, now_ms=0)
        recording.follow(cursor, topic=TOPIC, subscription=NAME, now_ms=0)
        (follower,) = cursor._listeners.of_changes
        noting = Noting(cursor, follower)
        cursor.remove_listener(follower)
        cursor.add_listener(noting)

        def ack(begin):
            for entry_id in range(begin, 2_000, 4):
                cursor.ack(Position(3, entry_id), now_ms=entry_id)

        def persist():
            cursor.persist(now_ms=0)
            while len(cursor.deleted) + cursor.mark_delete_position.entry_id < 1_900:
                cursor.persist(now_ms=0)

        threads = [threading.Thread(target=ack, args=(begin,)) for begin in range(4)]
        threads += [threading.Thread(target=persist) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = events_of(tmp_path)
    assert [state.redelivery for state in replay(events)] == noting.gauges
    assert {EventKind.PERSIST_BEGUN, EventKind.PERSIST_ENDED, EventKind.ACK} == {event.kind for event in events}
    assert [event.ts_ms for event in events] == sorted(event.ts_ms for event in events)


def test_a_subscription_says_what_it_sent_to_whom(tmp_path):
    topic = NumberedTopic()
    topic.publish(6)
    with Recording(tmp_path) as recording:
        recording.follow(topic.subscription.cursor, topic="t", subscription=NAME, now_ms=0)
        recording.published("t", [(0, 0, 5)], now_ms=0)
        topic.dispatch("a", 2, now_ms=1)
        topic.dispatch("b", 1, now_ms=2)
        topic.subscription.ack(topic.positions[1], now_ms=3)
        topic.subscription.ack_cumulative(topic.positions[2], now_ms=4)
        topic.subscription.close(now_ms=5)
    assert [(*event[:2], *event[3:]) for event in events_of(tmp_path)] == [
        (1, EventKind.DELIVER, 0, 1, 0), (2, EventKind.DELIVER, 2, 2, 1),
        (3, EventKind.ACK, 1, 1, -1), (4, EventKind.MARK_DELETE, 0, 2, -1),
        (5, EventKind.PERSIST_BEGUN, -1, -1, 1), (5, EventKind.PERSIST_ENDED, -1, -1, 1),
    ]  # fmt: skip


def test_a_recording_that_cannot_be_written_ends_and_the_cursor_goes_on(tmp_path, monkeypatch, caplog):
    ledgers = LedgerMap.from_counts({3: 9})
    cursor = ManagedCursor.open(MemoryStore(), topic=TOPIC, subscription=NAME, ledgers=ledgers, now_ms=0)
    recording = Recording(tmp_path)
    recording.follow(cursor, topic=TOPIC, subscription=NAME, now_ms=0)
    cursor.ack(Position(3, 4), now_ms=1)

    def full(descriptor, data):
        write(descriptor, data[:7])
        raise OSError(28, "No space left on device")

    write = os.write
    with monkeypatch.context() as context:
        context.setattr(os, "write", full)
        assert cursor.ack(Position(3, 5), now_ms=2).newly_acked
    assert cursor.ack(Position(3, 6), now_ms=3).newly_acked
    assert [event.first_entry for event in events_of(tmp_path)] == [4]
    assert "the recording ends here" in caplog.text
    with pytest.raises(OSError, match="No space left"):
        recording.close()


def test_a_cursor_is_followed_once_and_by_a_name(tmp_path):
    ledgers = LedgerMap.from_counts({3: 9})
    cursor = ManagedCursor.open(MemoryStore(), topic=TOPIC, subscription=NAME, ledgers=ledgers, now_ms=0)
    with Recording(tmp_path) as recording:
        with pytest.raises(ValueError, match="must not be empty"):
            recording.follow(cursor, topic=TOPIC, subscription="", now_ms=0)
        recording.follow(cursor, topic=TOPIC, subscription=NAME, now_ms=0)
        with pytest.raises(ValueError, match="one listener of class"):
            recording.follow(cursor, topic=TOPIC, subscription=NAME, now_ms=0)


# When a process died


class Processes:
    """Processes that one after the other have a store and record it; each is killed when the next one begins."""

    def __init__(self, directory):
        self.directory, self.disk, self.recording = directory, MemoryStore().disk, None
        self.begin()

    def begin(self):
        if self.recording is not None:
            self.recording._recorder.close()
        self.store, self.recording = MemoryStore(self.disk), Recording(self.directory)

    def open(self, now_ms, name=NAME):
        ledgers = LedgerMap.from_counts({1: 1_000})
        cursor = ManagedCursor.open(self.store, topic=TOPIC, subscription=name, ledgers=ledgers, now_ms=now_ms)
        self.recording.follow(cursor, topic=TOPIC, subscription=name, now_ms=now_ms)
        return cursor

    def lives(self, name=NAME):
        """Return the times and kinds of what began and ended lives of a cursor."""
        return [
            (event.ts_ms, event.kind.name.lower())
            for frame in read_recording(self.directory)
            for event in frame.events
            if frame.subscription == name and event.kind in {EventKind.CRASH, EventKind.RECOVER}
        ]

    def estimates(self, directory, *policies):
        convert([self.directory], directory)
        return estimates(LocalSource.of(directory), [None, *policies]).collect()


@pytest.fixture
def processes(tmp_path):
    return Processes(tmp_path / "recording")


# What happens to processes: a cursor is opened at a time and acks 10 ms later, it is closed, or the next one begins;
# and the times and kinds of what then began and ended lives of each cursor.
LIVES = {
    "a cursor that is opened late died when its process was replaced": (
        "open early 0; open late 0; next; open early 1000; open late 9000",
        {"early": [(1_000, "crash"), (1_000, "recover")], "late": [(1_000, "crash"), (9_000, "recover")]},
    ),
    # One of them opens nothing, and one has a clock that is slow.
    "each of several processes dies when the next one begins": (
        "open s 0; next; next; open s 1000; next; open s 500; next; open s 2000; next; open s 7000",
        {"s": [(at_ms, kind) for at_ms in (1_000, 1_010, 2_000, 7_000) for kind in ("crash", "recover")]},
    ),
    "a cursor that was closed has no crash": ("open s 0; close 40; next; open s 1000", {"s": [(1_000, "recover")]}),
}


@pytest.mark.parametrize(("story", "lives"), LIVES.values(), ids=LIVES)
def test_a_cursor_dies_when_the_next_process_begins(processes, story, lives):
    for step in story.split("; "):
        match step.split():
            case "open", name, now_ms:
                cursor = processes.open(int(now_ms), name)
                cursor.ack_entries(1, [5], now_ms=int(now_ms) + 10)
            case "close", now_ms:
                cursor.close(now_ms=int(now_ms))
            case _:
                processes.begin()
    assert {name: processes.lives(name) for name in lives} == lives
    times = [event.ts_ms for event in events_of(processes.directory)]
    assert times == sorted(times)


def test_the_last_state_of_a_process_that_never_came_back_counts_to_the_end(processes, tmp_path):
    processes.open(0, "gone").ack_entries(1, range(1, 200, 2), now_ms=0)
    processes.begin()
    processes.open(3_000_000, "other").ack_entries(1, [0], now_ms=3_600_000)
    assert processes.lives("gone") == []
    rows = processes.estimates(tmp_path / "trace")
    found = {(row["scope"], row["subscription"]): row["expected"] for row in rows}
    assert found["subscription", "gone"] == found["topic", ""] == found["total", ""] == 100
