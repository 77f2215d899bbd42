"""A standalone Spark cluster on this machine's loopback address."""

import os
import re
import shlex
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

from ackstate.analysis.spark.session import class_archive_option

# Virtual machines start here that do not live long.
JAVA_OPTIONS = f"-XX:TieredStopAtLevel=1 {class_archive_option()}"


def environment_of(settings):
    """Return the variable that gives Spark its settings when a command starts it.

    A file of settings would change the class path, which the archive of classes would not fit then.
    """
    # A cluster would cut little data into 200 partitions.
    settings = {"spark.sql.shuffle.partitions": 2, **settings}
    options = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    return {"PYSPARK_SUBMIT_ARGS": shlex.join([*options, "pyspark-shell"])}


class Daemon:
    """A process of Spark's that says in its log when it is ready."""

    def __init__(self, name, log, *arguments):
        import pyspark

        home = Path(pyspark.__file__).parent
        self.log = log
        words = [home / "bin" / "spark-class", f"org.apache.spark.deploy.{name}"]
        words += ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0", *arguments]
        environment = os.environ | {
            "SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_WORKER_DIR": str(log.parent / "work"),
            "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,
            # For the executors, which take this environment from their worker.
            "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1",
        }  # fmt: skip
        with log.open("wb") as said:
            self.process = subprocess.Popen(words, stdout=said, stderr=said, env=environment)

    def await_line(self, pattern):
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(pattern, self.log.read_text()):
                return found
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def end(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def two_workers(directory):
    """Yield the URL of a master with two workers, and the workers."""
    daemons = []
    try:
        daemons.append(Daemon("master.Master", directory / "master.log"))
        url = daemons[0].await_line(r"Starting Spark master at (spark://\S+)")[1]
        for number in (1, 2):
            options = ("--cores", "1", "--memory", "1g", url)
            daemons.append(Daemon("worker.Worker", directory / f"worker{number}.log", *options))
        for worker in daemons[1:]:
            worker.await_line("Successfully registered with master")
        yield url, daemons[1:]
    finally:
        for daemon in reversed(daemons):
            daemon.end()
