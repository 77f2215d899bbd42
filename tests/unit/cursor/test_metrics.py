"""Prometheus reads of every open cursor what `stats` says, and a cursor that cannot be read hides no other."""

from __future__ import annotations

import gc
import re
import sys
import threading
import urllib.request
from dataclasses import fields

import pytest
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from ackstate import CursorConfig, LedgerMap, ManagedCursor, MemoryStore, Position
from ackstate.cursor import CursorStats
from ackstate.metrics import CursorCollector

ORDERS = "persistent://public/default/orders"
LEDGER_NAME = "public/default/persistent/orders"
BILLING = {"namespace": "public/default", "ledger_name": LEDGER_NAME, "cursor_name": "billing"}


def open_cursor(*, store=None, subscription="billing", **settings):
    return ManagedCursor.open(
        store or MemoryStore(),
        topic=ORDERS,
        subscription=subscription,
        ledgers=LedgerMap.from_counts({3: 1_000}),
        config=CursorConfig(flush_interval_ms=0, **settings),
        now_ms=0,
    )


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def collector(registry):
    collector = CursorCollector()
    registry.register(collector)
    return collector


def parse(text):
    """Return every sample of a scrape, (name, labels) -> value, and fail if one is there twice."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return samples


def scrape(registry):
    return parse(generate_latest(registry).decode())


def value(samples, name, **labels):
    return samples[name, frozenset(labels.items())]


EXPORTED = {
    "pulsar_ml_cursor_nonContiguousDeletedMessagesRange": "range_count",
    "pulsar_ml_cursor_persistLedgerSucceed": "ledger_write_count",
    "pulsar_ml_cursor_persistLedgerErrors": "ledger_error_count",
    "pulsar_ml_cursor_persistZookeeperSucceed": "metadata_write_count",
    "pulsar_ml_cursor_persistZookeeperErrors": "metadata_error_count",
    "pulsar_ml_cursor_writeLedgerLogicalSize": "ledger_bytes_written",
    "ackstate_cursor_batches_cut": "batches_cut",
    "ackstate_cursor_young_age_ms": "young_age_ms",
    "ackstate_cursor_promotions_total": "promotion_count",
    "ackstate_cursor_promoted_messages_total": "promoted_message_count",
    "ackstate_cursor_ranges": "range_count",
    "ackstate_cursor_record_bytes": "record_bytes",
    "ackstate_cursor_unpersisted_record_bytes": "unpersisted_record_bytes",
    "ackstate_cursor_batches_unwritten": "batches_unwritten",
    "ackstate_cursor_truncations_total": "truncation_count",
    "ackstate_cursor_journal_bytes": "journal_bytes",
    "ackstate_cursor_snapshots_total": "snapshot_count",
    "ackstate_cursor_persists_total": "persist_count",
    "ackstate_cursor_persisted_bytes_total": "bytes_persisted",
}


def test_each_number_is_the_one_of_stats(registry, collector):
    cursor = open_cursor()
    # No two alike, so that none can stand for another.
    stats = CursorStats(**{field.name: number for number, field in enumerate(fields(CursorStats), start=1)})
    cursor.stats = lambda: stats
    collector.add(cursor, topic=ORDERS, subscription="billing")
    samples = scrape(registry)
    for name, field in EXPORTED.items():
        assert value(samples, name, **BILLING) == getattr(stats, field), name
    for cause in ("unwritten", "young", "cut"):
        number = getattr(stats, f"redelivery_{cause}")
        assert value(samples, "ackstate_cursor_redelivery_if_crashed", cause=cause, **BILLING) == number
    backlog = {**BILLING, "topic": ORDERS, "subscription": "billing"}
    assert value(samples, "pulsar_subscription_back_log", **backlog) == stats.backlog
    assert value(samples, "ackstate_cursors_unreadable") == 0
    # And nothing of Pulsar's that is not counted here.
    assert len(samples) == len(EXPORTED) + 3 + 1 + 1


def test_metric_types_and_texts(registry, collector):
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        is_counter = family.type == "counter"
        if family.name.startswith("ackstate"):
            assert re.fullmatch("[a-z_]+(?<!_count)", family.name)
            assert is_counter == (f"{family.name}_total" in generate_latest(registry).decode())
        else:
            assert family.type == "gauge" or family.name == "pulsar_out_messages"
        assert family.documentation[0].isupper()
        assert family.documentation.endswith(".")


def test_names_are_written_as_pulsar_writes_them(registry, collector):
    cursors = [open_cursor() for _ in range(4)]
    collector.add(cursors[0], topic="persistent://acme/shop eu/a b/c~d", subscription="x y/z*")
    collector.add(cursors[1], topic="non-persistent://acme/shop/t", subscription="s")
    collector.add(cursors[2], topic='any "text"\n', subscription="\\")
    collector.add(cursors[3], topic="persistent://acme/shop", subscription="s")
    found = {
        (labels["namespace"], labels["ledger_name"], labels["cursor_name"], labels["topic"], labels["subscription"])
        for labels in (dict(key) for name, key in scrape(registry) if name == "pulsar_subscription_back_log")
    }
    assert found == {
        (
            "acme/shop eu",
            "acme/shop eu/persistent/a+b%2Fc%7Ed",
            "x+y%2Fz*",
            "persistent://acme/shop eu/a b/c~d",
            "x y/z*",
        ),
        ("acme/shop", "acme/shop/non-persistent/t", "s", "non-persistent://acme/shop/t", "s"),
        ("", 'any "text"\n', "%5C", 'any "text"\n', "\\"),
        ("", "persistent://acme/shop", "s", "persistent://acme/shop", "s"),
    }


def subscriptions_in(registry):
    return {dict(key)["cursor_name"] for name, key in scrape(registry) if name == "ackstate_cursor_ranges"}


def test_a_closed_or_dropped_cursor_leaves_and_the_others_stay(registry, collector):
    cursors = {name: open_cursor(subscription=name) for name in ("closed", "dropped", "open")}
    for name, cursor in cursors.items():
        collector.add(cursor, topic=ORDERS, subscription=name)
    del cursor
    assert subscriptions_in(registry) == {"closed", "dropped", "open"}
    cursors["closed"].close(now_ms=0)
    del cursors["dropped"]
    gc.collect()
    assert subscriptions_in(registry) == {"open"}
    assert value(scrape(registry), "ackstate_cursors_unreadable") == 0


def test_registering_reads_no_cursor_but_knows_every_name():
    cursor, collector, registry = open_cursor(), CursorCollector(), CollectorRegistry(auto_describe=True)
    collector.add(cursor, topic=ORDERS, subscription="billing")
    stats, reads = cursor.stats(), []
    cursor.stats = lambda: reads.append(1) or stats
    registry.register(collector)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(CursorCollector())
    described = {family.name for family in collector.describe()}
    assert not reads
    assert described == {family.name for family in collector.collect()}
    assert reads == [1]


@pytest.mark.slow
def test_acks_and_scrapes_and_reopens_at_once(registry, collector):
    """Every scrape is whole and of one instant, whatever other threads do."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    stop = threading.Event()
    failures = []

    def ack(subscription):
        try:
            while not stop.is_set():
                cursor = open_cursor(subscription=subscription)
                collector.add(cursor, topic=ORDERS, subscription=subscription)
                for entry_id in range(1, 200, 2):
                    cursor.ack(Position(3, entry_id), now_ms=0)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=ack, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    try:
        seen = set()
        for _ in range(100):
            samples = scrape(registry)
            assert value(samples, "ackstate_cursors_unreadable") == 0
            for (name, key), ranges in samples.items():
                if name == "ackstate_cursor_ranges":
                    # Alone and unwritten, each range is one message.
                    assert samples["ackstate_cursor_redelivery_if_crashed", key | {("cause", "unwritten")}] == ranges
                    seen.add(ranges)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not failures
    assert len(seen) > 10
