"""The admin server within a broker answers from live objects, in Pulsar's words, in the thread of the event loop."""

import asyncio
import json
import threading
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ackstate import (
    AsyncTopics,
    CursorConfig,
    Format,
    MemoryStore,
    Message,
    Start,
    SubscriptionType,
    Topics,
    TopicSettings,
)
from ackstate.analysis.admin.app import create_app
from ackstate.analysis.admin.live import live_configuration, live_version
from ackstate.analysis.pulsar.sources import broker_settings
from ackstate.cursor import RangeForm
from ackstate.delay import DelayConfig
from ackstate.errors import RescheduleRefusedError
from ackstate.limits import GateLimits
from ackstate.topic import MessageLog
from ackstate.wire.pulsar import LimitRule

ORDERS = "persistent://public/default/orders"
PATH = "/admin/v2/persistent/public/default/orders"
VECTORS = Path(__file__).parents[3] / "vectors" / "internal-stats"
SETTINGS = TopicSettings(delay_index=DelayConfig(tick_time_ms=10), limits=GateLimits(max_unacked_messages=6))


class OpenTopics:
    """Stands for the topics of the test that runs, as `shared` does for its store."""

    settings = SETTINGS

    def __init__(self, current):
        self.current, self.readers = current, set()

    def __iter__(self):
        self.readers.add(threading.current_thread())
        return iter(self.current["topics"])

    def __getitem__(self, name):
        self.readers.add(threading.current_thread())
        return self.current["topics"][name]


class ThreadCollector(Collector):
    """Notes the thread that scrapes it."""

    def __init__(self):
        self.threads = set()

    def collect(self):
        self.threads.add(threading.current_thread())
        return [GaugeMetricFamily("scraped", "Scraped.", value=1)]

    def describe(self):
        return []


class ServedTopic:
    """A broker with one topic, and requests to its admin server."""

    def __init__(self, ask):
        self.ask = ask
        self.store = MemoryStore()
        self.topics = Topics(self.store, settings=SETTINGS)
        self.topic = self.topics.open(ORDERS, now_ms=1_000)

    def subscribe(self, name="billing", kind=SubscriptionType.SHARED, **options):
        return self.topic.subscribe(name, start=Start.EARLIEST, kind=kind, now_ms=1_000, **options)

    def publish(self, count, **fields):
        return self.topic.publish([Message(b"apples", **fields)] * count, now_ms=1_000)

    def get(self, path, status=200, **query):
        answer = self.ask("GET", path, params=query)
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.fixture(scope="session")
def live(standing_store, in_process):
    """The broker of the test that runs, and requests to an application with its topics."""
    current = {}
    topics, registry, collector = OpenTopics(current), CollectorRegistry(), ThreadCollector()
    registry.register(collector)
    app = create_app(standing_store(current), topics=topics, registry=registry)
    return current, topics, collector, in_process(app)


@pytest.fixture
def broker(live):
    broker = ServedTopic(live[3])
    live[0].update(store=broker.store, topics=broker.topics)
    return broker


def with_messages_of_every_kind(broker):
    """3 acked, 1 given back, 1 delayed, and 6 in flight, which is the limit."""
    subscription = broker.subscribe(properties={"team": "money"})
    broker.publish(1, deliver_at_ms=10**6)
    broker.publish(12)
    sent = [each.position for each in subscription.dispatch("ann", 6, now_ms=2_000)]
    for position in (sent[1], sent[2], sent[4]):
        subscription.ack(position, now_ms=2_000)
    subscription.nack(sent[5], delay_ms=60_000, now_ms=2_000)
    subscription.dispatch("ben", 10, now_ms=2_000)
    return subscription, sent


def test_stats_are_those_of_the_live_subscription(broker):
    subscription, _ = with_messages_of_every_kind(broker)
    assert broker.get(f"{PATH}/stats") == {
        "msgOutCounter": 10,
        "nonContiguousDeletedMessagesRanges": 2,
        "subscriptions": {
            "billing": {
                "type": "Shared",
                "msgBacklog": 10,
                "msgBacklogNoDelayed": 9,
                "msgDelayed": 1,
                "msgInReplay": 1,
                "unackedMessages": 6,
                "msgOutCounter": 10,
                "blockedSubscriptionOnUnackedMsgs": True,
                "nonContiguousDeletedMessagesRanges": 2,
                "subscriptionProperties": {"team": "money"},
                "isDurable": True,
                "durable": True,
                "isReplicated": False,
                "replicated": False,
                "consumers": [
                    {"consumerName": "ann", "unackedMessages": 2, "blockedConsumerOnUnackedMsgs": False},
                    {"consumerName": "ben", "unackedMessages": 4, "blockedConsumerOnUnackedMsgs": False},
                ],
            }
        },
    }
    assert broker.topic.subscriptions["billing"] is subscription


def test_internal_stats_are_those_of_the_live_cursor(broker):
    subscription, sent = with_messages_of_every_kind(broker)
    subscription.cursor.persist(now_ms=3_000)
    subscription.ack(sent[0], now_ms=3_000)
    ledger_id, last = broker.topic.log.ledgers.last_confirmed
    (cursor_ledger, _) = subscription.cursor.view.last_journal_entry
    stats = broker.get(f"{PATH}/internalStats")
    assert stats["state"] == "LedgerOpened"
    assert stats["lastConfirmedEntry"] == f"{ledger_id}:{last}"
    assert (stats["numberOfEntries"], stats["currentLedgerEntries"]) == (13, 13)
    assert stats["totalSize"] == stats["currentLedgerSize"] > 13 * len(b"apples")
    assert stats["ledgers"][0] | {"size": 0} == {
        "ledgerId": ledger_id, "entries": 0, "size": 0, "offloaded": False, "underReplicated": False,
    }  # fmt: skip
    assert stats["cursors"]["billing"] == {
        "markDeletePosition": f"{ledger_id}:-1",
        "readPosition": f"{ledger_id}:11",
        "waitingReadOp": False,
        "pendingReadOps": 0,
        "messagesConsumedCounter": -9,
        "cursorLedger": cursor_ledger,
        "cursorLedgerLastEntry": 0,
        "individuallyDeletedMessages": f"[({ledger_id}:0..{ledger_id}:3],({ledger_id}:4..{ledger_id}:5]]",
        "lastLedgerSwitchTimestamp": "1970-01-01T00:00:00Z",
        "state": "Open",
        "active": True,
        "numberOfEntriesSinceFirstNotAckedMessage": 12,
        "totalNonContiguousDeletedMessagesRange": 2,
        "subscriptionHavePendingRead": False,
        "subscriptionHavePendingReplayRead": False,
        "properties": {},
        "redeliveryIfCrashed": {"entries": 1, "unwritten": 1, "young": 0, "cut": 0, "batches": 0},
    }


def test_every_name_and_type_is_that_of_a_real_broker(broker):
    """A broker of Pulsar has more, and `redeliveryIfCrashed` is ours."""
    with_messages_of_every_kind(broker)
    for kind in ("stats", "internalStats"):
        real = json.loads((VECTORS / f"{kind}-smoke-alternate.json").read_text())
        ours = broker.get(f"{PATH}/{kind}")
        (name,) = real.get("subscriptions", real.get("cursors"))
        for part in ("subscriptions", "cursors"):
            if part in real:
                real[part] = {"billing": real[part][name]}
        assert_same_shape(ours, real)


def assert_same_shape(ours, real, *, path=""):
    if isinstance(ours, dict) and not path.endswith(("Properties", "properties")):
        for name in ours.keys() - {"redeliveryIfCrashed", "lastLedgerCreationFailureTimestamp"}:
            assert name in real, f"{path}.{name}"
            assert_same_shape(ours[name], real[name], path=f"{path}.{name}")
    elif isinstance(ours, list) and ours and real:
        assert_same_shape(ours[0], real[0], path=f"{path}[]")
    else:
        assert type(ours) is type(real), path


def test_the_lists_lead_to_every_open_topic_with_a_name_of_pulsar(broker):
    for name in ("persistent://public/default/a", "persistent://public/eu/b", "persistent://shop/eu/c", "plain"):
        broker.topics.open(name, now_ms=1_000)
    assert broker.get("/admin/v2/tenants") == ["public", "shop"]
    assert broker.get("/admin/v2/namespaces/public") == ["public/default", "public/eu"]
    assert broker.get("/admin/v2/persistent/public/default") == ["persistent://public/default/a", ORDERS]
    assert broker.get(f"{PATH}/partitions") == {"partitions": 0}
    broker.topic.close(now_ms=1_000)
    assert broker.get("/admin/v2/persistent/public/default") == ["persistent://public/default/a"]
    assert broker.get("/admin/v2/namespaces/none") == broker.get("/admin/v2/persistent/none/none") == []
    broker.get("/admin/v2/namespaces/é", status=412)


def test_a_topic_that_is_not_open_is_read_from_the_store(broker):
    broker.subscribe()
    broker.publish(4)
    broker.topic.close(now_ms=1_000)
    stats = broker.get(f"{PATH}/internalStats")
    assert (stats["state"], stats["numberOfEntries"], list(stats["cursors"])) == ("Closed", 4, ["billing"])
    for kind in ("stats", "explain"):
        assert broker.get(f"{PATH}/{kind}", status=404) == {"reason": f"{ORDERS} is not open here"}
    broker.get(f"{PATH}-2/internalStats", status=404)


def test_explain_is_what_the_subscription_explains(broker):
    subscription, _ = with_messages_of_every_kind(broker)
    answer = broker.get(f"{PATH}/explain", top=1, nowMs=5_000)
    assert (answer["topic"], answer["now_ms"]) == (ORDERS, 5_000)
    (explained,) = answer["subscriptions"]
    reports = subscription.explain_holes(1, now_ms=5_000)
    assert [(hole["first"], hole["why"], hole["detail"], hole["age_ms"]) for hole in explained["holes"]] == [
        (str(each.first), each.why.name, each.detail, 4_000) for each in reports
    ]
    assert explained["hole_count"] == len(subscription.cursor.view.holes()) == 2
    (block,) = explained["blocked"]
    (reason,) = subscription.why_blocked(now_ms=5_000)
    assert (block["rule"], block["since_ms"], block["detail"]) == (
        "maxUnackedMessagesPerSubscription",
        2_000,
        reason.detail,
    )
    assert explained["redelivery_if_crashed"] == 3


def test_live_objects_are_read_in_the_thread_of_the_loop(broker, live):
    _, topics, collector, ask = live
    topics.readers.clear()
    collector.threads.clear()

    async def ask_all():
        transport = httpx.ASGITransport(ask.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for path in ("/admin/v2/tenants", f"{PATH}/stats", f"{PATH}/internalStats", f"{PATH}/explain", "/metrics"):
                assert (await client.get(path)).status_code == 200
        return threading.current_thread()

    loop_thread = asyncio.run(ask_all())
    assert topics.readers == collector.threads == {loop_thread}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CursorConfig(), {"range_count_max": 2**31 - 1, "metadata_range_count_max": 2**31 - 1, "form": RangeForm.LIST}),
        (CursorConfig(range_count_max=7, flush_interval_ms=250), {"ranges_kept_max": 7}),
        (CursorConfig(format=Format.PULSAR), {"range_count_max": 10_000, "metadata_range_count_max": 1_000}),
        (
            CursorConfig(format=Format.PULSAR, range_limit_rule=LimitRule.PULSAR_4_2),
            {"form": RangeForm.WORDS, "rule": LimitRule.PULSAR_4_2, "range_count_max": 10_000},
        ),
        (
            CursorConfig(
                format=Format.PULSAR,
                range_limit_rule=LimitRule.PULSAR_4_2,
                range_form=RangeForm.LIST,
                range_count_max=9,
            ),
            {"form": RangeForm.LIST, "range_count_max": 9, "ranges_kept_max": 10},
        ),
        (CursorConfig(format=Format.PULSAR, range_limit_rule=LimitRule.PULSAR_5_0), {"rule": LimitRule.PULSAR_5_0}),
    ],
)
def test_the_snapshot_reads_our_settings_as_those_of_a_pulsar_broker(config, expected):
    limits = GateLimits(max_unacked_messages=5, max_unacked_messages_per_consumer=3)
    settings = broker_settings(live_configuration(config, limits), live_version(config))
    assert {name: getattr(settings, name) for name in expected} == expected
    assert settings.unpersisted_bytes_max == 5 * 2**20


def test_nothing_is_opened_or_fenced_by_a_request(broker):
    subscription = broker.subscribe()
    broker.publish(1)
    for kind in ("stats", "internalStats", "explain"):
        broker.get(f"{PATH}/{kind}")
    subscription.ack(broker.publish(1)[0], now_ms=1_000)
    subscription.cursor.persist(now_ms=1_000)
    assert MessageLog.find(broker.store, topic=ORDERS).ledgers.counts() == broker.topic.log.ledgers.counts()


def test_a_delayed_message_is_cancelled_or_rescheduled_and_a_refusal_says_why(broker):
    positions = broker.publish(2, deliver_at_ms=2**62)
    subscription = broker.subscribe()
    paths = [f"{PATH}/delayedDelivery/{ledger_id}/{entry_id}" for ledger_id, entry_id in positions]
    assert broker.ask("DELETE", paths[0]).status_code == 204
    assert broker.ask("POST", paths[1], json=2**61).status_code == 204
    for method, path, status, reason in (
        ("DELETE", paths[0], 412, "was cancelled before"),
        ("DELETE", f"{PATH}/delayedDelivery/1/99", 404, "1:99"),
        ("DELETE", f"{PATH}/delayedDelivery/x/1", 400, "ledgerId"),
        ("DELETE", f"{PATH}2/delayedDelivery/1/1", 404, "is not open here"),
    ):
        answer = broker.ask(method, path)
        assert (answer.status_code, reason in answer.json()["reason"]) == (status, True)
    assert broker.ask("POST", paths[1], json=-1).status_code == 400
    assert [each.position for each in subscription.dispatch("ann", 2, now_ms=2**61)] == positions[1:]


async def test_with_asyncio_a_message_is_changed_while_nothing_else_of_its_topic_is_called(in_process):
    async with AsyncTopics(MemoryStore(), settings=SETTINGS, clock=lambda: 1_000) as topics:
        topic = await topics.open(ORDERS)
        (position,) = await topic.publish([Message(b"", deliver_at_ms=9_000)])
        app = create_app(topics.topics.store, topics=topics)
        transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client, topic.alone:
            asked = asyncio.create_task(client.delete(f"{PATH}/delayedDelivery/{position.ledger_id}/0"))
            await asyncio.sleep(0.01)
            assert not asked.done()
            topic.alone.release()
            assert (await asked).status_code == 204
            await topic.alone.acquire()
        with pytest.raises(RescheduleRefusedError, match="was cancelled"):
            await topic.reschedule(position, deliver_at_ms=5)
