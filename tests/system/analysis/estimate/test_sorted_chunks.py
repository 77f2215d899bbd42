"""Chunks out of order and acks of unpublished entries are refused, whichever engine replays a trace."""

from functools import partial

import pytest

from ackstate.analysis.estimate.engine import LocalSource
from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.spark.session import readable_failures
from ackstate.analysis.trace import chunks as trace_chunks
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.analysis.trace.recording import Frame
from trace_files import read_rows, write_rows

PUBLISH, ACK, MARK_DELETE, DELIVER = EventKind.PUBLISH, EventKind.ACK, EventKind.MARK_DELETE, EventKind.DELIVER
# Entries before the first PUBLISH event are not known.
PUBLISHED = [Event(1, PUBLISH, 3, 10, 19), Event(2, PUBLISH, 4, 0, 4)]
SOUND = [
    Event(5, ACK, 2, 7, 7), Event(6, MARK_DELETE, 3, 0, 9), Event(6, ACK, 3, 19, 19), Event(7, DELIVER, 4, 0, 5),
    Event(7, ACK, 4, 4, 4), Event(8, EventKind.PERSIST_BEGUN),
]  # fmt: skip
WAYS = {
    "as recorded": lambda source: estimates(source, [None]).collect(),
    "a counted policy": lambda source: estimates(source, [Policy()]).collect(),
    "a cursor": lambda source: estimates(source, [Policy.from_mapping({"range_count_max": "1"})]).collect(),
}


def refused(source, way, path):
    with pytest.raises(TraceError) as caught, readable_failures(path):
        WAYS[way](source)
    return str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_only_what_was_published_may_be_acked(tmp_path, way):
    def source(name, *events, topic="t"):
        frames = [Frame("t", "", PUBLISHED), Frame("t", "s", SOUND), Frame(topic, "r", [*events, *SOUND[-1:]])]
        parquet.write_trace(frames, tmp_path / name)
        return LocalSource.of(tmp_path / name)

    WAYS[way](source("sound"))
    WAYS[way](source("another topic", Event(7, ACK, 9, 9, 9), topic="without an event of its published entries"))
    for name, event, said in (
        ("entry", Event(7, ACK, 4, 2, 5), "4:5 of t is acked, but the ledger was published up to entry 4"),
        ("upto", Event(7, MARK_DELETE, 3, 0, 20), "3:20 of t is acked, but the ledger was published up to entry 19"),
        ("ledger", Event(7, ACK, 5, 0, 0), "5:0 of t is acked, but the ledger was published not at all"),
    ):
        assert f"{said}: run ackstate trace check for details" in refused(source(name, event), way, tmp_path / name)


def first_seq(value):
    return lambda rows: rows | {"first_seq": value}


def earlier(by_ms):
    return lambda row: row | {
        "ts_ms": [ts_ms - by_ms for ts_ms in row["ts_ms"]], "first_ts_ms": row["first_ts_ms"] - by_ms,
        "last_ts_ms": row["last_ts_ms"] - by_ms,
    }  # fmt: skip


OUT_OF_ORDER = (
    ("repeats", "s", 1, first_seq(1), "chunk 1 of s of t repeats a seq"),
    ("gap", "s", 1, first_seq(3), "chunk 1 of s of t comes after a gap in seq"),
    ("first", "s", 0, first_seq(1), "chunk 0 of s of t comes after a gap in seq"),
    ("time", "s", 2, earlier(11), "chunk 2 of s of t begins before the previous chunk ended"),
    ("topic", "", 2, first_seq(5), "chunk 2 of t comes after a gap in seq"),
)


@pytest.mark.parametrize("way", [*WAYS, pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.slow])])
def test_only_chunks_that_follow_one_another_pass(request, tmp_path, monkeypatch, way):
    """Both engines look at chunks by the same code, whatever follows: of Spark one case is enough."""
    monkeypatch.setattr(trace_chunks, "CHUNK_EVENTS", 2)
    source_of, case_count = LocalSource.of, len(OUT_OF_ORDER)
    if way == "spark":
        from ackstate.analysis.spark.source import SparkSource

        source_of, way = partial(SparkSource.of, request.getfixturevalue("spark")), "a counted policy"
        case_count = 1
    acks = [Event(10 * entry + 5, ACK, 1, entry, entry) for entry in range(6)]
    published = [Event(entry, PUBLISH, 1, entry, entry) for entry in range(6)]
    parquet.write_trace([Frame("t", "", published), Frame("t", "s", acks)], tmp_path / "sound")
    WAYS[way](source_of(tmp_path / "sound"))
    sound = read_rows(tmp_path / "sound")
    for name, subscription, chunk, change, said in OUT_OF_ORDER[:case_count]:
        rows = [change(row) if (row["subscription"], row["chunk"]) == (subscription, chunk) else row for row in sound]
        (tmp_path / name).mkdir()
        write_rows(rows, tmp_path / name / "part-00000.parquet")
        told = refused(source_of(tmp_path / name), way, tmp_path / name)
        assert f"{said}: run ackstate trace check for details" in told
