"""The replay of recorded runs by Spark."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from ackstate.analysis.pulsar.recorded_run import parse_run
from ackstate.analysis.pulsar.replay import predict

VECTORS = Path(__file__).parents[3] / "vectors" / "broker-redelivery.jsonl.gz"


@pytest.fixture(scope="module")
def lines():
    with gzip.open(VECTORS, "rt") as opened:
        return opened.readlines()


@pytest.mark.spark
@pytest.mark.slow
def test_spark_answers_the_same(spark, lines, tmp_path):
    from ackstate.analysis.pulsar.replay_spark import predict_frame

    chosen = lines[:3]
    path = tmp_path / "runs.txt"
    path.write_text("".join(chosen))
    frame = spark.read.text(str(path))
    rows = {row.topic: row for row in predict_frame(frame).collect()}
    for line in chosen:
        prediction = predict(parse_run(line))
        row = rows.pop(prediction.topic)
        assert (row.low, row.high) == (prediction.low, prediction.high)
        assert [tuple(candidate) for candidate in row.candidates] == list(prediction.candidates)
    assert not rows
