"""Reports the progress of Spark from its status tracker while a job runs."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

_EVERY_S = 0.2


@contextmanager
def tasks_shown(spark: SparkSession, show: Callable[[int, int], None]) -> Iterator[None]:
    """Call `show` periodically, while the block runs, with the completed and total tasks of the running stages.

    It is called from another thread, and not at all if Spark does not answer.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_ask, args=(spark, show, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _ask(spark: SparkSession, show: Callable[[int, int], None], ended: threading.Event) -> None:
    from py4j.protocol import Py4JError  # noqa: PLC0415 - needs the extra `spark`

    tracker = spark.sparkContext.statusTracker()
    while not ended.wait(_EVERY_S):
        try:
            stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
        except (Py4JError, OSError):
            return
        if running := [stage for stage in stages if stage is not None]:
            show(sum(stage.numCompletedTasks for stage in running), sum(stage.numTasks for stage in running))
