"""Real stores on this machine's loopback address: HDFS, a name node and a data node in one process; and one like S3."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from spark_daemons import environment_of

KEY, SECRET = "test-key", "test-secret"
_JARS = Path(sys.prefix, "share", "ackstate", "stores")
_STARTS_WITHIN_S = 120


def jars_of(name):
    """Return the jars of a set of `.ci/pom.xml`; skip the test where set-up could not fetch them."""
    found = sorted(map(str, _JARS.joinpath(name).glob("*.jar")))
    if not found or not (_JARS / ".stamp").exists():
        pytest.skip("no jars of the stores: bash .ci/setup stores")
    return found


def pyspark_jars(*patterns):
    import pyspark

    directory = Path(pyspark.__file__).parent / "jars"
    found = [str(path) for pattern in patterns for path in sorted(directory.glob(pattern))]
    assert len(found) >= len(patterns), f"of {patterns} pyspark has {found}: .ci/pom.xml has another Hadoop"
    return found


class RunningStore:
    """A store that runs.

    Attributes:
        url: Of an empty directory.
        environment: The variables that a client of it needs.
        process: Its process.
    """

    def __init__(self, url, environment, process):
        self.url, self.environment, self.process = url, environment, process


@contextmanager
def hdfs(directory):
    """Start HDFS."""
    jars = [*jars_of("hdfs"), *pyspark_jars(
        "hadoop-client-api-3.5.0.jar", "hadoop-client-runtime-3.5.0.jar", "slf4j-api-*.jar", "jcl-over-slf4j-*.jar",
        "snappy-java-*.jar",
    )]  # fmt: skip
    details, environment = directory / "details.json", environment_of({})
    words = ["-format", "-datanodes", "1", "-nnport", "0", "-httpport", "0", "-writeDetails", str(details)]
    with _running(directory, jars, "org.apache.hadoop.test.MiniDFSClusterManager", words) as (process, await_that):
        await_that(lambda: details.exists() and details.read_text().endswith("}"))
        yield RunningStore(f"hdfs://127.0.0.1:{json.loads(details.read_text())['namenode_port']}", environment, process)


@contextmanager
def s3(directory):
    """Start a server of S3 with an empty bucket."""
    from pyarrow.fs import S3FileSystem

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (directory / "data" / "bucket").mkdir(parents=True)
    settings = {
        "s3proxy.authorization": "aws-v2-or-v4", "s3proxy.endpoint": f"http://127.0.0.1:{port}",
        "s3proxy.identity": KEY, "s3proxy.credential": SECRET, "jclouds.provider": "filesystem-nio2",
        "jclouds.filesystem.basedir": str(directory / "data"),
    }  # fmt: skip
    (directory / "s3.conf").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    client_settings = {
        "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": settings["s3proxy.endpoint"],
        "AWS_REGION": "us-east-1",
    }  # fmt: skip
    spark_settings = {
        "spark.jars": ",".join(jars_of("hadoop-aws")), "spark.hadoop.fs.s3a.path.style.access": "true",
        # The workers of a cluster that was started before have not inherited them.
        **{f"spark.executorEnv.{name}": value for name, value in client_settings.items()},
    }  # fmt: skip
    environment = environment_of(spark_settings) | client_settings
    words = ["--properties", str(directory / "s3.conf")]
    with _running(directory, jars_of("s3proxy"), "org.gaul.s3proxy.Main", words) as (process, await_that):
        client = S3FileSystem(access_key=KEY, secret_key=SECRET, endpoint_override=settings["s3proxy.endpoint"])
        await_that(lambda: _listens(port))
        assert client.get_file_info("bucket").is_file is False
        yield RunningStore("s3a://bucket", environment, process)


def _listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def _running(directory, jars, main, words):
    """Run a Java program, and end it by its process id."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else "java"
    log = directory / "server.log"
    command = [java, "-XX:TieredStopAtLevel=1", "-Xmx512m", "-cp", os.pathsep.join(jars), main, *words]
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, cwd=directory)

    def await_that(is_ready):
        deadline = time.monotonic() + _STARTS_WITHIN_S
        while not is_ready():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    try:
        yield process, await_that
    finally:
        process.kill()
        process.wait()
