"""Publishes to many topics of one store with one sync."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from ackstate.errors import AckStateError
from ackstate.stores.base import call_each
from ackstate.topic.message_log import MessageLog, Publication

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Executor

    from ackstate.message import Message
    from ackstate.position import Position
    from ackstate.topic.publisher import TopicPublisher
    from ackstate.topic.topic import Topic


def publish_all(
    batches: Iterable[tuple[MessageLog | TopicPublisher | Topic, Sequence[Message]]],
    *,
    now_ms: int | None = None,
    executor: Executor | None = None,
) -> list[list[Position] | AckStateError]:
    """Append messages to the logs of many topics with one sync; those of one topic all or none.

    Logs that begin a ledger do so in threads; a store on a disk shares a sync among the threads that wait for one.

    Args:
        batches: Each log, or the publisher or the topic of one, with its messages. The logs share a store, and each
            comes once.
        now_ms: As for `TopicPublisher.publish`. A log stores its messages as they are.
        executor: As for `persist_all`.

    Returns:
        For each, in order, the positions, or the error that its own `publish` would have raised: a topic that refuses
        its messages does not keep those of the others from being stored.

    Raises:
        TypeError, ValueError: As `MessageLog.publish`; or the logs are not of one store, or one comes twice. No message
            was stored.
    """
    batches = list(batches)
    logs = [target if isinstance(target, MessageLog) else target.log for target, _ in batches]
    if len({*map(id, logs)}) < len(logs) or len({id(log.store) for log in logs}) > 1:
        raise ValueError("logs that are published to together must share a store, and each must come once")

    def prepare(number: int) -> Publication:
        target, messages = batches[number]
        return target.prepare(messages, now_ms=now_ms)

    waiting = dict.fromkeys(
        number for number, (_, messages) in enumerate(batches) if not logs[number].has_room_for(len(messages))
    )
    prepared: dict[int, Publication | AckStateError] = {}
    for number in range(len(batches)):
        if number not in waiting:
            (prepared[number],) = call_each(prepare, [number])
    prepared.update(zip(waiting, call_each(prepare, [*waiting], executor), strict=True))
    appended = iter(append_publications([each for each in prepared.values() if isinstance(each, Publication)]))
    outcomes = {
        number: each if isinstance(each, AckStateError) else each.finish(next(appended))
        for number, each in prepared.items()
    }
    return [outcomes[number] for number in range(len(batches))]


def append_publications(publications: Sequence[Publication]) -> list[int | AckStateError]:
    """Append the entries of publications to their logs with one sync; each succeeds or fails by itself.

    This only writes: it may overlap with any call but a publish to one of the logs. `Publication.finish` concludes.

    Returns:
        For each, in order, the id of its last entry, -1 for one without entries, or why it failed.
    """
    appends = [(each.ledger_id, each.entries) for each in publications if each.entries]
    if not appends:
        return [-1 for _ in publications]
    try:
        outcomes = iter(publications[0].log.store.ledgers.append_many(appends))
    except AckStateError as error:
        outcomes = iter([copy(error) for _ in appends])
    return [next(outcomes) if each.entries else -1 for each in publications]
