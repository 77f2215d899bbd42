"""Predicts many recorded runs at once, on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from ackstate.analysis.pulsar.policy import PolicyName
from ackstate.analysis.pulsar.recorded_run import parse_run
from ackstate.analysis.pulsar.replay import predict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame

PREDICTION_COLUMNS = "topic string, low bigint, high bigint, candidates array<array<bigint>>, has_ack_types boolean"
"""Columns like the attributes of `Prediction`."""

_SCHEMA = pa.schema([
    ("topic", pa.string()),
    ("low", pa.int64()),
    ("high", pa.int64()),
    ("candidates", pa.list_(pa.list_(pa.int64()))),
    ("has_ack_types", pa.bool_()),
])  # fmt: skip


def predict_frame(
    lines: DataFrame, name: PolicyName = PolicyName.PULSAR_4, *, ledger_creation_ms: float | None = None
) -> DataFrame:
    """Predict the redelivery of killed brokers.

    Returns:
        `PREDICTION_COLUMNS`, one row per run, in any order. A line that is not a run fails the job.
    """
    return lines.select("value").mapInArrow(_predictions(name, ledger_creation_ms), PREDICTION_COLUMNS)


def _predictions(
    name: PolicyName, ledger_creation_ms: float | None
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def of_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row for each run, which is one line of the batches."""
        # One run at a time: a worker holds the candidates of only one run, for any size of a batch.
        for batch in batches:
            for line in batch.column(0):
                prediction = predict(parse_run(line.as_py()), name, ledger_creation_ms=ledger_creation_ms)
                row = {column: getattr(prediction, column) for column in _SCHEMA.names}
                yield pa.RecordBatch.from_pylist([row], schema=_SCHEMA)

    return of_batches
