"""Chunks that do not follow one another are named before anything is replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ackstate.analysis.redelivery.chunk_order import check_order
from ackstate.analysis.trace.events import TraceError

COLUMNS = "topic string, subscription string, chunk int, first_seq bigint, first_ts_ms bigint, last_ts_ms bigint"


def chunk(number, first_seq, first_ms, last_ms, *, count=2, subscription="s"):
    return ("t", subscription, number, first_seq, first_ms, last_ms, [3] * count)


SOUND = [chunk(0, 0, 5, 9), chunk(1, 2, 9, 9, count=1), chunk(2, 3, 20, 30), chunk(0, 0, 1, 2, subscription="")]


@pytest.mark.spark
@pytest.mark.slow
def test_only_chunks_that_follow_one_another_pass(spark):
    def check(chunks):
        check_order(spark.createDataFrame(chunks, f"{COLUMNS}, kind array<tinyint>").coalesce(1), Path("trace"))

    check(SOUND)
    for at, wrong, said in (
        (1, [], "chunk 2 of s of t has none before it"),
        (1, [SOUND[1], SOUND[1]], "chunk 1 of s of t is there twice"),
        (1, [chunk(1, 1, 9, 9, count=1)], "chunk 1 of s of t repeats a seq"),
        (1, [chunk(1, 3, 9, 9, count=1)], "chunk 1 of s of t comes after a gap in seq"),
        (2, [chunk(2, 3, 8, 30)], "chunk 2 of s of t begins before the one before it ended"),
        (3, [chunk(1, 0, 1, 2, subscription="")], "chunk 1 of t has none before it"),
    ):
        with pytest.raises(TraceError, match=f"trace: {said}: ackstate trace check says more"):
            check([*SOUND[:at], *wrong, *SOUND[at + 1 :]])
