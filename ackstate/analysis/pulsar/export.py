"""Reads the durable ack states of a topic's subscriptions from a live Pulsar cluster; nothing is written or fenced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import google_crc32c

from ackstate.analysis.pulsar.ack_state_file import ExportedCursor, Fingerprint
from ackstate.cursor.recovery import Recovery
from ackstate.errors import AckStateError, CorruptStateError
from ackstate.position import Position
from ackstate.stores.base import LedgerNotFoundError
from ackstate.stores.pulsar import managed_ledger_name
from ackstate.topic.subscriptions import subscription_name, subscription_paths
from ackstate.topic_name import ROOT
from ackstate.wire.pulsar.message_entry import decode_message_times

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ackstate.cursor.formats import CursorState
    from ackstate.ledger_map import LedgerMap
    from ackstate.stores.pulsar import PulsarLayout

_FINGERPRINTS_MAX = 100
_OWN_CURSORS = ("__compaction", "pulsar.dedup")
_REPLICATORS = "pulsar.repl."


def exported_cursors(cluster: PulsarLayout, topic: str, *, subscriptions: Sequence[str] = ()) -> list[ExportedCursor]:
    """Return the cursors of a topic, of each partition if it has some, by topic and subscription.

    Acks that the broker has not persisted yet are not in a state.
    """
    topics = topics_of(cluster, topic)
    found = [cursor for each in topics for cursor in _cursors(cluster, each, subscriptions)]
    missing = set(subscriptions) - {cursor.subscription for cursor in found}
    if missing:
        names = sorted({subscription_name(path) for each in topics for path in subscription_paths(cluster, each)})
        there = ", ".join(map(repr, names)) or "none"
        raise AckStateError(f"{topic} has no subscription {min(missing)!r}; its subscriptions are: {there}")
    return found


def topics_of(cluster: PulsarLayout, topic: str) -> list[str]:
    """Return a topic, or its partitions."""
    path, _, stored = f"{ROOT}/{managed_ledger_name(topic)}".rpartition("/")
    names = cluster.nodes.children(path)
    if stored in names:
        return [topic]
    prefix = f"{stored}-partition-"
    numbers = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    partitions = [f"{topic}-partition-{number}" for number in sorted(filter(str.isdecimal, numbers), key=int)]
    if not partitions:
        raise AckStateError(f"{cluster.nodes.name} has no topic {topic}")
    return partitions


def _cursors(cluster: PulsarLayout, topic: str, subscriptions: Sequence[str]) -> Iterator[ExportedCursor]:
    for path in sorted(subscription_paths(cluster, topic)):
        name = subscription_name(path)
        is_of_broker = name in _OWN_CURSORS or name.startswith(_REPLICATORS)
        if (name not in subscriptions) if subscriptions else is_of_broker:
            continue
        log = cluster.find_message_log(topic)
        if log is None:
            raise AckStateError(f"{topic} was deleted meanwhile")
        found = Recovery(cluster, path, log.ledgers).find(())
        if found is None:
            continue
        content = found.recovered.content
        # Read after the state, so that the log is not older than the state.
        log = cluster.find_message_log(topic) or log
        yield ExportedCursor(
            topic,
            name,
            content,
            log.ledgers.counts(),
            dict(found.record.cursor_properties),
            tuple(_fingerprints(cluster, content, log.ledgers)),
        )


def _fingerprints(cluster: PulsarLayout, content: CursorState, log: LedgerMap) -> Iterator[Fingerprint]:
    """Yield the first unacked message and the last acked one of each ledger, as far as BookKeeper has them."""
    found = {Position(ledger_id, bitmap.max()) for ledger_id, bitmap in content.deleted.bitmaps()}
    found |= {content.mark_delete, log.next_valid(content.mark_delete)}
    for position in sorted(each for each in found if log.is_valid(each))[:_FINGERPRINTS_MAX]:
        ledger_id, entry_id = position
        try:
            (entry,) = cluster.ledgers.read(ledger_id, entry_id, entry_id + 1)
            times = decode_message_times(entry)
        except (LedgerNotFoundError, CorruptStateError):
            continue
        yield Fingerprint(position, google_crc32c.value(entry), times.publish_time_ms)
