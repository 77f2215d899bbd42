"""`ackstate explain` on real stores: the holes that it shows, their causes, and that acking them has the shown
effect."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ackstate import CursorConfig, Format, ManagedCursor, Message, Position, SqliteStore
from ackstate.stores import pulsar
from ackstate.topic import MessageLog
from ackstate.topic.log import log_owner
from ackstate.wire.pulsar import CursorInfo, encode_cursor_info
from command_line import assert_one_line, run, tree
from pulsar_admin import RUNTIME, serving
from pulsar_admin import TOPIC as SMOKE
from pulsar_nodes import TOPIC as IN_NODES
from pulsar_nodes import layout_of, new_nodes

TOPIC = "persistent://a/b/orders"
NOW_MS = 1_700_000_000_000
DATABASE = "ackstate.sqlite3"


class FilledStore:
    """Fills a store: publishes to one topic, acks by its cursors, and closes it all before anybody looks."""

    def __init__(self, path):
        self.path = path

    def tell(self, *batches, acks, subscription="billing", form=Format.NATIVE, entries_per_ledger_max=1):
        """Publish batches, a ledger each, then ack positions given by the ledger's number from 0."""
        with closing(SqliteStore(self.path)) as store:
            log = MessageLog.open(store, topic=TOPIC, entries_per_ledger_max=entries_per_ledger_max)
            for messages in batches:
                log.publish(messages)
            ledger_ids = [ledger_id for ledger_id, count in log.ledgers.counts().items() if count]
            cursor = opened(store, subscription, form)
            cursor.ack_many([Position(ledger_ids[number], entry_id) for number, entry_id in acks], now_ms=0)
            cursor.close(now_ms=0)
        return ledger_ids

    def do(self, statement, *values):
        with closing(sqlite3.connect(self.path / DATABASE)) as connection, connection:
            connection.execute(statement, values)


def opened(store, subscription="billing", form=Format.NATIVE):
    return ManagedCursor.open(
        store,
        topic=TOPIC,
        subscription=subscription,
        ledgers=MessageLog.open(store, topic=TOPIC).ledgers,
        config=CursorConfig(format=form),
        now_ms=0,
    )


def message(age_ms=1_000, wait_ms=None):
    return Message(b"", deliver_at_ms=-1 if wait_ms is None else NOW_MS + wait_ms, publish_time_ms=NOW_MS - age_ms)


@pytest.fixture
def story(tmp_path):
    return FilledStore(tmp_path / "store")


def explained(capsys, path, *options, status=0):
    """Explain a store, see that it was not touched, and return the explanation of each cursor."""
    before = tree(path)
    outcome = run(capsys, "explain", path, "--json", f"--now-ms={NOW_MS}", *options)
    assert tree(path) == before
    assert (outcome.status, outcome.err) == (status, "")
    answer = json.loads(outcome.out)
    assert (answer["store"], answer["now_ms"]) == (str(path), NOW_MS)
    return answer["cursors"]


def told(hole):
    return hole["first"], hole["last"], hole["why"], hole["detail"]


def freed(hole):
    return hole["cost_bytes"], hole["freed_bytes"], hole["freed_ranges"], hole["mark_delete_advance"]


UNKNOWN = "the store does not record its consumer"


def test_every_second_acked_shows_what_holds_back_the_mark_delete_then_the_costliest(story, capsys):
    acks = [(0, entry_id) for entry_id in range(1, 300, 2)]
    (ledger,) = story.tell([message(5_000)] * 300, acks=acks)
    (cursor,) = explained(capsys, story.path, "--top=3")
    # A range is 12 bytes and two ends: 64 below 128 and 86 above.
    assert (cursor["range_count"], cursor["record_bytes"]) == (150, 2_272)
    assert (cursor["hole_count"], cursor["backlog"], cursor["mark_delete"]) == (150, 150, "1:-1")
    assert [told(hole) for hole in cursor["holes"]] == [
        (f"{ledger}:{entry_id}", f"{ledger}:{entry_id}", "UNKNOWN", UNKNOWN) for entry_id in (0, 130, 132)
    ]
    assert [freed(hole) for hole in cursor["holes"]] == [(14, 14, 1, 2), (16, 16, 1, 0), (16, 16, 1, 0)]
    assert {hole["age_ms"] for hole in cursor["holes"]} == {5_000}


def test_what_acking_a_hole_is_said_to_free_it_frees(story, capsys):
    acks = [(0, 1), (0, 2), (0, 130), (1, 3), (2, 0), (2, 1), (3, 2)]
    story.tell([message()] * 131, [message()] * 5, [message()] * 2, [message()] * 4, acks=acks)
    (cursor,) = explained(capsys, story.path, "--top=100")
    assert cursor["hole_count"] == len(cursor["holes"]) == 5
    for hole in cursor["holes"]:
        with closing(SqliteStore.open_copy(story.path)) as store:
            reopened = opened(store)
            before = reopened.stats()
            mark_delete = reopened.mark_delete_position
            first, last = Position.parse(hole["first"]), Position.parse(hole["last"])
            reopened.ack_entries(first.ledger_id, range(first.entry_id, last.entry_id + 1), now_ms=0)
            after = reopened.stats()
            moved = reopened.ledgers.count_between(mark_delete, reopened.mark_delete_position)
        assert hole["freed_bytes"] == before.record_bytes - after.record_bytes
        assert hole["freed_ranges"] == before.range_count - after.range_count
        assert hole["mark_delete_advance"] == moved
        assert hole["entry_count"] == before.backlog - after.backlog


def test_a_delayed_message_is_told_from_one_that_is_due(story, capsys):
    delayed, due = message(2_000, wait_ms=60_000), message(3_000, wait_ms=0)
    batch = [delayed, message(), due, message(), due, delayed, message(), message(), message()]
    (ledger,) = story.tell(batch, acks=[(0, 1), (0, 3), (0, 6), (0, 8)])
    (cursor,) = explained(capsys, story.path)
    holes = {hole["first"]: hole for hole in cursor["holes"]}
    assert told(holes[f"{ledger}:0"])[2:] == ("DELAYED", "the last message is due in 60.0 s")
    assert told(holes[f"{ledger}:2"])[2:] == ("UNKNOWN", UNKNOWN)
    assert told(holes[f"{ledger}:4"])[1:] == (
        f"{ledger}:5", "DELAYED",
        "1 of 2 messages are delayed, the last is due in 60.0 s; the store does not record the consumers of the others",
    )  # fmt: skip
    assert [holes[f"{ledger}:{n}"]["deliver_at_ms"] for n in (0, 2, 4, 7)] == [NOW_MS + 60_000, None] * 2
    assert [holes[f"{ledger}:{n}"]["age_ms"] for n in (0, 2, 4, 7)] == [2_000, 3_000, 3_000, 1_000]


def test_of_a_large_hole_a_sample_is_read(story, capsys):
    batch = [message()] * 500 + [message(wait_ms=1_500)] * 500 + [message()]
    story.tell(batch, acks=[(0, 1_000)])
    (cursor,) = explained(capsys, story.path)
    (hole,) = cursor["holes"]
    assert hole["detail"] == (
        "32 of 64 messages sampled are delayed, the last is due in 1.5 s; "
        "the store does not record the consumers of the others"
    )  # fmt: skip
    assert (hole["entry_count"], hole["mark_delete_advance"]) == (1_000, 1_001)


def test_a_lost_ledger_is_told(story, capsys):
    _, lost, last = story.tell(*[[message()] * 4] * 3, acks=[(0, 2), (1, 1), (1, 3), (2, 2)])
    story.do("DELETE FROM entries WHERE ledger_id = ?", lost)
    story.do("DELETE FROM ledgers WHERE id = ?", lost)
    (cursor,) = explained(capsys, story.path)
    assert cursor["status"] == "ok"
    by_why = {hole["first"]: (hole["why"], hole["detail"], hole["age_ms"]) for hole in cursor["holes"]}
    gone = ("DATA_LOST", f"the message log has no ledger {lost}", None)
    assert (by_why[f"{lost}:0"], by_why[f"{lost}:2"]) == (gone, gone)
    assert by_why[f"{last}:0"] == ("UNKNOWN", UNKNOWN, 1_000)
    assert len(by_why) == cursor["hole_count"] == 5


def test_without_the_message_log_nothing_is_said_to_be_lost(story, capsys):
    (ledger,) = story.tell([message()] * 9, acks=[(0, 4), (0, 8)])
    story.do("DELETE FROM entries WHERE ledger_id = ?", ledger)
    story.do("DELETE FROM ledgers WHERE owner = ?", log_owner(TOPIC))
    (cursor,) = explained(capsys, story.path)
    assert cursor["backlog"] is None
    assert [told(hole)[:3] for hole in cursor["holes"]] == [
        (f"{ledger}:0", f"{ledger}:3", "UNKNOWN"), (f"{ledger}:5", f"{ledger}:7", "UNKNOWN"),
    ]  # fmt: skip
    assert {hole["detail"] for hole in cursor["holes"]} == {
        "the store has neither the topic's message log nor the consumers"
    }  # fmt: skip


def test_the_keys_of_the_json_are_those_of_the_documentation(story, capsys):
    story.tell([message()] * 3, acks=[(0, 1)])
    (cursor,) = explained(capsys, story.path)
    (hole,) = cursor["holes"]
    assert set(hole) == {
        "first", "last", "entry_count", "age_ms", "why", "detail", "consumers", "deliver_at_ms", "delivery_count",
        "next_delivery_ms", "cost_bytes", "freed_bytes", "freed_ranges", "mark_delete_advance",
    }  # fmt: skip
    assert (hole["consumers"], hole["delivery_count"]) == ([], None)
    document = (Path(__file__).parents[4] / "docs" / "json-output.md").read_text(encoding="utf-8")
    _, found, section = document.partition("## `explain --json`")
    assert found
    assert {key for key in [*cursor, *hole, "now_ms"] if f"`{key}`" not in section} == set()


def test_people_get_a_table(story, capsys):
    (ledger,) = story.tell([message(90_061_000)] * 6, acks=[(0, 1), (0, 3), (0, 5)])
    outcome = run(capsys, "explain", story.path, "--top", "2", "--now-ms", str(NOW_MS))
    lines = [" ".join(line.replace("│", " ").split()) for line in outcome.out.splitlines()]
    assert lines[0] == f"{TOPIC}, billing: ok"
    assert lines[1] == "mark-delete 1:-1, backlog 3, 3 ranges in 42 bytes, 3 holes"
    assert lines[5:] == [
        f"{ledger}:0 {ledger}:0 1 1 d 1 h 14 14 1 2 not acked: {UNKNOWN}",
        f"{ledger}:2 {ledger}:2 1 1 d 1 h 14 14 1 0 not acked: {UNKNOWN}",
        "1 more (--top)",
        "",
        "1 cursor",
    ]
    assert_one_line(run(capsys, "explain", story.path, "--topic", "absent"), "'absent'", "'billing'")


# --- Stores that cannot be read


def test_a_cursor_that_does_not_open_is_reported_and_the_others_are_explained(story, capsys):
    story.tell([message()] * 3, acks=[(0, 1)])
    story.tell(acks=[(0, 2)], subscription="audit")
    story.do("UPDATE metadata SET data = x'00' WHERE path LIKE '%billing'")
    audit, billing = explained(capsys, story.path, status=1)
    assert (audit["status"], audit["hole_count"]) == ("ok", 1)
    assert (billing["status"], billing["mark_delete"], billing["hole_count"], billing["holes"]) == (
        "problem", None, None, [],
    )  # fmt: skip
    assert billing["problems"][0]["repairs"]
    outcome = run(capsys, "explain", story.path)
    assert outcome.status == 1
    assert f"{TOPIC}, billing: problem" in outcome.out
    assert "repair=Repair.START_ANEW" in outcome.out


# --- A live broker

EXPLAINED = {
    "subscription": "billing", "type": "Shared", "mark_delete": "3:-1", "backlog": 5, "range_count": 1,
    "record_bytes": 14, "redelivery_if_crashed": 3, "hole_count": 2, "holes": [], "blocked": [],
}  # fmt: skip
PUBLIC = "/admin/v2/persistent/public/default"


@pytest.fixture
def live():
    """A broker with two open topics, of which one is explained."""
    explained = {"topic": TOPIC, "now_ms": 7, "subscriptions": [EXPLAINED]}
    with serving({PUBLIC: ["persistent://public/default/t", SMOKE], f"{PUBLIC}/t/explain": explained}) as broker:
        yield broker


def test_a_topic_that_cannot_be_read_is_named(live, capsys):
    outcome = run(capsys, "explain", live.url, "--json")
    assert (outcome.status, outcome.err) == (1, "")
    answer = json.loads(outcome.out)
    assert answer["now_ms"] == 7
    expected = {"topic": "persistent://public/default/t", "status": "ok", "problems": []} | EXPLAINED
    assert answer["cursors"] == [expected]
    (missing,) = answer["missing"]
    assert missing["topic"] == SMOKE
    assert "HTTP 404" in missing["why"]
    live.answers[PUBLIC] = [SMOKE]
    assert_one_line(run(capsys, "explain", live.url), "HTTP 404", "/smoke/explain")


def test_a_tenant_and_a_namespace_that_cannot_be_listed_are_named(live, capsys):
    live.answers |= {
        "/admin/v2/tenants": ["demo", "public"], PUBLIC: ["persistent://public/default/t"],
        "/admin/v2/namespaces/public": ["public/default", "public/standalone/ns1"],
    }  # fmt: skip
    outcome = run(capsys, "explain", live.url, "--json")
    assert (outcome.status, outcome.err) == (1, "")
    missing = {each["topic"]: (each["kind"], each["reason"]) for each in json.loads(outcome.out)["missing"]}
    assert missing == {"demo": ("tenant", "gone"), "public/standalone/ns1": ("namespace", "unsupported")}
    assert "tenant demo does not exist" in run(capsys, "explain", live.url).out


def test_of_a_broker_of_pulsar_the_metadata_store_is_read_that_it_names(capsys, monkeypatch):
    nodes, opened = new_nodes(), []
    for name in ("s", "t"):
        path = f"/managed-ledgers/public/default/persistent/t1/{name}"
        nodes.set(path, encode_cursor_info(CursorInfo(-1, Position(0, -1))))
    monkeypatch.setattr(pulsar, "open_cluster", lambda url, **_: opened.append(url) or layout_of(nodes))
    with serving() as broker:
        assert_one_line(run(capsys, "explain", broker.url), "name its metadata store instead, as pulsar+zk://HOST:PORT")
        broker.answers[RUNTIME] = {"metadataStoreUrl": "zk:127.0.0.1:1/pulsar"}
        broker.answers["/admin/v2/persistent/public/default/t1/partitions"] = {"partitions": 0}
        outcome = run(capsys, "explain", broker.url, "--topic", "t1", "--subscription", "s", "--json")
    answer = json.loads(outcome.out)
    assert opened == [answer["store"]] == ["zk:127.0.0.1:1/pulsar"]
    assert [(each["topic"], each["subscription"]) for each in answer["cursors"]] == [(IN_NODES, "s")]
