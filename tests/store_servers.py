"""Real stores on this machine's loopback address: HDFS, a name node and a data node in one process; and one like S3."""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from java_server import ONE_COMPILER, JavaServer, listens
from spark_daemons import environment_of

KEY, SECRET = "test-key", "test-secret"
_JARS = Path(sys.prefix, "share", "ackstate", "stores")


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


@contextmanager
def hdfs(directory):
    """Start HDFS."""
    jars = [*jars_of("hdfs"), *pyspark_jars(
        "hadoop-client-api-3.5.0.jar", "hadoop-client-runtime-3.5.0.jar", "slf4j-api-*.jar", "jcl-over-slf4j-*.jar",
        "snappy-java-*.jar",
    )]  # fmt: skip
    details = directory / "details.json"
    words = ["-format", "-datanodes", "1", "-nnport", "0", "-httpport", "0", "-writeDetails", details]
    server = StoreServer(directory, jars, "org.apache.hadoop.test.MiniDFSClusterManager", *words)
    with server.running(lambda: details.exists() and details.read_text().endswith("}")):
        server.url = f"hdfs://127.0.0.1:{json.loads(details.read_text())['namenode_port']}"
        server.environment = environment_of({})
        yield server


@contextmanager
def s3(directory):
    """Start a server of S3 with an empty bucket."""
    from pyarrow.fs import S3FileSystem

    (directory / "data" / "bucket").mkdir(parents=True)
    words = ["--properties", directory / "s3.conf"]
    server = StoreServer(directory, jars_of("s3proxy"), "org.gaul.s3proxy.Main", *words)
    settings = {
        "s3proxy.authorization": "aws-v2-or-v4", "s3proxy.endpoint": f"http://{server.hosts}",
        "s3proxy.identity": KEY, "s3proxy.credential": SECRET, "jclouds.provider": "filesystem-nio2",
        "jclouds.filesystem.basedir": str(directory / "data"),
    }  # fmt: skip
    server.configure("s3.conf", settings)
    client_settings = {
        "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": settings["s3proxy.endpoint"],
        "AWS_REGION": "us-east-1",
    }  # fmt: skip
    spark_settings = {
        "spark.jars": ",".join(jars_of("hadoop-aws")), "spark.hadoop.fs.s3a.path.style.access": "true",
        # The workers of a cluster that was started before have not inherited them.
        **{f"spark.executorEnv.{name}": value for name, value in client_settings.items()},
    }  # fmt: skip
    with server.running(lambda: listens(server.port)):
        endpoint = settings["s3proxy.endpoint"]
        client = S3FileSystem(access_key=KEY, secret_key=SECRET, endpoint_override=endpoint)
        assert client.get_file_info("bucket").is_file is False
        server.url, server.environment = "s3a://bucket", environment_of(spark_settings) | client_settings
        yield server


class StoreServer(JavaServer):
    """A store that runs.

    Attributes:
        url: Of an empty directory.
        environment: The variables that a client of it needs.
    """

    url, environment = "", {}

    def __init__(self, directory, jars, main, *words):
        super().__init__(directory)
        self.main = "-cp", os.pathsep.join(jars), main, *map(str, words)

    def arguments(self):
        return ONE_COMPILER, "-Xmx512m", *self.main

    @contextmanager
    def running(self, serves):
        self.launch()
        try:
            self.wait_until(serves, within_s=120)
            yield self
        finally:
            self.kill()
