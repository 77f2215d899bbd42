"""Publishes to many topics of one store with one sync."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from ackstate.errors import AckStateError
from ackstate.stores.base import LedgerFencedError, LedgerNotFoundError
from ackstate.stores.steps import run_all
from ackstate.topic.message_log import MessageLog

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ackstate.position import Position
    from ackstate.topic.message_log import Message, Publication
    from ackstate.topic.publisher import TopicPublisher
    from ackstate.topic.topic import Topic


def publish_all(
    batches: Iterable[tuple[MessageLog | TopicPublisher | Topic, Sequence[Message]]], *, now_ms: int | None = None
) -> list[list[Position] | AckStateError]:
    """Append messages to the logs of many topics with one sync; those of one topic all or none.

    Logs that begin a ledger share the syncs of its steps: three for each 256 of them, in a store that writes together.

    Args:
        batches: Each log, or the publisher or the topic of one, with its messages. The logs share a store, and each
            comes once.
        now_ms: As for `TopicPublisher.publish`. A log stores its messages as they are.

    Returns:
        For each, in order, the positions, or the error that its own `publish` would have raised: a topic that refuses
        its messages does not keep those of the others from being stored.

    Raises:
        TypeError, ValueError: As `MessageLog.publish`; or the logs are not of one store, or one comes twice. Nothing
            was stored.
    """
    batches = list(batches)
    logs = [target if isinstance(target, MessageLog) else target.log for target, _ in batches]
    if len({*map(id, logs)}) < len(logs) or len({id(log.store) for log in logs}) > 1:
        raise ValueError("logs that are published to together must share a store, and each must come once")
    if not batches:
        return []
    outcomes: dict[int, list[Position] | AckStateError] = {}
    prepared: dict[int, Publication] = {}
    steps = [target.preparing(messages, now_ms=now_ms) for target, messages in batches]
    for number, outcome in enumerate(run_all(logs[0].store, steps)):
        if isinstance(outcome, AckStateError):
            outcomes[number] = outcome
        else:
            prepared[number] = outcome
    appended = append_publications([*prepared.values()])
    outcomes |= {
        number: each.finish(outcome) for (number, each), outcome in zip(prepared.items(), appended, strict=True)
    }
    return [outcomes[number] for number in sorted(outcomes)]


def append_publications(publications: Sequence[Publication]) -> list[list[int] | AckStateError]:
    """Append the entries of publications to their logs with one sync; one by one if a log is no longer its owner's.

    This only writes: it may overlap with any call but a publish to one of the logs. `Publication.finish` concludes.

    Returns:
        For each, in order, its entry ids, or why it failed.
    """
    entries = [entry for each in publications for entry in each.entries]
    if not entries:
        return [[] for _ in publications]
    try:
        entry_ids = iter(publications[0].log.store.ledgers.append_all(entries))
    except (LedgerFencedError, LedgerNotFoundError) as error:
        if len(publications) == 1:
            return [error]
        return [append_publications([each])[0] for each in publications]
    except AckStateError as error:
        return [copy(error) for _ in publications]
    return [[next(entry_ids) for _ in each.entries] for each in publications]
