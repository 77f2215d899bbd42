"""Imports ack states through a live broker, with Pulsar's ordinary client: the client repeats the acks of the file.

The subscription must have no consumers meanwhile. It is created if it does not exist. Everything may be repeated: acks
of acked messages change nothing, so an import that was interrupted is resumed by running it again.

A client cannot do two things. It cannot set the properties of a cursor or of its mark-delete position. And it can ack
single messages of a batch only after it has received the batch; so the messages up to the last partly acked batch are
received, and those that the file does not have acked are given back.
"""

from __future__ import annotations

import os
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ackstate.analysis.admin_client import trusted_certificates
from ackstate.analysis.pulsar.sources import SnapshotError, acked, acked_in
from ackstate.errors import AckStateError
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position
from ackstate.topic_name import persistence_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ackstate.analysis.pulsar.ack_state_file import ExportedCursor
    from ackstate.analysis.pulsar.sources import LiveBroker


_SCHEMES = frozenset(("pulsar", "pulsar+ssl"))
_WAIT_MS = 20_000
_FINGERPRINTS_MAX = 10
_QUEUED_MESSAGES_MAX = 1_000
# The client sends acks in groups, the last one after this time at most.
_ACKS_SENT_WITHIN_S = 0.3


@dataclass(frozen=True, slots=True)
class ImportedCursor:
    """The outcome of an import for one cursor."""

    topic: str
    subscription: str  # Its subscription, under the name that it now has
    batch_count: int  # How many partly acked batches of the file it now has
    remarks: tuple[str, ...] = ()  # Parts of the file that were not imported
    mark_delete: Position | None = None  # Its mark-delete position; None if that was not checked, like the next two
    range_count: int | None = None  # Its individually deleted ranges
    missing_acks: int | None = None  # How many acks of the file it does not have


@contextmanager
def connected(service_url: str, *, token: str | None = None, trust_cert_path: str = "") -> Iterator[Any]:
    """Yield a client of a broker. With TLS, it checks the certificate and the host name of the broker."""
    pulsar = _package()
    scheme, _, rest = service_url.partition("://")
    if scheme.lower() not in _SCHEMES or not rest:
        raise AckStateError(f"{service_url}: not a URL of the form pulsar://HOST:PORT or pulsar+ssl://HOST:PORT")
    if trust_cert_path:
        trusted_certificates(trust_cert_path)  # the client would only say that it cannot connect
    options = {} if not token else {"authentication": pulsar.AuthenticationToken(token)}
    with _errors_of(service_url):
        client = pulsar.Client(
            f"{scheme.lower()}://{rest}",  # a scheme in capitals would not be encrypted
            tls_trust_certs_file_path=trust_cert_path or None,
            tls_validate_hostname=True,
            logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull),
            operation_timeout_seconds=_WAIT_MS // 1000,
            **options,
        )
    try:
        yield client
    finally:
        client.close()


def import_through_broker(client: Any, cursor: ExportedCursor, *, topic: str, subscription: str) -> ImportedCursor:
    """Add the acks of an exported cursor to a subscription of a live topic.

    The acks have been sent when this returns. One that is lost with a connection is found by
    `ackstate.analysis.pulsar.import_through_broker.checked`. The broker makes them durable by its own settings.
    """
    log, remarks = LedgerMap.from_counts(cursor.ledgers), []
    with _errors_of(f"{topic}, {subscription}"):
        _check_topic(client, cursor, topic)
        _ack_entries(client, cursor, log, topic=topic, subscription=subscription)
        unreached = _ack_batches(client, cursor, topic=topic, subscription=subscription)
    if unreached:
        names = ", ".join(map(str, unreached[:10]))
        remarks.append(f"{len(unreached)} partly acked batches were not received, so they stay unacked: {names}")
    if cursor.cursor_properties or cursor.content.properties:
        remarks.append("a client cannot set the cursor's properties: they were not imported")
    return ImportedCursor(topic, subscription, len(cursor.content.batch) - len(unreached), tuple(remarks))


def _check_topic(client: Any, cursor: ExportedCursor, topic: str) -> None:
    """Compare messages of the topic with those of the file by when they were published."""
    found = cursor.fingerprints
    step = max(1, len(found) // _FINGERPRINTS_MAX)
    compared = 0
    for fingerprint in found[::step]:
        message = _message_at(client, topic, fingerprint.position)
        if message is None:
            continue
        if message.publish_timestamp() != fingerprint.publish_time_ms:
            raise OtherTopicError(
                f"{topic}: the message at {fingerprint.position} is not the one that was exported: it is another topic;"
                " nothing was acked"
            )
        compared += 1
    if found and not compared:
        raise OtherTopicError(
            f"{topic}: has none of the {len(found)} messages by which the file recognises its topic, such as"
            f" {found[0].position}; nothing was acked"
        )


def _message_at(client: Any, topic: str, position: Position) -> Any:
    """Return a message of an entry; None if the topic does not have the entry."""
    pulsar = _package()
    start = pulsar.MessageId(-1, position.ledger_id, position.entry_id, -1)
    with closing(client.create_reader(topic, start, start_message_id_inclusive=True, receiver_queue_size=1)) as reader:
        if not reader.has_message_available():
            return None
        try:
            message = reader.read_next(_WAIT_MS)
        except pulsar.Timeout:
            return None
        return message if _position(message) == position else None


def _ack_entries(client: Any, cursor: ExportedCursor, log: LedgerMap, *, topic: str, subscription: str) -> None:
    """Ack the mark-delete position cumulatively, and each entry above it that is acked as a whole."""
    pulsar = _package()
    mark_delete = cursor.content.mark_delete
    if mark_delete.entry_id < 0:
        mark_delete = log.previous(Position(mark_delete.ledger_id, 0))
    # Without a queue the broker sends no messages.
    with closing(_subscribed(client, topic, subscription, receiver_queue_size=0)) as consumer:
        if mark_delete.entry_id >= 0:
            consumer.acknowledge_cumulative(pulsar.MessageId(-1, *mark_delete, -1))
        for ledger_id, first, end in cursor.content.deleted.runs():
            for entry_id in range(first, end):
                consumer.acknowledge(pulsar.MessageId(-1, ledger_id, entry_id, -1))
        time.sleep(_ACKS_SENT_WITHIN_S)


def _ack_batches(client: Any, cursor: ExportedCursor, *, topic: str, subscription: str) -> list[Position]:
    """Ack single messages of batches, and return the batches that were not received."""
    pulsar = _package()
    batch = cursor.content.batch
    unreached = set(batch)
    if not unreached:
        return []
    last = max(unreached)
    with closing(_subscribed(client, topic, subscription, receiver_queue_size=_QUEUED_MESSAGES_MAX)) as consumer:
        while True:
            try:
                message = consumer.receive(_WAIT_MS)
            except pulsar.Timeout:
                break
            position = _position(message)
            if position > last:
                break
            words = batch.get(position)
            if words is None:
                continue
            unreached.discard(position)
            index = message.message_id().batch_index()
            word = words[index // 64] if index // 64 < len(words) else 0
            if index >= 0 and not word >> index % 64 & 1:
                consumer.acknowledge(message)
        time.sleep(_ACKS_SENT_WITHIN_S)
    return sorted(unreached)


def _subscribed(client: Any, topic: str, subscription: str, *, receiver_queue_size: int) -> Any:
    """Return the only consumer of a subscription, which begins with the first message if it is created."""
    pulsar = _package()
    return client.subscribe(
        topic,
        subscription,
        consumer_type=pulsar.ConsumerType.Exclusive,
        initial_position=pulsar.InitialPosition.Earliest,
        receiver_queue_size=receiver_queue_size,
        batch_index_ack_enabled=True,
    )


def _position(message: Any) -> Position:
    found = message.message_id()
    return Position(found.ledger_id(), found.entry_id())


def _package() -> Any:
    try:
        import pulsar  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise AckStateError("the client of Pulsar is missing: install ackstate[pulsar]") from error
    return pulsar


@contextmanager
def _errors_of(what: str) -> Iterator[None]:
    """Turn errors of the client into ours."""
    pulsar = _package()
    try:
        yield
    except pulsar.ConsumerBusy as error:
        raise AckStateError(
            f"{what}: the subscription has consumers: stop them during the import, which may be repeated"
        ) from error
    except (pulsar.Timeout, pulsar.ConnectError) as error:
        raise AckStateError(f"{what}: the broker does not answer; the import may be repeated") from error
    except (pulsar.PulsarException, ValueError) as error:
        raise AckStateError(f"{what}: {' '.join(str(error).split())}") from error


class OtherTopicError(AckStateError):
    """The topic is not the one that was exported: to import the acks would ack other messages. Nothing was changed."""


_LOOKS = 4


def checked(
    source: LiveBroker, cursor: ExportedCursor, imported: ImportedCursor, *, pause_s: float = 0.5
) -> ImportedCursor:
    """Return the outcome of an import with the broker's numbers, and the acks that did not reach it.

    The broker handles acks after the client has sent them, so its state is read some times while acks are missing.
    """
    what = f"{imported.topic}, {imported.subscription}"
    for look in range(_LOOKS):
        if look:
            time.sleep(pause_s)
        internals = source.internals(imported.topic)
        found = internals.cursors.get(persistence_name(imported.subscription))
        if found is None:
            raise SnapshotError(f"{what}: the broker has no such subscription")
        counts = internals.entry_counts()
        state = acked(found, counts, what=what)
        missing = sum(
            len(acked_in(cursor.content, ledger_id, count) - acked_in(state, ledger_id, count))
            for ledger_id, count in counts.items()
        )
        if not missing:
            break
    remarks = imported.remarks
    if missing:
        remarks = (*remarks, f"{missing:,} acks did not reach the broker: repeat the import")
    return replace(
        imported,
        mark_delete=state.mark_delete,
        range_count=state.deleted.range_count,
        missing_acks=missing,
        remarks=remarks,
    )
