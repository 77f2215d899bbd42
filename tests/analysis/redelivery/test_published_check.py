"""Acks of what was never published are named before anything is replayed."""

from __future__ import annotations

import pytest

from ackstate.analysis.redelivery.published_check import check_published
from ackstate.analysis.redelivery.trace_source import FileSource
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.analysis.trace.recorder import Frame

PUBLISH, ACK, MARK_DELETE, DELIVER = EventKind.PUBLISH, EventKind.ACK, EventKind.MARK_DELETE, EventKind.DELIVER
# What came before the first PUBLISH event is not known.
PUBLISHED = [Event(1, PUBLISH, 3, 10, 19), Event(2, PUBLISH, 4, 0, 4)]
SOUND = [
    Event(5, ACK, 2, 7, 7), Event(6, MARK_DELETE, 3, 0, 9), Event(6, ACK, 3, 19, 19), Event(7, DELIVER, 4, 0, 5),
    Event(7, ACK, 4, 4, 4), Event(8, EventKind.PERSIST_BEGUN),
]  # fmt: skip


@pytest.mark.spark
@pytest.mark.slow
def test_only_what_was_published_may_be_acked(spark, tmp_path):
    def check(name, *events, topic="t"):
        frames = [Frame("t", "", PUBLISHED), Frame("t", "s", SOUND), Frame(topic, "r", [*events, *SOUND[-1:]])]
        parquet.write_trace(frames, tmp_path / name)
        check_published(FileSource.of(spark, tmp_path / name), tmp_path / name)

    check("sound")
    check("another topic", Event(7, ACK, 9, 9, 9), topic="that says nothing of what it published")
    for name, event, said in (
        ("entry", Event(7, ACK, 4, 2, 5), "4:5 of t is acked, whose ledger was published up to entry 4"),
        (
            "mark-delete",
            Event(7, MARK_DELETE, 3, 0, 20),
            "3:20 of t is acked, whose ledger was published up to entry 19",
        ),
        ("ledger", Event(7, ACK, 5, 0, 0), "5:0 of t is acked, whose ledger was published not at all"),
    ):
        with pytest.raises(TraceError, match=f"{name}: {said}: ackstate trace check says more"):
            check(name, event)
