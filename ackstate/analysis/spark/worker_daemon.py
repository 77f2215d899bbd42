"""The process from which Spark's Python workers on this machine are forked, with their imports already done.

Spark starts it by the setting ``spark.python.daemon.module``.
"""

from __future__ import annotations

import gc
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from ackstate.analysis.spark.without_pandas import without_pandas


def main() -> None:
    """Run until Spark ends."""
    sys.path[:] = _without_archives(sys.path)
    with without_pandas():
        from pyspark import daemon, worker  # noqa: F401, PLC0415 - pandas is hidden

        from ackstate.analysis.estimate import estimates, trace_source  # noqa: F401, PLC0415 - pandas is hidden

        # Spark makes each worker collect garbage after each task: exclude the imports.
        gc.collect()
        gc.freeze()
        daemon.manager()


def _without_archives(path: list[str]) -> list[str]:
    """Return the module path without the archives of Spark's sources, if Spark's installation is there.

    Each process would have to compile the sources of an archive.
    """
    others = [each for each in path if not each.endswith(".zip")]
    found = PathFinder.find_spec("pyspark", others)
    if found is None or found.origin is None or PathFinder.find_spec("py4j", others) is None:
        return path
    archives = Path(found.origin).parent / "python" / "lib"
    return [each for each in path if Path(each).parent != archives]


if __name__ == "__main__":
    main()
