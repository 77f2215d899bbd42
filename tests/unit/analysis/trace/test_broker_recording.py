"""Recordings of the broker interceptor become traces; foreign bytes are refused by file and line."""

import gzip
import json
import random
import zlib
from pathlib import Path

import pytest

from ackstate.analysis.estimate.engine import LocalSource
from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.trace.broker_recording import FORMAT, read_recording
from ackstate.analysis.trace.check import check_events
from ackstate.analysis.trace.convert import convert
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.errors import AckStateError, UnsupportedVersionError
from ackstate.position import Position
from command_line import run
from trace_files import read_back

VECTORS = Path(__file__).parents[3] / "vectors" / "interceptor"
T0 = 1_700_000_000_000
TOPIC = "persistent://public/default/t"


def start(life="one", ts_ms=T0, **config):
    return {
        "kind": "start", "format": FORMAT, "version": 1, "ts_ms": ts_ms, "broker": "host", "life": life,
        "timer_first_ms": T0, "timer_last_ms": T0, "config": config,
    }  # fmt: skip


CONSUMER = {"kind": "subject", "subject": 0, "topic": TOPIC, "subscription": "s", "consumer": "c", "type": "Shared"}
LOG = {"kind": "subject", "subject": 1, "topic": TOPIC}


def opened(at, mark_delete="3:-1", deleted="[]"):
    ts_ms = T0 + at
    return {
        "kind": "consumer", "subject": 0, "ts_ms": ts_ms, "opened_ms": ts_ms, "mark_delete": mark_delete,
        "deleted": deleted,
    }  # fmt: skip


def sent(at, *entries, messages=1, kind="deliver"):
    subject = 1 if kind == "publish" else 0
    return {
        "kind": kind, "subject": subject, "ts_ms": T0 + at, "until_ms": T0 + at, "messages": messages,
        "entries": list(entries),
    }  # fmt: skip


def ack(at, *entries, before=(-1, -1), after=None, kind="Individual", received=None):
    return {
        "kind": "ack", "subject": 0, "ts_ms": T0 + at, "received_ms": T0 + (at if received is None else received),
        "type": kind, "before": list(before), "after": list(before if after is None else after),
        "entries": list(entries),
    }  # fmt: skip


def look(at, ledger_id, begun, written, mark_delete):
    return {
        "kind": "look", "subject": 0, "ts_ms": T0 + at, "ledger_id": ledger_id, "begun": begun, "written": written,
        "mark_delete": mark_delete,
    }  # fmt: skip


def mark(kind, at, **more):
    return {"kind": kind, "ts_ms": T0 + at, **more}


def written(directory, *lines, number=0):
    """Write a file of a killed broker, whose compressed stream has no end; return the directory."""
    directory.mkdir(exist_ok=True)
    packer = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    data = packer.compress("".join(f"{json.dumps(line)}\n" for line in lines).encode())
    (directory / f"ackstate-{number}.jsonl.gz").write_bytes(data + packer.flush(zlib.Z_SYNC_FLUSH))
    return directory


KILLED = (
    start(), CONSUMER, LOG, opened(0), sent(1, [3, 0, 9], kind="publish"), sent(2, [3, 0, 9]),
    ack(10, [3, 0, 1], [3, 4, 5]), look(50, 7, 1, 1, "3:1"), ack(60, [3, 7, 7], before=[7, 1], after=[7, 1]),
    mark("alive", 100),
)  # fmt: skip
AGAIN = (
    start("two", T0 + 5_000), CONSUMER, opened(5_100, "3:1", "[(3:3..3:5]]"), sent(5_200, [3, 2, 3], [3, 6, 9]),
    ack(5_300, [3, 7, 7]), mark("end", 5_400),
)  # fmt: skip


def events_of(recording, trace, subscription="s"):
    """Convert a recording, and return each event as time, kind, ledger, first and last entry."""
    convert([recording], trace)
    return [
        (each.ts_ms - T0, each.kind.name.lower(), *each[2:5]) for each in read_back(trace)[TOPIC, subscription]
    ]  # fmt: skip


def entries(*told, ledger_id=3):
    """Spell events out: of time, kind and maybe first and last entry."""
    return [(*each, *(-1, -1, -1)) if len(each) == 2 else (*each[:2], ledger_id, *each[2:]) for each in told]


def test_a_kill_and_what_it_redelivers(tmp_path):
    recording = written(tmp_path / "r", *KILLED)
    written(recording, *AGAIN, number=1)
    assert events_of(recording, tmp_path / "trace") == entries(
        (2, "deliver", 0, 9), (10, "ack", 0, 1), (10, "ack", 4, 5), (50, "persist_begun"), (50, "persist_ended"),
        (60, "ack", 7, 7), (100, "crash"), (5_100, "recover"), (5_100, "redeliver", 7, 7), (5_200, "deliver", 2, 3),
        (5_200, "deliver", 6, 9), (5_300, "ack", 7, 7),
    )  # fmt: skip
    found = check_events(tmp_path / "trace")
    assert (found.events, found.dropped_events) == (13, 0)
    # The unit of a trace is entries.
    assert read_back(tmp_path / "trace")[TOPIC, ""] == [Event(T0 + 1, EventKind.PUBLISH, 3, 0, 9)]


@pytest.mark.parametrize("broker", ["host", "another"])
def test_a_broker_dies_at_its_last_line_whichever_broker_is_next(tmp_path, broker):
    """It writes a line while it lives, even when nothing happens; then it is down for an hour."""
    hour = 3_600_000
    recording = written(tmp_path / "r", *KILLED, mark("alive", 60_000))
    again = (CONSUMER, opened(hour + 100, "3:1", "[(3:3..3:5]]"), mark("end", hour + 200))
    written(recording, start("two", T0 + hour) | {"broker": broker}, *again, number=1)
    assert events_of(recording, tmp_path / "trace")[-3:] == entries(
        (60_000, "crash"), (hour + 100, "recover"), (hour + 100, "redeliver", 7, 7)
    )


BEGIN = (start(), CONSUMER, opened(0), sent(1, [3, 0, 9]))
LIMIT = {"managedLedgerMaxUnackedRangesToPersist": "1", "managedLedgerPersistIndividualAckAsLongArray": "false"}
# Lines of a recording, and the events that they become after the delivery of 3:0 to 3:9.
STORIES = {
    # The second record was begun by the second ack; the third is never seen to be written.
    "a record covers the acks before it": (
        [*BEGIN, ack(10, [3, 1, 1]), look(20, 7, 1, 1, "3:-1"), ack(30, [3, 2, 2], before=[7, 1], after=[7, 2]),
         look(40, 7, 2, 2, "3:-1"), ack(50, [3, 3, 3], before=[7, 2], after=[7, 3])],
        [(10, "ack", 1, 1), (20, "persist_begun"), (20, "persist_ended"), (30, "ack", 2, 2), (30, "persist_begun"),
         (40, "persist_ended"), (50, "ack", 3, 3), (50, "persist_begun")],
    ),
    "a record that was not seen to be written is under way": (
        [*BEGIN, ack(10, [3, 1, 1]), look(20, 7, 2, 1, "3:-1")], [(10, "ack", 1, 1), (20, "persist_begun")],
    ),
    "a look may come before the ack that began its record": (
        [*BEGIN, ack(10, [3, 1, 1]), look(20, 7, 1, 1, "3:-1"), look(31, 7, 2, 2, "3:-1"),
         ack(30, [3, 2, 2], before=(7, 1), after=(7, 2))],
        [(10, "ack", 1, 1), (20, "persist_begun"), (20, "persist_ended"), (31, "persist_begun"), (31, "persist_ended"),
         (31, "ack", 2, 2), (31, "persist_begun"), (31, "persist_ended")],
    ),
    "acks of a batch from before are known from its delivery": (
        [*BEGIN[:-1], sent(1, [3, 0, 0, [0b1000]], messages=4), ack(10, [3, 0, 0, [0b0111]])], [(10, "ack", 0, 0)],
    ),
    "a batch is acked when all of its messages are": (
        [*BEGIN[:-1], sent(1, [3, 0, 1], messages=4), ack(10, [3, 0, 0, [0b1010]]), ack(20, [3, 0, 0, [0b0101]]),
         ack(30, [3, 1, 1, [0b1]])],
        [(20, "ack", 0, 0)],
    ),
    # 4.2 keeps one range more than the limit; the new range displaces one that was durable.
    # 5.0 does not: the record has as many as the limit.
    **{
        f"the limit on ranges of {release} cuts records": (
            [start(**LIMIT, pulsarVersion=release), *BEGIN[1:], ack(10, [3, 3, 3], [3, 5, 5], [3, 7, 7]),
             look(20, 7, 1, 1, "3:-1")],
            [(10, "ack", 3, 3), (10, "ack", 5, 5), (10, "ack", 7, 7), (20, "persist_begun"),
             *((20, "cut_off", each, each) for each in cut), (20, "persist_ended")],
        )
        for release, cut in (("4.2.4", [7]), ("5.0.0-M1", [5, 7]), ("5.0.1", [5, 7]), ("a build", [7]))
    },
    "the limit on ranges cuts records": (
        [start(**LIMIT), *BEGIN[1:], ack(10, [3, 3, 3], [3, 5, 5], [3, 7, 7]), look(20, 7, 1, 1, "3:-1"),
         ack(30, [3, 1, 1], before=(7, 1), after=(7, 2)), look(40, 7, 2, 2, "3:-1")],
        [(10, "ack", 3, 3), (10, "ack", 5, 5), (10, "ack", 7, 7), (20, "persist_begun"), (20, "cut_off", 7, 7),
         (20, "persist_ended"), (30, "ack", 1, 1), (30, "persist_begun"), (30, "cut_off", 7, 7),
         (30, "displaced", 5, 5), (40, "persist_ended")],
    ),
    "a seek resets the cursor": (
        [*BEGIN, ack(10, [3, 0, 4]), {"kind": "seek", "subject": 0, "ts_ms": T0 + 20, "to": [3, 2]},
         opened(30, "3:1"), ack(40, [3, 2, 2])],
        [(10, "ack", 0, 4), (30, "reset"), (30, "redeliver", 2, 4), (40, "ack", 2, 2)],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "events"), STORIES.values(), ids=STORIES)
def test_each_story_has_its_events(tmp_path, lines, events):
    _, *found = events_of(written(tmp_path / "r", *lines), tmp_path / "trace")
    assert found == entries(*events)


def test_the_first_record_of_a_ledger_may_have_an_older_mark_delete_position(tmp_path, capsys):
    """The record has the position before the second ack, and the ranges after it."""
    lines = [
        CONSUMER, LOG, opened(0), sent(1, [3, 0, 9], kind="publish"), sent(2, [3, 0, 9]), ack(10, [3, 1, 1], [3, 5, 5]),
        ack(11, [3, 0, 0], after=(7, 0)), ack(12, [3, 8, 8], before=(7, 0)), look(20, 7, 0, 0, "3:-1"),
    ]  # fmt: skip
    recording = written(tmp_path / "r", start(), *lines, mark("alive", 100))
    again = [CONSUMER, opened(5_100, "3:-1", "[(3:4..3:5]]"), mark("end", 5_400)]
    written(recording, start("two", T0 + 5_000), *again, number=1)
    convert([recording], tmp_path / "trace")
    events = read_back(tmp_path / "trace")[TOPIC, "s"]
    assert [(each.kind.name.lower(), each.first_entry, each.last_entry) for each in events[4:]] == [
        ("persist_begun", -1, -1), ("ack", 8, 8), ("persist_failed", -1, -1), ("persist_begun", -1, -1),
        ("held_back", 0, 1), ("held_back", 8, 8), ("persist_ended", -1, -1), ("crash", -1, -1), ("recover", -1, -1),
        ("redeliver", 0, 1), ("redeliver", 8, 8),
    ]  # fmt: skip
    status, output, _ = run(capsys, "redelivery", tmp_path / "trace", "--engine", "local", "--json")
    (crash,) = json.loads(output)["subscriptions"][0]["crashes"]
    assert (status, crash["at_crash_if_written"], crash["at_crash"]) == (0, 3, 3)


def test_a_cumulative_ack_covers_the_ledgers_below(tmp_path):
    recording = written(
        tmp_path / "r", start(), CONSUMER, LOG, opened(0), sent(1, [3, 0, 4], [5, 0, 9], kind="publish"),
        ack(10, [5, 2, 2], kind="Cumulative"), ack(20, [5, 4, 4, [1]], kind="Cumulative"),
    )  # fmt: skip
    convert([recording], tmp_path / "trace")
    assert [each[2:5] for each in read_back(tmp_path / "trace")[TOPIC, "s"]] == [(3, 0, 4), (5, 0, 2), (5, 3, 3)]


def published_and_named(trace):
    """Return the time at which each entry was published, and that at which a subscription named it first."""
    published, named = {}, {}
    for (_, subscription), events in read_back(trace).items():
        for each in events:
            found = named if subscription else published
            for entry_id in range(each.first_entry, each.last_entry + 1) if each.ledger_id >= 0 else ():
                found.setdefault((each.ledger_id, entry_id), each.ts_ms)
    return published, named


@pytest.mark.parametrize(("recording", "at_crash"), [("killed-before-a-write", 10), ("killed-under-load", 0)])
def test_publish_lines_that_a_kill_took_with_it_are_missed_by_nobody(tmp_path, capsys, recording, at_crash):
    convert([VECTORS / recording], tmp_path / "trace")
    found = check_events(tmp_path / "trace")
    assert (found.kinds["crash"], found.kinds["recover"]) == (1, 1)
    published, named = published_and_named(tmp_path / "trace")
    assert named.keys() <= published.keys()
    status, output, _ = run(capsys, "redelivery", tmp_path / "trace", "--engine", "local", "--json")
    (crash,) = json.loads(output)["subscriptions"][0]["crashes"]
    assert (status, crash["at_crash"]) == (0, at_crash)
    assert run(capsys, "sweep", tmp_path / "trace", "--engine", "local", "--json").status == 0


def test_entries_without_a_publish_line_are_published_when_they_are_first_named(tmp_path):
    """Known are 3:0-1 and 3:6-7, and that ledger 5 exists; the rest is delivered, or acked in one way or another."""
    recording = written(
        tmp_path / "r", start(), CONSUMER, LOG, opened(0), sent(1, [3, 0, 1], kind="publish"),
        sent(2, [3, 0, 3]), ack(3, [3, 4, 4]), sent(4, [3, 6, 7], kind="publish"), sent(5, [5, 0, 0, [1]], messages=4),
        ack(6, [5, 1, 1, [0b100]]), ack(7, [5, 3, 3], kind="Cumulative"),
    )  # fmt: skip
    written(recording, start("two", T0 + 1_000), CONSUMER, opened(1_001, "5:1", "[(5:4..5:6]]"), number=1)
    convert([recording], tmp_path / "trace")
    assert [(each.ts_ms - T0, *each[2:5]) for each in read_back(tmp_path / "trace")[TOPIC, ""]] == [
        (1, 3, 0, 1), (2, 3, 2, 3), (3, 3, 4, 4), (4, 3, 6, 7), (5, 5, 0, 0),
        (7, 3, 5, 5), (7, 5, 1, 3), (1_001, 5, 5, 6),
    ]  # fmt: skip
    check_events(tmp_path / "trace")


def recorded_lives(rng):
    """Return files of two brokers that have a topic in turn and are killed, whose clocks differ, as lists of lines."""
    files, clocks = [], {"host": 0, "elsewhere": rng.choice([0, 0, -700, 700])}
    at, ledger_id, entry_id = 0, 3, 0
    mark_delete, acked = Position(3, -1), set()
    for number in range(4):
        broker = rng.choice(sorted(clocks))
        at += 1_000
        skew = clocks[broker]
        lines = [{**start(f"life {number}", T0 + at + skew), "broker": broker}, CONSUMER, LOG]
        durable = sorted(each for each in acked if rng.random() < 0.8)
        acked = set(durable)
        runs = ",".join(f"({ledger}:{entry - 1}..{ledger}:{entry}]" for ledger, entry in durable)
        lines.append(opened(at + skew, str(mark_delete), f"[{runs}]"))
        record = 0
        for _ in range(rng.randint(3, 12)):
            at += rng.randint(0, 40)
            count = rng.randint(1, 5)
            entries = [ledger_id, entry_id, entry_id + count - 1]
            words = rng.choice([[], [], [[rng.getrandbits(4)]]])
            more = [
                sent(at + skew + 1, entries), sent(at + skew, entries, kind="publish"),
                ack(at + skew + 2, [ledger_id, entry_id, entry_id, *words], before=(7 + number, record - 1),
                    after=(7 + number, record), kind=rng.choice(["Individual", "Individual", "Cumulative"])),
                look(at + skew + 3, 7 + number, record, record - rng.randint(0, 1), str(mark_delete)),
            ]  # fmt: skip
            rng.shuffle(more)
            lines += more
            acked.add((ledger_id, entry_id))
            record += rng.randint(0, 1)
            entry_id += count
            if rng.random() < 0.2:
                ledger_id, entry_id = ledger_id + 1, 0
        files.append(lines)
    return files


@pytest.mark.parametrize("seed", range(60))
def test_whatever_lines_are_lost_the_recording_converts(tmp_path, seed):
    """A kill takes lines of any kind with it, a file may be cut anywhere, and a cursor's opening be dropped."""
    rng = random.Random(seed)
    share = rng.choice([0.1, 0.4, 0.9])
    recording = tmp_path / "r"
    for number, lines in enumerate(recorded_lives(rng)):
        lost = rng.choice([{"publish"}, {"publish", "deliver"}, {"deliver", "ack", "look"}, {"publish", "consumer"}])
        kept = [each for each in lines if each["kind"] not in lost or rng.random() > share]
        written(recording, *kept, number=number)
        file = recording / f"ackstate-{number}.jsonl.gz"
        if rng.random() < 0.5:
            file.write_bytes(file.read_bytes()[: rng.randint(150, 2_000)])
    convert([recording], tmp_path / "trace")
    check_events(tmp_path / "trace")
    published, named = published_and_named(tmp_path / "trace")
    assert named.keys() <= published.keys()
    results = estimates(LocalSource.of(tmp_path / "trace"), [None, Policy.from_mapping({"flush_interval_ms": 50})])
    assert results.collect()


def test_dropped_events_are_reported_for_good(tmp_path):
    recording = written(tmp_path / "r", *KILLED, mark("dropped", 200, events=7))
    assert convert([recording], tmp_path / "trace").dropped == 7
    found = check_events(tmp_path / "trace")
    assert found.dropped_events == 7
    assert "7 events dropped" in "\n".join(found.lines())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "it is not JSON"),
        ("[1]", "it must be a JSON object"),
        ("[" * 100_000, "it is not JSON"),
        ({"kind": "ack"}, "the field ts_ms is missing"),
        ({**ack(1, [3, 0, 0]), "ts_ms": "1"}, "ts_ms must be a whole number"),
        ({**ack(1, [3, 0, 0]), "ts_ms": 10**30}, "ts_ms must be a whole number"),
        ({**ack(1, [3, 0, 0]), "ts_ms": True}, "ts_ms must be a whole number"),
        ({**ack(1, [3, 0, 0]), "subject": 9}, "subject 9 was not introduced"),
        ({**ack(1, [3, 0, 0]), "subject": 1}, "ack must concern a consumer"),
        ({**ack(1, [3, 0, 0]), "type": "Other"}, "type must be one of"),
        ({**ack(1, [3, 0, 0]), "before": [1]}, "before must be a list of 2"),
        (ack(1, [3, 5, 4]), "entries[0] must be a run"),
        (ack(1, [3, 0, 2**32 - 1]), "entries[0] must be a run"),
        (ack(1, [3, 0, 2**32]), "entries[0] must be a whole number"),
        (ack(1, [-1, 0, 0]), "entries[0] must be a whole number"),
        (ack(1, [3, 0]), "entries[0] must be [ledger"),
        (ack(1, [3, 0, 1, [1]]), "entries[0] must be one entry"),
        (ack(1, [3, 0, 0, [2**63]]), "entries[0] must be a whole number"),
        (ack(1, [3, 0, 0, [0] * 20_000]), "entries[0] must be one entry"),
        (opened(1, mark_delete="x"), "mark_delete must be a position"),
        (opened(1, deleted="[(3:1..3:2] junk]"), "deleted must be ranges"),
        (opened(1, deleted=f"[(3:1..3:{10**40}]]"), "deleted must be ranges"),
        (look(1, -1, 0, 0, None), "ledger_id must be a whole number"),
        (mark("dropped", 1, events=-1), "events must be a whole number"),
        (mark("other", 1), "kind 'other' is unknown"),
        (start(), "only line of the kind start"),
        ({**LOG, "topic": ""}, "topic must not be empty"),
        ({**LOG, "topic": "\ud800"}, "topic must be text in Unicode"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path, line, said):
    file = tmp_path / "ackstate-0.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    lines = [*(json.dumps(each) for each in (start(), CONSUMER, LOG)), text]
    file.write_text("".join(f"{each}\n" for each in lines))
    with pytest.raises(TraceError) as caught:
        convert([file], tmp_path / "trace")
    assert str(caught.value).startswith(f"{file}, line 4: ")
    assert said in str(caught.value)
    assert not (tmp_path / "trace").exists()


def test_a_recording_that_is_newer_mixed_or_too_large_is_refused(tmp_path):
    with pytest.raises(UnsupportedVersionError, match="version 2; this release reads up to 1"):
        convert([written(tmp_path / "newer", {**start(), "version": 2})], tmp_path / "trace")
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(TraceError, match=r"a.jsonl: not a recording of a broker"):
        convert([written(tmp_path / "r", *KILLED), tmp_path / "a.jsonl"], tmp_path / "trace")


def test_a_small_file_that_unpacks_to_much_is_refused(tmp_path):
    file = tmp_path / "ackstate-0.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps(start()).encode() + b"\n" + b" " * 10_000_000))
    with pytest.raises(TraceError, match="more than 1000000 bytes of text"):
        convert([file], tmp_path / "trace", text_bytes_max=1_000_000)


def test_damaged_bytes_raise_only_our_errors(tmp_path):
    """Bits of the compressed and of the plain form are flipped."""
    plain = "".join(f"{json.dumps(line)}\n" for line in KILLED).encode()
    rng = random.Random(1)
    refused = []
    for data in (plain, gzip.compress(plain)):
        for _ in range(100):
            damaged = bytearray(data)
            for _ in range(rng.randint(1, 3)):
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            file = tmp_path / "ackstate-0.jsonl"
            file.write_bytes(damaged)
            try:
                list(read_recording([file]))
            except AckStateError as error:
                refused.append(str(error))
    assert len(refused) > 100
    assert all(str(tmp_path) in each for each in refused)
