"""Publishes to many topics of one store with one sync."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from ackstate.cursor.store import LedgerFencedError, LedgerNotFoundError
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ackstate.cursor.topic.message_log import Message, MessageLog, Publication
    from ackstate.cursor.topic.publisher import TopicPublisher
    from ackstate.position import Position

Published = list["Position"] | AckStateError


def publish_all(
    batches: Iterable[tuple[MessageLog | TopicPublisher, Sequence[Message]]],
) -> list[list[Position] | AckStateError]:
    """Append messages to the logs of many topics with one sync; those of one topic all or none.

    Args:
        batches: Each log, or the publisher of one, with its messages. The logs share a store, and each comes once.

    Returns:
        For each, in order, the positions, or the error that its own `publish` would have raised: a topic that refuses
        its messages does not keep those of the others from being stored.

    Raises:
        TypeError, ValueError: As `MessageLog.publish`; or the logs are not of one store, or one comes twice. Nothing
            was stored.
    """
    outcomes: dict[int, Published] = {}
    publications: dict[int, Publication] = {}
    for number, (target, messages) in enumerate(batches):
        try:
            publications[number] = target.prepare(messages)
        except AckStateError as error:
            outcomes[number] = error
    logs = [each.log for each in publications.values()]
    if len({*map(id, logs)}) < len(logs) or len({id(log.store) for log in logs}) > 1:
        raise ValueError("logs that are published to together must share a store, and each must come once")
    outcomes |= _append(publications)
    return [outcomes[number] for number in sorted(outcomes)]


def _append(publications: dict[int, Publication]) -> dict[int, Published]:
    """Append with one sync; one by one if a log is no longer its owner's."""
    entries = [entry for each in publications.values() for entry in each.entries]
    if not entries:
        return {number: [] for number in publications}
    store = next(iter(publications.values())).log.store
    try:
        entry_ids = iter(store.ledgers.append_all(entries))
    except (LedgerFencedError, LedgerNotFoundError) as error:
        if len(publications) > 1:
            return {number: _append({number: each})[number] for number, each in publications.items()}
        ((number, publication),) = publications.items()
        return {number: publication.fenced(error)}
    except AckStateError as error:
        return {number: copy(error) for number in publications}
    return {number: each.stored([next(entry_ids) for _ in each.entries]) for number, each in publications.items()}
