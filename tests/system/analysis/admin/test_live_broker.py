"""A broker that serves its own admin paths over HTTP: the commands read it as they read a broker of Pulsar."""

import asyncio
import json
import random
import socket
import textwrap
import threading
from contextlib import closing, contextmanager, suppress
from urllib.parse import unquote_plus

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry, Gauge

from ackstate import CursorConfig, Message, SqliteStore, Start, Topics, TopicSettings
from ackstate.analysis.admin.app import create_app
from ackstate.analysis.pulsar.judgement import at_most
from ackstate.analysis.pulsar.sources import TopicInternals, acked, read_object
from ackstate.limits import GateLimits
from command_line import assert_one_line, run
from shown_consoles import python_block

NOW_MS = 1_700_000_000_000
ORDERS, RETURNS, EU = (f"persistent://{name}" for name in ("public/default/orders", "public/default/returns", "a/eu/b"))
SETTINGS = TopicSettings(
    cursor=CursorConfig(range_count_max=3, become_old_ack_record_seconds=10),
    limits=GateLimits(max_unacked_messages=200),
)


class ThreeTopics:
    """Three topics on a store in files, and a server in the event loop of a thread, which alone uses them."""

    def __init__(self, path, token):
        self.store = SqliteStore(path)
        self.topics = Topics(self.store, settings=SETTINGS)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        app = create_app(self.store, topics=self.topics, token=token)
        self.server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
        self.loop = asyncio.new_event_loop()
        self.failures = []

    async def serve(self):
        await self.server.serve(sockets=[self.listener])

    def call(self, function, *arguments):
        """Call a function in the loop, and return its result."""

        async def called():
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(called(), self.loop).result(timeout=30)

    def work(self, name, subscription_name, seed):
        """Publish, dispatch and ack at random, in any order and some of it durably."""
        rng, topic = random.Random(seed), self.topics.open(name, now_ms=NOW_MS)
        subscription = topic.subscribe(subscription_name, start=Start.EARLIEST, now_ms=NOW_MS)
        for step in range(6):
            now_ms = NOW_MS + 4_000 * step
            topic.publish([Message(b"m")] * 60, now_ms=now_ms)
            sent = [each.position for each in subscription.dispatch("ann", 60, now_ms=now_ms)]
            subscription.ack_many(rng.sample(sent, len(sent) // 2), now_ms=now_ms)
            if step < 5:
                subscription.cursor.persist(now_ms=now_ms)
        return subscription.cursor.redelivery_if_crashed


@contextmanager
def running(path, token=None):
    broker = ThreeTopics(path, token)
    thread = threading.Thread(target=broker.loop.run_until_complete, args=(broker.serve(),))
    thread.start()
    try:
        yield broker
    finally:
        broker.server.should_exit = True
        thread.join()
        broker.loop.close()
        broker.topics.close(now_ms=NOW_MS + 10**6)
        broker.store.close()


@pytest.fixture
def broker(tmp_path):
    with running(tmp_path / "store") as broker:
        yield broker


def answered(capsys, *arguments, status=0):
    outcome = run(capsys, *arguments)
    assert (outcome.status, outcome.err) == (status, "")
    return json.loads(outcome.out)


@pytest.mark.slow
def test_the_snapshot_of_our_broker_predicts_its_gauge(broker, capsys):
    gauges = {
        (name, subscription): broker.call(broker.work, name, subscription, seed)
        for seed, (name, subscription) in enumerate([(ORDERS, "billing"), (ORDERS, "x/y z"), (RETURNS, "s"), (EU, "s")])
    }
    stats = [
        broker.topics[name].subscriptions[subscription].cursor.stats() for name, subscription in gauges
    ]  # fmt: skip
    for cause in ("redelivery_unwritten", "redelivery_young", "redelivery_cut"):
        assert any(getattr(each, cause) for each in stats), cause

    answer = answered(capsys, "pulsar", "snapshot", broker.url, "--json")
    found = {(each["topic"], each["subscription"]): each for each in answer["subscriptions"]}
    predicted = {name: (each["at_least"], each["comes_back"]) for name, each in found.items()}
    assert predicted == {name: (gauge, gauge) for name, gauge in gauges.items()}
    assert all(each["is_exact"] and each["messages"] == each["comes_back"] for each in found.values())
    assert not any(each["settings_assumed"] for each in found.values())
    assert answer["brokers"][0]["at_least"] == answer["brokers"][0]["comes_back"] == sum(gauges.values())
    limits = {use["setting"]: use["limit"] for use in found[ORDERS, "billing"]["limits"]}
    assert limits["managedLedgerMaxUnackedRangesToPersist"] == 3

    # By the fields of Pulsar alone, as a client of Pulsar reads them, the gauge is not above the bound.
    for name in (ORDERS, EU):
        path = f"{broker.url}/admin/v2/{name.replace('://', '/')}"
        internals = httpx.get(f"{path}/internalStats", trust_env=False).json()
        read = read_object(TopicInternals, internals, what="")
        counts = read.entry_counts()
        for subscription, cursor in read.cursors.items():
            bound = at_most(acked(cursor, counts, what=""), counts, "").high
            assert gauges[name, unquote_plus(subscription)] <= bound


@pytest.mark.slow
def test_explain_reads_a_live_broker(broker, capsys):
    for seed, name in enumerate((ORDERS, RETURNS)):
        broker.call(broker.work, name, "billing", seed)
    subscription = broker.topics[ORDERS].subscriptions["billing"]
    options = ("--topic", ORDERS, "--top", "3", f"--now-ms={NOW_MS + 60_000}")
    answer = answered(capsys, "explain", broker.url, *options, "--json")
    assert (answer["store"], answer["now_ms"], answer["missing"]) == (broker.url, NOW_MS + 60_000, [])
    (cursor,) = answer["cursors"]
    reports = broker.call(lambda: subscription.explain_holes(3, now_ms=NOW_MS + 60_000))
    assert [(hole["first"], hole["detail"], hole["age_ms"]) for hole in cursor["holes"]] == [
        (str(each.first), each.detail, each.age_ms) for each in reports
    ]
    assert cursor["redelivery_if_crashed"] == subscription.cursor.redelivery_if_crashed
    assert (cursor["topic"], cursor["subscription"], cursor["status"], cursor["type"]) == (
        ORDERS,
        "billing",
        "ok",
        "Shared",
    )
    assert [each["rule"] for each in cursor["blocked"]] == ["maxUnackedMessagesPerSubscription"]

    outcome = run(capsys, "explain", broker.url)
    assert outcome.out.count("in flight with 'ann'") > 10
    assert f"{ORDERS}, billing: Shared\n" in outcome.out
    assert "  blocked: max_unacked_messages (maxUnackedMessagesPerSubscription) is 200, and " in outcome.out
    assert outcome.out.endswith("2 cursors\n")
    outcome = run(capsys, "explain", broker.url, "--subscription", "unknown")
    assert_one_line(outcome, "has no open subscription 'unknown'; its subscriptions are: 'billing' of")


def test_a_broker_serves_its_state_as_the_guide_has_it(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    code = python_block("guides/serve-policies.md", "uvicorn.Server(")
    assert (code.count("8080"), code.count("server =")) == (1, 1)
    code = code.replace("8080", port).replace("server =", "global server\nserver =")

    async def metrics(names):
        exec("async def main():\n" + textwrap.indent(code, "    "), names)
        task = asyncio.create_task(names["main"]())
        token = {"Authorization": "Bearer s3cret-of-the-operators"}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=token, trust_env=False) as client:
            while not task.done():
                with suppress(httpx.TransportError):
                    text = (
                        await client.get("/metrics", headers={"Authorization": "Bearer s3cret-of-the-operators"})
                    ).text
                    names["server"].should_exit = True
                    await task
                    return text
                await asyncio.sleep(0.05)
        return await task

    with closing(SqliteStore(tmp_path)) as store:
        registry = CollectorRegistry()
        Gauge("orders_waiting", "Orders.", registry=registry).set(7)
        names = {"topics": Topics(store), "store": store, "registry": registry}
        assert "orders_waiting 7.0" in asyncio.run(metrics(names))
