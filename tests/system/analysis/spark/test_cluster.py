"""A standalone cluster on this machine's loopback: the same answer as here, and a line for whatever is not there."""

import json
import os
import socket
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ackstate.analysis.cli import main
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.spark import session as cluster
from ackstate.analysis.spark.session import SCRIPT, write_package
from ackstate.analysis.trace import chunks as trace_chunks
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.analysis.trace.recording import Frame
from command_line import assert_one_line, run, run_each_apart
from spark_daemons import JAVA_OPTIONS, environment_of

POLICY = "flush_interval_ms=50"


def some_trace(path, *, length=300):
    frames = [
        Frame(f"persistent://public/default/t{topic}", f"s{number}", [
            Event(1_000 + 7 * entry + number, EventKind.ACK, 3, 2 * entry, 2 * entry) for entry in range(length)
        ])
        for topic in range(2) for number in range(3)
    ]  # fmt: skip
    parquet.write_trace(frames, path)
    return path


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """Return an interpreter that has the imports of our packages, and not the packages."""
    directory = tmp_path_factory.mktemp("bare")
    builder = venv.EnvBuilder(symlinks=True)
    builder.create(directory)
    others = directory / "others"
    others.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "ackstate" not in entry.name and entry.suffix != ".pth":
            (others / entry.name).symlink_to(entry)
    site = next((directory / "lib").glob("python*/site-packages"))
    (site / "others.pth").write_text(f"{others}\n")
    python = directory / "bin" / "python"
    code = "import pyroaring, pyarrow, importlib.util as u; assert not u.find_spec('ackstate')"
    subprocess.run([python, "-P", "-c", code], check=True, cwd=directory)
    return python


def local_answer(spark, trace):
    from ackstate.analysis.estimate.estimates import estimates
    from ackstate.analysis.estimate.results import SweepResult
    from ackstate.analysis.spark.source import SparkSource

    policies = [Policy.from_mapping(dict([POLICY.split("=")]))]
    rows = estimates(SparkSource.of(spark, trace), policies).collect()
    return SweepResult.of_rows(str(trace), policies, rows, crashes_per_day=1.0).to_json()


@pytest.mark.spark
@pytest.mark.soak
@pytest.mark.parametrize("master", ["local[2]", "cluster"])
def test_a_submitted_job_gives_the_same_answer_by_workers_that_have_not_installed_us(
    spark, master, bare_python, tmp_path, request
):
    import pyspark

    url, workers = request.getfixturevalue("spark_cluster") if master == "cluster" else (master, [])
    trace = some_trace(tmp_path / "trace")
    main_of(["spark-package", str(tmp_path)])
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    words = [
        submit, "--master", url, "--py-files", tmp_path / "ackstate.zip", "--conf", "spark.driver.host=127.0.0.1",
        "--conf", f"spark.pyspark.python={bare_python}", "--conf", f"spark.pyspark.driver.python={sys.executable}",
        "--conf", "spark.sql.shuffle.partitions=2", "--driver-java-options", JAVA_OPTIONS,
        "--conf", f"spark.executor.extraJavaOptions={JAVA_OPTIONS}",
        tmp_path / "ackstate_job.py", "redelivery", trace, "--policy", POLICY, "--json",
    ]  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYSPARK_", "SPARK_"))}
    environment |= {"SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == local_answer(spark, trace)
    for worker in workers:
        worker.await_line("Asked to launch executor app-.* for ackstate")


@pytest.mark.spark
@pytest.mark.soak
def test_the_commands_take_a_master_and_name_a_path_that_its_workers_cannot_see(
    spark, spark_cluster, bare_python, tmp_path
):
    url, _ = spark_cluster
    trace = some_trace(tmp_path / "trace")
    # Another process has another current directory there.
    words = [["redelivery", path, "--policy", POLICY, "--master", url, "--json"]
             for path in (trace, "/proc/self/cwd/trace")]  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SPARK_")}
    # One executor: each takes seconds to start.
    environment |= environment_of({"spark.cores.max": 1}) | {"PYSPARK_PYTHON": str(bare_python)}
    answer, refused = run_each_apart(*words, cwd=tmp_path, env=environment)
    assert answer.status == 0, answer.err
    assert json.loads(answer.out) == local_answer(spark, trace)
    assert_one_line(
        refused, "ackstate: /proc/self/cwd/trace/part-00000.parquet: not a readable Parquet file, ",
        "the workers cannot see it: put it on storage that all of them mount at this path\n",
    )  # fmt: skip


@pytest.mark.spark
@pytest.mark.slow
def test_what_reaches_the_driver_does_not_grow_with_the_trace(spark, tmp_path, monkeypatch):
    from pyspark.sql.classic.dataframe import DataFrame

    from ackstate.analysis.estimate.estimates import estimates
    from ackstate.analysis.spark.source import SparkSource

    monkeypatch.setattr(trace_chunks, "CHUNK_EVENTS", 50)
    collected, collect = [], DataFrame.collect

    def counted(frame):
        rows = collect(frame)
        collected.append(len(rows))
        return rows

    monkeypatch.setattr(DataFrame, "collect", counted)
    seen = []
    for length in (100, 2_000):
        collected.clear()
        trace = some_trace(tmp_path / str(length), length=length)
        estimates(SparkSource.of(spark, trace), [None, Policy()]).collect()
        seen.append(list(collected))
    # Of each policy: 6 subscriptions, 2 topics, a namespace and all.
    assert seen[0] == seen[1]
    assert sum(seen[1]) <= 1 + 2 * (6 + 2 + 1 + 1)


def main_of(words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


@pytest.fixture
def no_java(monkeypatch):
    """Let no virtual machine be started."""

    def launch(*_arguments, **_options):
        raise AssertionError("started")

    monkeypatch.setattr("ackstate.analysis.spark.session.start_java", launch)


@pytest.mark.usefixtures("no_java")
def test_a_master_that_is_not_there_is_named_before_java_starts(tmp_path, capsys):
    trace = some_trace(tmp_path / "trace")
    with socket.socket() as taken:
        # Bound, and not listened on.
        taken.bind(("127.0.0.1", 0))
        url = f"spark://127.0.0.1:{taken.getsockname()[1]}"
        outcome = run(capsys, "redelivery", trace, "--master", url)
    said = f"ackstate: no Spark master at {url}: Connection refused; start it, or give another --master"
    assert_one_line(outcome, said)
    for master in ("", "7077", "http://h:1", "spark://h", "spark://h:x", "local[", "spark://h:1,"):
        assert_one_line(run(capsys, "redelivery", trace, "--master", master), f"got {master!r}")


def test_one_master_of_several_is_enough():
    with socket.socket() as standby, socket.socket() as leader:
        standby.bind(("127.0.0.1", 0))
        leader.bind(("127.0.0.1", 0))
        leader.listen()
        ports = [each.getsockname()[1] for each in (standby, leader)]
        cluster.check_master(f"spark://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}")
        with pytest.raises(cluster.ClusterError, match="refused"):
            cluster.check_master(f"spark://127.0.0.1:{ports[0]}")


def test_a_cluster_that_starts_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(cluster, "EXECUTOR_SECONDS", 0.0)
    spark = Mock()
    spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size.return_value = 1  # the driver
    with pytest.raises(cluster.ClusterError, match=r"spark://h:1 has started no executor in 0 s"):
        cluster.await_executor(spark, "spark://h:1")
    # YARN may let a job wait for its turn.
    cluster.await_executor(spark, "yarn")
    spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size.return_value = 2
    cluster.await_executor(spark, "spark://h:1")


def test_what_spark_gives_up_is_told_in_our_words():
    with pytest.raises(cluster.ClusterError, match=r"at spark://h:1: .* 7077"), cluster.answer_awaited("spark://h:1"):
        raise RuntimeError("java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.")
    with pytest.raises(RuntimeError), cluster.answer_awaited("spark://h:1"):
        raise RuntimeError("another")


def test_the_package_is_importable_the_same_each_time_and_whole(tmp_path):
    count = write_package(tmp_path / "a.zip")
    assert write_package(tmp_path / "b.zip") == count
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    names = zipfile.ZipFile(tmp_path / "a.zip").namelist()
    assert len(set(names)) == count
    assert {name.partition("/")[0] for name in names} == {"ackstate"}
    module = "ackstate.analysis.estimate.estimates"
    code = f"import sys; sys.path.insert(0, sys.argv[1]); import {module} as found; print(found.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, tmp_path / "a.zip"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(tmp_path / "a.zip"))
    compile(SCRIPT, "script", "exec")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip", "b.zip"]


@pytest.mark.parametrize(("numbers", "said"), [
    ([1, 2], "chunk 0 of subscription 's' of t is missing"), ([0, 1, 3], "chunk 2 of subscription 's' of t is missing"),
    ([0, 1, 1], "chunk 1 of subscription 's' of t occurs several times"),
    ([0, -1], "chunk -1 of subscription 's' of t is invalid"),
])  # fmt: skip
def test_chunks_are_counted_in_a_bit_each(tmp_path, numbers, said):
    parquet.write_trace([Frame("t", "s", [Event(1, EventKind.ACK, 1, 0, 0)])], tmp_path / "good")
    whole = pq.read_table(tmp_path / "good" / parquet.FIRST_FILE)
    (row,) = whole.to_pylist()
    table = pa.Table.from_pylist([row | {"chunk": number} for number in numbers], whole.schema)
    pq.write_table(table, tmp_path / "bad.parquet")
    with pytest.raises(TraceError, match=said):
        parquet.check_trace(tmp_path / "bad.parquet")
    span = parquet.check_trace(tmp_path / "good")
    assert (*span[:3], span.row_groups_max, span.size_bytes > 0) == (1, 1, 1, 1, True)
