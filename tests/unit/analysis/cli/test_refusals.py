"""Commands that are refused: each is one line that names the thing, with its exit status, and makes nothing."""

import shlex
import socket
from dataclasses import replace

import pytest

from ackstate.analysis.pulsar.ack_state_file import read_ack_states, write_ack_states
from command_line import assert_one_line, run
from pulsar_admin import VECTORS
from trace_files import write_acks

GOLDEN = VECTORS.parents[1] / "golden" / "ack-states-v1.ack"
URL = "http://127.0.0.1:1"
DURATION = "must be a duration such as 500ms, 5s, 1m or 1h, got"
ONE_OF = "the output must be a file in an existing directory"

REFUSED = [
    # Names that are like another, or like none.
    ("--nope", "--nope"),
    ("recovr", "unknown command 'recovr'; did you mean 'recover'? (see ackstate --help)"),
    ("packag", "unknown command 'packag'; did you mean 'spark-package'?"),
    ("frobnicate", "unknown command 'frobnicate' (see"),
    ("pulsar snap", "unknown command 'snap'; did you mean 'snapshot'?"),
    ("trace chek x", "unknown command 'chek'; did you mean 'check'? (see ackstate trace --help)"),
    ("demo --sed 3", "unknown option --sed; did you mean '--seed'? (see ackstate demo --help)"),
    ("trace check x --xyzzy", "unknown option --xyzzy (see"),
    ("sweep x --curent-policy y", "unknown option --curent-policy; did you mean '--current-policy'?"),
    ("sweep x --set flush_intervall_ms=1", "'flush_intervall_ms'; did you mean 'flush_interval_ms'?"),
    ("redelivery x --policy xyzzy=1", "unknown key 'xyzzy'; known keys are format, "),
    ("serve --store new --conf misspelt.conf", "'delayedDeliveryTickTimeMilis'; did you mean 'delayedDelivery"),
    # Arguments that are missing or too many, empty paths, numbers out of range.
    ("demo extra", "extra"),
    ("demo --json=yes", "--json"),
    ("demo --out ''", "--out"),
    ("demo --seed one", "--seed"),
    ("redelivery", "TRACE"),
    ("redelivery one two", "two"),
    ("trace check", "TRACE"),
    ("trace recording", "FILE"),
    ("trace convert one two --bad-rows-max many", "--bad-rows-max"),
    ("recover", "DIR"),
    ("recover ''", "DIR"),
    ("broker new --messages-per-second 0", "--messages-per-second"),
    ("explain new --top 0", "--top"),
    ("explain new --now-ms=-1", "--now-ms"),
    ("explain new --tls-trust-cert-path x.pem", "--tls-trust-cert-path"),
    # Times.
    ("demo --seconds 2h", "'--seconds': must be from 1s to 1h, got '2h'"),
    ("demo --seconds 0.5", "'--seconds': must be from 1s to 1h, got '0.5'"),
    ("demo --flush-interval-ms soon", f"'--flush-interval-ms': {DURATION} 'soon'"),
    (f"demo --flush-interval-ms {'9' * 30}", "'--flush-interval-ms': must be a whole number of milliseconds up to"),
    ("broker new --seconds inf", f"'--seconds': {DURATION} 'inf'"),
    ("crash --budget 0s", "'--budget': must be at least 1ms, got '0s'"),
    ("crash --budget 5", f"'--budget': {DURATION} '5'"),
    ("trace generate new --flush-interval-ms x", f"'--flush-interval-ms': {DURATION} 'x'"),
    ("trace generate new --workload x --events 1e3", "got 'x'"),
    ("trace generate new --workload in_order --events 1.5", "whole number"),
    (f"pulsar snapshot {URL} --request-timeout 0", "'--request-timeout': must be from 1s to 1h, got '0'"),
    ("pulsar record http://host T --every 500ms", "'--every': must be from 1s to 1h"),
    ("pulsar record http://host T --for 0s", "'--for': must be at least 1s"),
    ("pulsar exporter http://host --every 0s", "'--every': must be from 1s to 1h"),
    # Policies, grids, outputs.
    ("sweep {trace} --set tick_ms=1 --grid x", "give the grid by either --grid or --set"),
    ("sweep {trace} --current-policy default --broker-conf x", "the policy in force by either"),
    ("sweep {trace} --broker-conf none.conf", "none.conf: No such file"),
    ("sweep {trace} --set x=1 --current-policy y=2", "unknown key 'y'"),
    ("sweep {trace} --set tick_ms=1 --current-policy keep", "current policy must be KEY=V KEY=V or default"),
    ("sweep {trace} --set tick_ms=1 --crashes-per-day nan", "got nan"),
    ("sweep {trace} --set tick_ms=1 --crashes-per-day -1", "got -1.0"),
    ("sweep {trace} --set tick_ms=1,1", "the policy 'default' occurs twice"),
    ("sweep {trace} --set tick_ms=1 --set tick_ms=2", "the setting tick_ms is given twice"),
    ("sweep {trace} --set tick_ms=,", "tick_ms must have at least one value"),
    ("sweep {trace} --set tick_ms", "a setting must be key=value, got 'tick_ms'"),
    (
        "sweep {trace} --set ledger_writable=false --set metadata_bytes_max=10",
        "not even an empty cursor can be written",
    ),
    (
        "sweep {trace} --set tick_ms=1 --current-policy 'ledger_writable=false metadata_bytes_max=10'",
        "current policy: not even an empty cursor can be written",
    ),
    ("sweep {trace} --grid none.json", "none.json: No such file"),
    ("sweep no-trace --set tick_ms=1", "no-trace: no such trace"),
    ("redelivery {trace} --policy keep=BEST", "keep must be one of LOWEST, WIDEST"),
    ("redelivery {trace} --format csv", "--format and --out go together"),
    ("redelivery {trace} --format csv --out no/such/file.csv", "no/such"),
    ("redelivery {trace} --format xml --out x", "--format must be one of json, parquet, csv"),
    ("redelivery {trace} --report no/where.html", ONE_OF),
    ("redelivery {trace} --report .", ONE_OF),
    ("redelivery {trace} --engine local --master local[2]", "--master is for --engine spark"),
    # Servers.
    ("serve --store new --port 65536", "--port"),
    ("serve --store new --port {taken}", "cannot listen on 127.0.0.1 port {taken}: Address already in use"),
    ("serve --store new --host 0.0.0.0", "without a token the host must be 127.0.0.1, got 0.0.0.0: see --token-file"),
    ("serve --store new --token-file nowhere", "nowhere: No such file"),
    ("serve --store new --conf bad.conf", "bad.conf: max_unpersisted_ack_record_bytes (maxUnPersistAckRecordsBytes)"),
    ("pulsar exporter http://host --port 0 --host ' '", "the host must not be empty"),
    ("pulsar exporter http://host --topic a/b/c/d/e", "Invalid topic name"),
    # Brokers.
    ("pulsar snapshot", "Missing argument 'URL'"),
    (f"pulsar snapshot {URL} --topic a/b", "a/b"),
    (f"pulsar snapshot {URL} --namespace a", "tenant/namespace"),
    (f"pulsar snapshot {URL} --top 0", "--top"),
    (f"pulsar snapshot {URL} --token-file /nowhere/token", "/nowhere/token"),
    (f"pulsar snapshot {URL}", f"{URL}: [Errno 111] Connection refused"),
    (f"explain {URL}", f"{URL}: [Errno 111] Connection refused"),
    ("pulsar record http://host ''", "must not be empty"),
    ("pulsar record http://host T --requests-per-second 0", "--requests-per-second"),
    ("pulsar record http://host {trace}", "not a trace that ackstate pulsar record wrote: give a new directory"),
    ("pulsar record http://host bad.json", "not a directory"),
    # States.
    ("pulsar export etcd:h:1 t new", "metadata in etcd is not supported"),
    ("pulsar export pulsar+rocksdb:/x t new", "metadata in RocksDB is not supported"),
    ("pulsar export pulsar+zk:// t new", "expected pulsar+zk://HOST:PORT"),
    ("pulsar export pulsar+zk://h:1 non-persistent://a/b/c new", "topic must be persistent://"),
    ("pulsar history pulsar+zk://h:1 topic://a/b/c s", "or a segment of a scalable topic, segment://"),
    ("pulsar import none pulsar://127.0.0.1:1", "No such file"),
    (f"pulsar import {GOLDEN} pulsar+zk://h:1", "not a URL of the form pulsar://HOST:PORT"),
    (f"pulsar import {GOLDEN} pulsar://127.0.0.1:1 --subscription x", "has no such cursor; its"),
    (f"pulsar import {GOLDEN} pulsar://127.0.0.1:1 --as ''", "--as must not be empty"),
    ("pulsar import two.ack pulsar://127.0.0.1:1 --as x", "--as needs one subscription"),
    *((f"{each} pulsar+etcd:h:1", "metadata in etcd is not supported") for each in ("inspect", "fsck", "explain")),
]  # fmt: skip

# As of `pulsar-admin`, in its words.
REFUSED_AS_PULSAR_ADMIN = [
    ("namespaces", "Missing command\n\nsee ackstate namespaces --help"),
    ("namespaces nope", "unknown command 'nope'"),
    ("topics get-delayed-delivery", "Missing argument 'TOPIC'"),
    ("topics get-delayed-delivery a b", "unexpected extra argument"),
    ("namespaces get-delayed-delivery a/b --applied", "unknown option --applied"),
    ("namespaces get-delayed-delivery a", "Invalid namespace format"),
    ("topics remove-delayed-delivery a/b", "Invalid topic name 'a/b'"),
    ("topics set-delayed-delivery -e non-persistent://a/b/c", "Need to provide a persistent topic name"),
    ("namespaces set-delayed-delivery a/b", "Need to specify either --enable or --disable\n\n"),
    ("topics set-delayed-delivery orders -ed", "Need to specify either --enable or --disable\n\n"),
]
NO_SERVERS = [
    *("localhost:8080", "ftp://h", "http://", "http://h:0", "http://h:70000", "http://h:8080,i:8080"),
    *("http://h?x=1", "http://[::1", "http://h h", "http://h\n"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("place")
    write_acks(path / "trace", ("persistent://a/b/t", "s"), range(10))
    (path / "bad.json").write_text('[{"policy": "p"}]')
    (path / "stats-a.json").write_text("{}")
    (path / "internalStats-a.json").write_text("{")
    (path / "bad.conf").write_text("maxUnPersistAckRecordsBytes=5")
    (path / "misspelt.conf").write_text("delayedDeliveryTickTimeMilis=100")
    golden = read_ack_states(GOLDEN)
    (cursor,) = golden.cursors
    write_ack_states(path / "two.ack", replace(golden, cursors=(cursor, replace(cursor, subscription="b"))))
    return path


@pytest.fixture
def refused(place, monkeypatch, capsys):
    """Run a command in a directory, and see that it is not changed."""
    monkeypatch.chdir(place)
    monkeypatch.delenv("ACKSTATE_ADMIN_TOKEN", raising=False)
    monkeypatch.delenv("ACKSTATE_BOOKKEEPER_CLASSPATH", raising=False)

    def refused(*words):
        before = sorted(place.rglob("*"))
        outcome = run(capsys, *words)
        assert sorted(place.rglob("*")) == before
        return outcome

    return refused


@pytest.mark.parametrize(("line", "naming"), REFUSED)
def test_a_refusal_is_one_line_that_names_the_thing(refused, line, naming):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"trace": "trace", "taken": taken.getsockname()[1]}
        assert_one_line(refused(*shlex.split(line.format(**names))), naming.format(**names))


@pytest.mark.parametrize(("line", "naming"), REFUSED_AS_PULSAR_ADMIN)
def test_a_refusal_of_a_policy_command_is_that_of_pulsar_admin(refused, line, naming):
    status, out, err = refused("--admin-url", URL, *line.split())
    assert (status, out) == (1, "")
    assert naming in err
    assert "connect" not in err


@pytest.mark.parametrize("url", NO_SERVERS)
@pytest.mark.parametrize("words", [["explain"], ["pulsar", "snapshot"], ["pulsar", "record"]])
def test_what_is_no_url_of_a_server(refused, url, words):
    if words == ["explain"]:
        words = ["--admin-url", url, "namespaces", "get-delayed-delivery", "a/b"]
        said = f"the URL of the server must look like http://localhost:8080, got {url!r}\n"
        assert refused(*words) == (1, "", said)
    else:
        more = ["T"] if "record" in words else []
        assert_one_line(refused(*words, url, *more), "the URL of the server must look like http://localhost:8080")
