"""`ackstate spark-package` builds the zip and the job script for spark-submit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ackstate.analysis.cli import console
from ackstate.analysis.cli.options import path_argument


def spark_package(
    out: Annotated[Path, typer.Argument(metavar="DIR", parser=path_argument, help="Directory of both files.")],
) -> None:
    """Write ackstate.zip, for spark-submit's --py-files, and ackstate_job.py, for it to run.

    The dependencies of the package must be in the workers' Python, which
    spark.pyspark.python names. The arguments of the job are the words of a
    command, such as redelivery TRACE; docs/cluster.md has the whole line.
    """
    from ackstate.analysis.atomic_write import write_atomically
    from ackstate.analysis.spark.cluster import SCRIPT, write_package

    out.mkdir(parents=True, exist_ok=True)
    count = write_package(out / "ackstate.zip")
    write_atomically(out / "ackstate_job.py", SCRIPT)
    console.show(f"{out / 'ackstate.zip'}: {count} files", f"{out / 'ackstate_job.py'}")
