"""Real stores behind URLs: the commands answer as for local files, and a missing ability is reported in a line."""

import json
import os
import re

import pytest

import store_servers
from ackstate.analysis import location as locations
from ackstate.analysis.location import location
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.check import check_events
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.parquet import MANIFEST
from ackstate.analysis.trace.recording import Frame
from command_line import assert_one_line, run, run_each_apart

# With the session of the other Spark tests, so that one process starts the cluster.
pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.usefixtures("spark")]

DAY_MS = 86_400_000
POLICY = ("--policy", "flush_interval_ms=50")
GRID = ("--set", "flush_interval_ms=50,500")
# HDFS differs by little from S3, and starts for ten seconds.
HDFS = pytest.param("hdfs", marks=pytest.mark.soak)
HDFS_ALONE = pytest.mark.parametrize("server", [HDFS], indirect=True)


@pytest.fixture(scope="module", params=["s3", HDFS])
def server(request, tmp_path_factory):
    with getattr(store_servers, request.param)(tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
def base(server, tmp_path, monkeypatch):
    """Return the URL of a directory of this test, which this process can use."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    locations._file_system.cache_clear()
    yield location(f"{server.url}/{tmp_path.name}")
    locations._file_system.cache_clear()


def events_of(day, path):
    """Write the events of a day as JSON lines."""
    rows = [
        {"topic": f"persistent://public/default/t{topic}", "subscription": f"s{number}", "kind": "ack", "ledger_id": 3,
         "ts_ms": 1_700_000_000_000 + day * DAY_MS + 7 * entry + number, "first_entry": 2 * entry}
        for topic in range(2) for number in range(3) for entry in range(200 * day, 200 * day + 200)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def outcomes(commands, *, cwd, environment):
    """Run commands in a process of their own, which has no other settings of stores and Spark."""
    cleared = {key: value for key, value in os.environ.items() if not key.startswith(("SPARK_", "AWS_"))}
    return run_each_apart(*commands, cwd=cwd, env=cleared | environment)


def answers(commands, **where):
    """Return the standard output of each command."""
    found = outcomes(commands, **where)
    assert [(each.status, each.err) for each in found] == [(0, "")] * len(found)
    return [each.out for each in found]


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    directory = tmp_path_factory.mktemp("days")
    return [events_of(day, directory / f"{day}.jsonl") for day in range(2)]


@pytest.fixture(scope="module")
def here(days, tmp_path_factory):
    """Return a directory of this machine, the answers of the commands there, and the logs that they convert."""
    root = tmp_path_factory.mktemp("here")
    return root, answers(commands(root, days), cwd=root, environment={}), days


LOCAL = ("--engine", "local")


def commands(root, days, *, first=LOCAL, sweep=LOCAL, both_days=LOCAL):
    """Return all commands with their engines: each start of Spark takes seconds."""
    trace, options = f"{root}/days/day=2026-11-20", [*POLICY, "--json"]
    return [
        ["trace", "convert", days[0], trace],
        ["trace", "check", trace, "--json"],
        ["redelivery", trace, *options, *first],
        ["redelivery", trace, *options, *LOCAL],
        ["redelivery", trace, "--json", *LOCAL],
        ["sweep", trace, *GRID, "--report", f"{root}/report.html", "--json", *sweep],
        ["trace", "convert", days[1], f"{root}/days/day=2026-11-21"],
        ["redelivery", f"{root}/days", *options, *both_days],
        ["redelivery", trace, *POLICY, "--format", "csv", "--out", f"{root}/out.csv", *LOCAL],
    ]


@pytest.mark.parametrize(
    "master", [None, *(pytest.param(url, marks=pytest.mark.soak) for url in ("local[2]", "cluster"))]
)
def test_every_command_answers_behind_a_url_as_it_does_here(base, here, master, request, tmp_path):
    server, (local, expected, days) = request.getfixturevalue("server"), here
    url = request.getfixturevalue("spark_cluster")[0] if master == "cluster" else master
    some = ("sweep",) if server.url.startswith("hdfs") else ("both_days",)
    words = commands(base, days, **dict.fromkeys(("first", *some), ("--master", url) if url else LOCAL))
    generated = base / "generated"
    if url:  # Spark, with a client of S3, starts for ten seconds.
        words += [["trace", "generate", generated, "--workload", "key_shared", "--events", "50000", "--json"]]
    behind = answers(words, cwd=tmp_path, environment=server.environment)
    if url:
        assert_generated(generated, behind.pop())
    for mine, theirs in zip(expected, behind, strict=True):
        assert theirs.replace(str(base), str(local)) == mine
    by_engine, in_process = map(json.loads, behind[2:4])
    assert by_engine == in_process

    pages = [(root / "report.html").read_text(encoding="utf-8") for root in (local, base)]
    drawn = [
        json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1]) for page in pages
    ]
    assert drawn[0] == drawn[1]
    assert (base / "out.csv").read_text() == (local / "out.csv").read_text()


def assert_generated(trace, answer):
    made = json.loads(answer)
    assert made["events"] == 50_000
    assert names(trace) == [MANIFEST, *(each.name for each in parquet.trace_files(trace))]
    assert made["files"] == len(names(trace)) - 1 > 1
    assert sum(check_events(trace).kinds.values()) == made["events"] + made["published"]


def test_spark_needs_a_client_to_read_a_trace(server, base, monkeypatch, capsys):
    parquet.write_trace(frames("a"), base / "day=2026-11-20")
    # The session of this process lacks the jars of the client.
    monkeypatch.setattr("ackstate.analysis.cli.estimates._ONE_TASK_BYTES_MAX", 0)
    outcome = run(capsys, "redelivery", base, *POLICY)
    if server.url.startswith("s3a"):
        guide = "docs/guides/estimate-from-a-trace.md"
        assert_refused(outcome, f"Spark lacks its client of this store: {guide} has the name of the package\n")
    else:
        # That of HDFS comes with Spark.
        assert (outcome.status, outcome.err) == (0, "")


def frames(name, count=100):
    return [Frame("t", name, [Event(5 + entry, EventKind.ACK, 3, entry, entry)]) for entry in range(count)]


def names(directory):
    return sorted(each.name for each in directory.iterdir())


def test_a_trace_is_replaced_in_one_step(base, tmp_path):
    parquet.write_trace(frames("a"), base)
    before = names(base)
    assert before[0] == MANIFEST
    with pytest.raises(LookupError, match="killed"), parquet.new_trace(base) as files:
        raise LookupError(half_written(files, tmp_path, base, before[1:]))
    assert names(base) == before
    parquet.write_trace(frames("b", 7), base)
    assert len(names(base)) == 2
    assert names(base)[1] != before[1]
    assert parquet.check_trace(base).end_ms == 11


def half_written(files, tmp_path, base, seen):
    """Write a file that no manifest lists, and which no reader sees."""
    parquet.write_trace(frames("b", 1), tmp_path / "trace")
    files.file().put(tmp_path / "trace" / parquet.FIRST_FILE)
    assert len(names(base)) == 3
    assert [each.name for each in parquet.trace_files(base)] == seen
    return "killed"


def assert_refused(outcome, line):
    assert_one_line(outcome, line)
    assert store_servers.SECRET not in outcome.err


def test_a_store_that_does_not_answer_as_it_should_is_a_line(server, base, tmp_path, monkeypatch, capsys):
    parquet.write_trace(frames("a"), base / "trace")
    source = events_of(0, tmp_path / "0.jsonl")
    trace, missing = str(base / "trace"), str(base / "missing")

    def refuses(line, *words):
        assert_refused(run(capsys, *words), line)

    refuses(f"{missing}: no such trace", "trace", "check", missing)
    refuses(f"{missing}: no such trace", "redelivery", missing, *POLICY)
    if server.url.startswith("hdfs"):
        unreachable = "hdfs://127.0.0.1:1/trace"
        for words in (["trace", "check", unreachable], ["trace", "convert", source, unreachable]):
            refuses(f"{unreachable}: Connection refused", *words)
        return
    refuses("s3a://no-bucket/trace: no such bucket", "trace", "convert", source, "s3a://no-bucket/trace")
    given = [["trace", "check", trace], ["trace", "convert", source, trace], ["sweep", trace, *GRID]]
    for name, value, line in (
        ("AWS_SECRET_ACCESS_KEY", "wrong", "access denied"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:1", "network connection"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            locations._file_system.cache_clear()
            for words in given:
                refuses(f"{trace}: {line}: ", *words)
    locations._file_system.cache_clear()


@HDFS_ALONE
def test_a_name_service_is_looked_up_where_hadoop_keeps_it(server, base, tmp_path, monkeypatch):
    names_and_values = {
        "dfs.nameservices": "service", "dfs.ha.namenodes.service": "one",
        "dfs.namenode.rpc-address.service.one": base.authority,
        "dfs.client.failover.proxy.provider.service":
            "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider",
    }  # fmt: skip
    properties = "".join(f"<property><name>{name}</name><value>{value}</value></property>"
                         for name, value in names_and_values.items())  # fmt: skip
    (tmp_path / "hdfs-site.xml").write_text(f"<configuration>{properties}</configuration>")
    (tmp_path / "core-site.xml").write_text("<configuration></configuration>")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    parquet.write_trace(frames("a", 7), base)
    assert parquet.check_trace(location(f"hdfs://service/{base.name}")).end_ms == 11
