"""`ackstate pulsar snapshot` against a server that answers as a Pulsar broker does."""

import copy
import json
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from ackstate import BatchIndexes, DeletedRanges, Position
from ackstate.analysis.pulsar import durable
from ackstate.analysis.pulsar.durable import DurableReader
from ackstate.analysis.pulsar.sources import REASONS
from ackstate.stores.base import StoreError
from ackstate.wire.pulsar import CursorInfo, PositionInfo, encode_cursor_info, encode_position_info
from command_line import run
from pulsar_admin import CONFIGURATION, INTERNALS, PATH, RUNTIME, STATS, TOPIC, serving, topic_answers
from pulsar_nodes import layout_of, new_nodes

VECTORS = Path(__file__).parents[3] / "vectors" / "hard-answers.jsonl"
CASES = [*map(json.loads, VECTORS.read_text().splitlines())]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_snapshot_of_a_hard_answer_is_not_below_the_truth(capsys, case):
    """An answer that contradicts itself may be refused instead."""
    changes = topic_answers(internals=case["internalStats"], stats=case.get("stats", {"subscriptions": {}}))
    version = {"/admin/v2/brokers/version": (200, case["version"].encode(), {})}
    with serving(changes | version | {RUNTIME: case.get("configuration", {})}) as broker:
        outcome, right = run(capsys, "pulsar", "snapshot", broker.url, "--metadata", "none", "--json"), case["right"]
    if outcome.status == 2:
        assert "high_min" in right
        return
    (found,) = json.loads(outcome.out)["subscriptions"]
    assert found["at_least"] <= right.get("low_max", 2**63)
    assert found["comes_back"] >= right.get("high_min", 0)
    assert found["messages"] is None or found["messages"] >= right.get("messages_high_min", 0)
    for name in ("cut_if_written_now", "comes_back_if_unloaded"):
        assert found[name] == right.get(name, found[name])


@pytest.fixture
def make_broker():
    with ExitStack() as stack:
        yield lambda changes=None: stack.enter_context(serving(changes))


def snapshot(capsys, *arguments):
    return run(capsys, "pulsar", "snapshot", *arguments)


def told(capsys, *arguments, status=0):
    outcome = snapshot(capsys, *arguments, "--json")
    assert (outcome.status, outcome.err) == (status, "")
    return json.loads(outcome.out)


# --- A broker


def test_all_of_a_cluster_in_json_and_in_a_table(capsys, make_broker):
    broker = make_broker()
    answer = told(capsys, broker.url)
    (found,) = answer["subscriptions"]
    assert (found["topic"], found["subscription"], found["acked_above_mark_delete"]) == (TOPIC, "sub", 30)
    assert (found["at_least"], found["comes_back"], found["is_exact"], found["messages"]) == (0, 30, False, 30)
    assert answer["brokers"] == [{
        "owner": "127.0.0.1:8080", "subscriptions": 1, "comes_back": 30, "at_least": 0, "is_exact": False,
        "may_have_batches": False,
    }]  # fmt: skip
    assert (answer["metadata"], "names no ZooKeeper" in answer["metadata_unread"]) == (None, True)
    assert found["settings_assumed"] == ""
    assert not any("pulsar/" in path for path in broker.asked), "the tenant of Pulsar itself is left out"
    said = snapshot(capsys, broker.url).out
    assert "at most 30: every entry acked above the mark-delete: the broker names no ZooKeeper" in said
    assert "if broker 127.0.0.1:8080 dies now: at most 30 acked entries of 1 subscription" in said


def test_ranges_over_ledgers_larger_than_usual_are_read(capsys, make_broker):
    """Of 100 ledgers with five million entries, one entry is not acked."""
    cursor = {"markDeletePosition": "1:-1", "state": "Open", "individuallyDeletedMessages": "[(1:0..100:4999999]]"}
    ledgers = [{"ledgerId": number, "entries": 5_000_000} for number in range(1, 101)]
    internals = {"ledgers": ledgers, "cursors": {"s": cursor}}
    (found,) = told(capsys, make_broker({f"{PATH}/internalStats": internals}).url)["subscriptions"]
    assert (found["acked_above_mark_delete"], found["ranges"]) == (499_999_999, 1)


def test_the_json_has_the_keys_that_scripts_read(capsys, make_broker):
    answer = told(capsys, make_broker({"/admin/v2/tenants": ["demo", "public"]}).url, status=1)
    assert set(answer) == {
        "subscriptions", "subscriptions_not_shown", "brokers", "missing", "metadata", "metadata_unread",
    }  # fmt: skip
    ((found,), (missing,)) = answer["subscriptions"], answer["missing"]
    assert set(missing) == {"kind", "topic", "reason", "why"}
    assert set(found) == {
        "topic", "subscription", "owner", "kind", "state", "mark_delete", "acked_above_mark_delete", "ranges",
        "comes_back", "at_least", "is_exact", "why", "messages", "messages_per_entry", "cut_if_written_now",
        "comes_back_if_unloaded", "limits", "remarks", "settings_assumed",
    }  # fmt: skip
    assert set(found["limits"][0]) == {"setting", "unit", "used", "limit", "percent", "holes_left", "advice"}


def limits(answer):
    return {use["setting"]: (use["used"], use["limit"]) for use in answer["subscriptions"][0]["limits"]}


def test_the_closest_limits_are_told(capsys, make_broker):
    broker = make_broker()
    found = limits(told(capsys, broker.url, "--namespace", "public/default"))
    assert found["managedLedgerMaxUnackedRangesToPersist"] == (30, 10_000)
    # Position 3:-1, two words of which one has ten bytes, one nine.
    assert found["maxMessageSize"] == (13 + 2 + 2 + 10 + 2, 5 * 1024 * 1024 + 10 * 1024)


def test_what_the_limit_of_a_version_would_exclude_is_told(capsys, make_broker):
    version = {"/admin/v2/brokers/version": (200, b"5.0.1", {})}
    broker = make_broker(version | {RUNTIME: {"managedLedgerMaxUnackedRangesToPersist": "12"}})
    # Of one ledger over the limit this version writes a list, up to the limit.
    assert told(capsys, broker.url)["subscriptions"][0]["cut_if_written_now"] == 18


def test_a_configuration_that_may_not_be_read_is_assumed_and_said(capsys, make_broker):
    broker = make_broker({RUNTIME: (403, b'{"reason": "not superuser"}', {})})
    assert "the defaults of Pulsar 4.2.4" in told(capsys, broker.url)["subscriptions"][0]["settings_assumed"]
    assert "settings: the configuration may not be read" in snapshot(capsys, broker.url).out


# --- What is durable


@pytest.fixture
def nodes():
    """The metadata of the broker's cluster, where its topic has one ledger."""
    found = new_nodes()
    found.set(NODE, b"\n\x04\x08\x03 \x00")
    while found.store.ledgers.create("x") < INTERNALS["cursors"]["sub"]["cursorLedger"] - 1:
        pass
    return found


@pytest.fixture
def with_metadata(nodes, make_broker, monkeypatch):
    """Return a function that makes a broker which names this metadata store as its own."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = f"zk:127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setattr(durable, "open_cluster", lambda url, **_: layout_of(nodes) if url == place else None)
        yield lambda changes=None: make_broker({RUNTIME: CONFIGURATION | {"metadataStoreUrl": place}} | (changes or {}))


NODE = "/managed-ledgers/public/default/persistent/smoke"


def write(nodes, ranges, *, mark_delete=(3, -1), name="sub"):
    """Make some acks durable, in a new cursor ledger."""
    deleted = DeletedRanges()
    for first, end in ranges:
        deleted.add_run(3, first, end)
    ledger_id = nodes.store.ledgers.create("x")
    nodes.store.ledgers.append(ledger_id, [encode_position_info(PositionInfo(Position(*mark_delete), deleted))])
    nodes.set(f"{NODE}/{name}", encode_cursor_info(CursorInfo(ledger_id)))


def acked_ranges(*firsts):
    return {"individuallyDeletedMessages": f"[{','.join(f'(3:{each - 1}..3:{each}]' for each in firsts)}]"}


def look(**changes):
    found = copy.deepcopy(INTERNALS)
    found["cursors"]["sub"] |= changes
    return found


def test_with_the_metadata_the_answer_is_one_number(capsys, nodes, with_metadata):
    write(nodes, [(1, 2), (3, 4), (5, 6)])
    broker = with_metadata()
    answer = told(capsys, broker.url)
    (found,) = answer["subscriptions"]
    assert (found["at_least"], found["comes_back"], found["is_exact"]) == (27, 27, True)
    assert "not in entry 0 of cursor ledger" in found["why"]
    assert answer["metadata"].startswith("zk:127.0.0.1:")
    assert broker.asked.count(f"{PATH}/internalStats") == 2
    said = snapshot(capsys, broker.url).out
    assert "dies now: 27 acked entries of 1 subscription" in said
    assert "durable states: zk:127.0.0.1:" in said


@pytest.mark.parametrize(
    ("looks", "durable_firsts", "expected", "count"),
    [
        ([(1, 3), (1, 3)], (1,), (1, 1), 2),  # nothing moved
        ([(1,), (1, 3), (1, 3)], (1,), (1, 1), 3),  # something moved, and not once more
        ([(1,), (1, 3), (1, 3, 5)], (1,), (1, 2), 3),  # something moves on and on
        ([(1,), (1, 3)], (1, 3), (0, 0), 2),  # acked and written meanwhile
        ([(1, 3, 5), (1, 7), (1, 7)], (1,), (1, 1), 3),  # a seek
        ([(1, 3, 5), (1, 7), (1, 9)], (1,), (0, 2), 3),
    ],
)
def test_acks_while_it_is_read_make_one_more_look_and_then_a_range(  # noqa: PLR0917
    capsys, nodes, with_metadata, looks, durable_firsts, expected, count
):
    write(nodes, [(each, each + 1) for each in durable_firsts])
    broker = with_metadata({f"{PATH}/internalStats": [look(**acked_ranges(*each)) for each in looks]})
    (found,) = told(capsys, broker.url)["subscriptions"]
    assert (found["at_least"], found["comes_back"]) == expected
    assert found["is_exact"] == (expected[0] == expected[1])
    assert broker.asked.count(f"{PATH}/internalStats") == count


def test_a_cursor_that_cannot_be_read_is_bounded_and_the_others_are_exact(capsys, nodes, with_metadata):
    internals = look()
    internals["cursors"] |= dict.fromkeys(("lost", "reader", "pulsar.dedup"), internals["cursors"]["sub"])
    stats = copy.deepcopy(STATS)
    stats["subscriptions"]["lost"] = stats["subscriptions"]["sub"]
    internals["cursors"]["pulsar.dedup"] = internals["cursors"]["sub"] | {"cursorLedger": 5}
    for name in ("sub", "pulsar.dedup"):
        write(nodes, [(1, 2)], name=name)
    nodes.set(f"{NODE}/lost", encode_cursor_info(CursorInfo(2**40)))
    answer = told(capsys, with_metadata(changes(internals, stats)).url)
    found = {each["subscription"]: each for each in answer["subscriptions"]}
    assert {name: (each["kind"], each["comes_back"], each["is_exact"]) for name, each in found.items()} == {
        "lost": ("subscription", 30, False),
        "sub": ("subscription", 29, True),
        "pulsar.dedup": ("of the broker itself", 29, True),
        "reader": ("not durable", None, None),
    }
    assert "the cursor ledger of its record" in found["lost"]["why"]
    (total,) = answer["brokers"]
    assert (total["subscriptions"], total["at_least"], total["comes_back"]) == (2, 29, 59)


def test_a_metadata_store_of_another_cluster_is_noticed(capsys, nodes, with_metadata):
    """Its cursors have no record there, or another cursor ledger than the broker writes to."""
    broker = with_metadata()
    (found,) = told(capsys, broker.url)["subscriptions"]
    assert (found["kind"], found["comes_back"], found["is_exact"]) == ("subscription", 30, False)
    assert "has no record in the metadata store" in found["why"]
    nodes.store.ledgers.create("x")
    write(nodes, [(1, 2)])
    (found,) = told(capsys, broker.url)["subscriptions"]
    assert (found["comes_back"], found["is_exact"]) == (30, False)
    assert found["why"].endswith("the record names cursor ledger 5, and the broker 4")


def test_batches_that_the_durable_record_has_make_the_messages_unknown(capsys, nodes, with_metadata):
    batch = BatchIndexes()
    batch.ack(Position(3, 0), [0b1101])
    record = CursorInfo(-1, Position(3, -1), batch=batch)
    nodes.set(f"{NODE}/sub", encode_cursor_info(record))
    (found,) = told(capsys, with_metadata().url)["subscriptions"]
    assert (found["comes_back"], found["is_exact"], found["messages"]) == (30, True, None)
    assert "not in its record in the metadata store" in found["why"]


@pytest.mark.parametrize(
    ("words", "place", "why"),
    [
        (["--metadata", "none"], "zk:127.0.0.1:1", "is not read"),
        ([], "zk:127.0.0.1:1", "metadata store zk:127.0.0.1:1 cannot be read (--metadata): [Errno 111] Connection"),
        ([], "zk:127.0.0.1", "cannot be read"),
        ([], "oxia://oxia:6648", "names no ZooKeeper"),
    ],
)
def test_without_metadata_the_reason_is_said(capsys, make_broker, words, place, why):
    broker = make_broker({RUNTIME: CONFIGURATION | {"metadataStoreUrl": place}})
    answer = told(capsys, broker.url, *words)
    assert why in answer["metadata_unread"]
    assert why in answer["subscriptions"][0]["why"]
    assert broker.asked.count(f"{PATH}/internalStats") == 1


def test_a_package_that_is_missing_is_named(capsys, with_metadata, monkeypatch):
    def fail(*_, **__):
        raise ModuleNotFoundError("No module named 'kazoo'", name="kazoo")

    monkeypatch.setattr(durable, "open_cluster", fail)
    assert "kazoo is missing: install ackstate[bookkeeper]" in told(capsys, with_metadata().url)["metadata_unread"]


def test_a_metadata_store_that_is_lost_meanwhile_is_the_reason(capsys, nodes, with_metadata, monkeypatch):
    def fail(*_):
        raise StoreError("no connection")

    monkeypatch.setattr(DurableReader, "read", fail)
    (found,) = told(capsys, with_metadata().url)["subscriptions"]
    assert (found["comes_back"], found["is_exact"], "no connection" in found["why"]) == (30, False, True)


@pytest.mark.parametrize(
    ("changes_of_cursor", "ledgers", "most"),
    [
        ({"markDeletePosition": "3:9", "individuallyDeletedMessages": "[]"}, {}, 10),
        # Ledger 2 is trimmed, ledger 4 was begun after the ledgers were listed.
        ({"markDeletePosition": "2:9", "individuallyDeletedMessages": "[(3:0..3:2],(4:0..4:1]]"}, {}, 3),
        (
            {"markDeletePosition": "4:1", "individuallyDeletedMessages": "[]"},
            {"currentLedgerEntries": 7, "numberOfEntries": 7},
            9,
        ),
        # The last ledger has grown since it was counted.
        (
            {"markDeletePosition": "3:9", "individuallyDeletedMessages": "[(3:11..3:12]]"},
            {"currentLedgerEntries": 5, "numberOfEntries": 5},
            11,
        ),
    ],
)
def test_a_bound_has_all_that_is_acked_and_exists(capsys, make_broker, changes_of_cursor, ledgers, most):
    internals = look(**changes_of_cursor) | ledgers
    (found,) = told(capsys, make_broker({f"{PATH}/internalStats": internals}).url)["subscriptions"]
    assert (found["at_least"], found["comes_back"]) == (0, most)


TENANTS, DEMO = "/admin/v2/tenants", "/admin/v2/namespaces/demo"
DEMO_X = "/admin/v2/persistent/demo/x"
NOT_LISTED = {
    "a tenant that may not be listed": ({DEMO: (403, b'{"reason": "no right"}', {})}, "tenant demo", "forbidden"),
    "a tenant without a token": ({DEMO: (401, b"", {})}, "tenant demo", "forbidden"),
    "a tenant deleted meanwhile": ({DEMO: (404, b"", {})}, "tenant demo", "gone"),
    "a tenant that fails": ({DEMO: (500, b"<html>", {})}, "tenant demo", "failing"),
    "a tenant that is no JSON": ({DEMO: (200, b"<html>", {})}, "tenant demo", "failing"),
    "a tenant that is no list": ({DEMO: {"demo/x": 1}}, "tenant demo", "failing"),
    "a tenant redirected in a circle": ({DEMO: (307, b"", {"Location": DEMO})}, "tenant demo", "failing"),
    "a tenant with a strange name": ({TENANTS: ["public", "de/mo"]}, "tenant de/mo", "unsupported"),
    "a namespace of Pulsar 1": ({DEMO: ["demo/standalone/ns1"]}, "namespace demo/standalone/ns1", "unsupported"),
    "a namespace that is not text": ({DEMO: ["demo/\ud800"]}, "namespace demo/\ud800", "unsupported"),
    "a namespace deleted meanwhile": ({DEMO: ["demo/x"]}, "namespace demo/x", "gone"),
    "a namespace that may not be listed": (
        {DEMO: ["demo/x"], DEMO_X: (403, b"", {})}, "namespace demo/x", "forbidden",
    ),
    "a namespace that fails": ({DEMO: ["demo/x"], DEMO_X: (503, b"", {})}, "namespace demo/x", "failing"),
    "a namespace that is no list": ({DEMO: ["demo/x"], DEMO_X: [1]}, "namespace demo/x", "failing"),
    "a topic of Pulsar 1": (
        {DEMO: ["demo/x"], DEMO_X: ["persistent://demo/standalone/x/t"]},
        "topic persistent://demo/standalone/x/t", "unsupported",
    ),
    "a topic that may not be read": (
        {DEMO: ["demo/x"], DEMO_X: ["persistent://demo/x/t"], f"{DEMO_X}/t/stats": (403, b"", {})},
        "topic persistent://demo/x/t", "forbidden",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "name", "reason"), NOT_LISTED.values(), ids=NOT_LISTED)
def test_what_cannot_be_read_hides_nothing_else_and_is_told(capsys, make_broker, changes, name, reason):
    broker = make_broker({TENANTS: ["demo", "public"]} | changes)
    kind, _, name = name.partition(" ")
    answer = told(capsys, broker.url, status=1)
    assert [each["topic"] for each in answer["subscriptions"]] == [TOPIC]
    (missing,) = answer["missing"]
    assert (missing["topic"], missing["kind"], missing["reason"]) == (name, kind, reason)
    assert missing["why"]
    outcome = snapshot(capsys, broker.url)
    assert (outcome.status, outcome.err) == (1, "")
    assert "at most 30 acked entries of 1 subscription" in outcome.out
    said = [line for line in outcome.out.splitlines() if name.replace("\ud800", "\\ud800") in line]
    assert "not read" in said[0]
    assert REASONS[reason] in said[1]


# --- Partly acked batches, order, and names


def batched(acked="[]", *, mean=10):
    """Answers of a broker whose consumers got batches."""
    internals, stats = look(individuallyDeletedMessages=acked), copy.deepcopy(STATS)
    stats["subscriptions"]["sub"]["consumers"][0] |= {"avgMessagesPerEntry": mean}
    return internals, stats


def changes(internals, stats, path=PATH):
    return {f"{path}/internalStats": internals, f"{path}/stats": stats}


def test_where_entries_are_batches_the_number_of_messages_is_unknown(capsys, make_broker):
    broker = make_broker(changes(*batched("[(3:0..3:9]]")))
    said = " ".join(snapshot(capsys, broker.url).out.split())
    assert " at most 9+ " in said
    assert (
        "+: about 10 messages an entry; acked messages of partly acked batches are added: brokers do not show" in said
    )
    assert "dies now: at most 9+ acked entries of 1 subscription" in said
    answer = told(capsys, broker.url)
    (found,), (total,) = answer["subscriptions"], answer["brokers"]
    assert (found["comes_back"], found["messages"], found["messages_per_entry"]) == (9, None, 10)
    assert total["may_have_batches"]


def test_without_a_consumer_the_topic_says_how_large_batches_are(capsys, make_broker):
    internals, stats = batched()
    stats["subscriptions"]["sub"]["consumers"] = []
    stats["msgInCounter"], internals["entriesAddedCounter"] = 600, 60
    assert told(capsys, make_broker(changes(internals, stats)).url)["subscriptions"][0]["messages_per_entry"] == 10
    stats["msgInCounter"] = internals["entriesAddedCounter"] = 0
    outcome = snapshot(capsys, make_broker(changes(internals, stats)).url)
    assert "messages per entry are unknown" in outcome.out
    assert " 0+ " in outcome.out


def test_the_most_redelivered_come_first_and_then_names_as_people_sort_them(capsys, make_broker):
    paths = [f"{PATH}-partition-{number}" for number in range(12)]
    answers = {f"{PATH}/partitions": {"partitions": 12}}
    for number, path in enumerate(paths):
        answers |= changes(*batched({7: "[(3:0..3:9]]", 3: "[(3:0..3:5]]"}.get(number, "[]")), path)
    broker = make_broker(answers)
    answer = told(capsys, broker.url, "--topic", "smoke")
    order = [int(each["topic"].rpartition("-")[2]) for each in answer["subscriptions"]]
    assert order == [7, 3, 0, 1, 2, 4, 5, 6, 8, 9, 10, 11]
    first = told(capsys, broker.url, "--topic", "smoke", "--top", "2")
    assert first["subscriptions"] == answer["subscriptions"][:2]
    assert (first["subscriptions_not_shown"], first["brokers"]) == (10, answer["brokers"])
    outcome = snapshot(capsys, broker.url, "--topic", "smoke", "--top", "2")
    assert "not shown: 10 cursors" in outcome.out
    assert "partition-0 " not in outcome.out
    assert "at most 14+ acked entries of 12 subscriptions" in outcome.out


@pytest.mark.parametrize(
    ("metadata", "is_zookeeper"),
    [
        ({"metadataStoreUrl": "zk:zk-1:2181,zk-2:2181/pulsar"}, True),
        ({"metadataStoreUrl": "zk-1:2181,zk-2:2181/pulsar"}, True),
        ({"metadataStoreUrl": "", "zookeeperServers": "zk-1:2181"}, True),
        ({"metadataStoreUrl": "null", "zookeeperServers": "null"}, False),
        ({"metadataStoreUrl": "rocksdb:///data/metadata", "zookeeperServers": ""}, False),
        ({"metadataStoreUrl": "oxia://oxia:6648/default", "zookeeperServers": "zk-1:2181"}, False),
        ({"metadataStoreUrl": "etcd:http://etcd:2379"}, False),
        ({}, False),
    ],
)
def test_zookeeper_is_named_only_where_it_is(capsys, make_broker, metadata, is_zookeeper):
    assert (
        "jute.maxbuffer" in limits(told(capsys, make_broker({RUNTIME: CONFIGURATION | metadata}).url))
    ) is is_zookeeper
