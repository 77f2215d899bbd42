"""Which texts are paths and which are URLs, and the location that Spark gets for each."""

import errno
import os
import socket
from pathlib import Path

import pytest

from ackstate.analysis.location import LocationError, location, spark_url, write_atomically


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_text("keep me")
    return path


@pytest.mark.parametrize("name", ["report.html", ".report.html.unfinished"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_is_replaced_and_its_target_left_alone(tmp_path, victim, name, link):
    link(victim, tmp_path / name)
    write_atomically(tmp_path / "report.html", "new")
    assert victim.read_text() == "keep me"
    assert (tmp_path / "report.html").read_text() == "new"
    assert not (tmp_path / "report.html").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "victim"]


@pytest.mark.parametrize("text", ["file:///tmp/a%20b", "file://localhost/tmp/a%20b", "FILE:///tmp/a%20b"])
def test_a_file_url_is_a_local_path_with_nothing_decoded(text):
    assert location(text) == Path("/tmp/a%20b")


@pytest.mark.parametrize(
    ("text", "shown", "for_spark"),
    [
        ("s3a://bucket/a/b", "s3a://bucket/a/b", "s3a://bucket/a/b"),
        ("S3://bucket//a/b/", "s3://bucket/a/b", "s3a://bucket/a/b"),
        ("s3a://bucket", "s3a://bucket/", "s3a://bucket/"),
        ("gs://bucket/day=2026-11-20", "gs://bucket/day=2026-11-20", "gs://bucket/day=2026-11-20"),
        ("hdfs://node:8020/a b/%20", "hdfs://node:8020/a b/%20", "hdfs://node:8020/a b/%20"),
        ("abfss://c@a.dfs.core.windows.net/x", "abfss://c@a.dfs.core.windows.net/x", "abfss://c@a.dfs.core.windows.net/x"),
    ],
)  # fmt: skip
def test_a_url_is_shown_as_it_was_given_and_spark_takes_it(text, shown, for_spark):
    found = location(text)
    assert str(found) == shown
    assert location(shown) == found
    assert spark_url(found) == for_spark


def test_spark_takes_a_local_path_from_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert spark_url(Path("a[1]?")) == f"file://{tmp_path}/a[1]?"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("s4a://b/x", "unknown scheme 's4a', known: .*s3a; did you mean 's3a'"),
        ("http://user:pass@host/x", "unknown scheme 'http'"),
        ("s3a:///x", "needs a bucket"),
        ("hdfs:///x", "needs a name node"),
        ("abfss://account/x", "needs CONTAINER@ACCOUNT"),
        ("abfss://@a.dfs.core.windows.net/x", "needs CONTAINER@ACCOUNT"),
        ("s3a://key:secret@bucket/x", "a user or a password"),
        ("s3a://secret@bucket/x", "a user or a password"),
        ("abfss://c:secret@a.dfs.core.windows.net/x", "a user or a password"),
        ("s3a://b/x?secret=1", "a query"),
        ("s3a://b/x#1", "a query"),
        ("s3a://b/a\nb", "control characters"),
        ("s3a://b/../x", r"must not contain '\.'"),
        ("file://host/x", "a local file is file:///PATH"),
        ("file://", "a local file is file:///PATH"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(text, said):
    with pytest.raises(LocationError, match=said) as refused:
        location(text)
    assert "secret@" not in str(refused.value)
    assert ":pass" not in str(refused.value)


def test_names_go_together_as_those_of_a_path():
    directory = location("s3a://bucket/traces")
    file = directory / "day=1/part-0.parquet"
    assert file == directory / "day=1" / "part-0.parquet"
    assert (file.name, str(file.parent)) == ("part-0.parquet", "s3a://bucket/traces/day=1")
    assert file.with_name("x") == directory / "day=1" / "x"
    assert location("s3a://bucket/").parent == location("s3a://bucket")
    assert sorted([directory / "b", directory / "a"]) == [directory / "a", directory / "b"]


@pytest.fixture
def directory(url_store, tmp_path):
    """Return a directory behind a URL."""
    (tmp_path / "store" / "a").mkdir()
    return url_store / "a"


def test_files_are_written_listed_read_and_deleted(directory, tmp_path):
    (tmp_path / "local").write_bytes(b"text")
    for name in ("x.parquet", "y.txt", "below/z.parquet"):
        (tmp_path / "store" / "a" / "below").mkdir(exist_ok=True)
        (directory / name).put(tmp_path / "local")
    assert (tmp_path / "store/a/below/z.parquet").read_bytes() == b"text"
    found = {each.name: each.is_dir() for each in directory.iterdir()}
    assert found == {"x.parquet": False, "y.txt": False, "below": True}
    assert [str(each) for each in directory.glob("*.parquet")] == ["s3a://bucket/a/x.parquet"]
    assert list((directory / "none").glob("*")) == []
    assert (directory / "y.txt").read_text() == "text"
    assert (directory / "y.txt").stat().st_size == 4
    assert (directory / "y.txt").is_file()
    (directory / "y.txt").unlink()
    (directory / "y.txt").unlink(missing_ok=True)
    assert not (directory / "y.txt").exists()


@pytest.mark.parametrize("call", [
    lambda path: path.stat(), lambda path: path.open(), lambda path: path.unlink(), lambda path: path.read_text(),
    lambda path: list(path.iterdir()),
])  # fmt: skip
def test_what_is_not_there_is_named_by_its_url(directory, call):
    with pytest.raises(FileNotFoundError) as missing:
        call(directory / "none")
    assert (missing.value.filename, missing.value.strerror) == ("s3a://bucket/a/none", "no such file or directory")


@pytest.mark.parametrize(
    ("said", "number", "reason"),
    [
        (
            "When uploading object with key 'y' in bucket 'b': AWS Error NO_SUCH_BUCKET during PutObject operation: "
            "The specified bucket does not exist (Request ID: 2F)", errno.ENOENT, "no such bucket",
        ),
        (
            "When getting information for key 'x' in bucket 'b': AWS Error ACCESS_DENIED during HeadObject operation: "
            "No response body.", errno.EACCES, "access denied: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ),
        (
            "AWS Error UNKNOWN (HTTP status 400) during CreateBucket operation: no\nmore", errno.EIO, "unknown: no",
        ),
        ("broken pipe\n\tat org.apache.hadoop", errno.EIO, "broken pipe"),
    ],
)  # fmt: skip
def test_an_answer_of_a_store_is_a_reason_of_one_line(directory, said, number, reason):
    with pytest.raises(OSError) as failed, directory.reasons():
        raise OSError(said)
    assert (failed.value.errno, failed.value.strerror, failed.value.filename) == (number, reason, str(directory))


def test_an_error_that_names_a_url_keeps_it(directory):
    inner = OSError(errno.EIO, "torn", "s3a://bucket/another")
    with pytest.raises(OSError) as failed, directory.reasons():
        raise inner
    assert failed.value is inner


def test_a_name_node_that_is_not_there_is_named_at_once():
    pytest.importorskip("hdfs_native")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"hdfs://127.0.0.1:{taken.getsockname()[1]}/x"
        with pytest.raises(ConnectionRefusedError) as refused:
            location(url).exists()
    assert refused.value.filename == url
    assert refused.value.strerror == os.strerror(errno.ECONNREFUSED)


def test_a_missing_client_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "hdfs_native.fsspec", None)
    with pytest.raises(LocationError, match=r"install ackstate\[hdfs\]"):
        location("hdfs://127.0.0.1:1/x").exists()
