"""Publishes to many topics of one store with one sync."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, final

from ackstate.cursor.store import LedgerFencedError, LedgerNotFoundError
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ackstate.cursor.topic.message_log import Message, MessageLog, Publication
    from ackstate.cursor.topic.publisher import TopicPublisher
    from ackstate.position import Position


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
    publications = Publications(batches)
    publications.append()
    return publications.finish()


@final
class Publications:
    """The three steps of `publish_all`, for callers that wait for the disk elsewhere than they publish.

    To make one and to `finish` it count as publishing, so no call of a subscription of the topics may overlap with
    them. `append` only writes: any call may overlap with it, but for a publish to one of the logs.

    Args:
        batches: As for `publish_all`.

    Raises:
        As `publish_all`; nothing was stored.
    """

    def __init__(self, batches: Iterable[tuple[MessageLog | TopicPublisher, Sequence[Message]]]) -> None:
        self._refused: dict[int, AckStateError] = {}
        self._prepared: dict[int, Publication] = {}
        self._appended: dict[int, list[int] | AckStateError] = {}
        for number, (target, messages) in enumerate(batches):
            try:
                self._prepared[number] = target.prepare(messages)
            except AckStateError as error:
                self._refused[number] = error
        logs = [each.log for each in self._prepared.values()]
        if len({*map(id, logs)}) < len(logs) or len({id(log.store) for log in logs}) > 1:
            raise ValueError("logs that are published to together must share a store, and each must come once")

    def append(self) -> None:
        """Append the entries with one sync; one log after the other if one is no longer its owner's."""
        self._append(self._prepared)

    def finish(self) -> list[list[Position] | AckStateError]:
        """Take note of all that was stored, and return the outcomes as `publish_all` does."""
        outcomes: dict[int, list[Position] | AckStateError] = {**self._refused}
        for number, appended in self._appended.items():
            publication = self._prepared[number]
            if isinstance(appended, LedgerFencedError | LedgerNotFoundError):
                outcomes[number] = publication.fenced(appended)
            else:
                outcomes[number] = appended if isinstance(appended, AckStateError) else publication.stored(appended)
        return [outcomes[number] for number in sorted(outcomes)]

    def _append(self, publications: Mapping[int, Publication]) -> None:
        entries = [entry for each in publications.values() for entry in each.entries]
        if not entries:
            self._appended.update({number: [] for number in publications})
            return
        store = next(iter(publications.values())).log.store
        try:
            entry_ids = iter(store.ledgers.append_all(entries))
        except (LedgerFencedError, LedgerNotFoundError) as error:
            if len(publications) == 1:
                self._appended.update(dict.fromkeys(publications, error))
            else:
                for number, publication in publications.items():
                    self._append({number: publication})
        except AckStateError as error:
            self._appended.update({number: copy(error) for number in publications})
        else:
            stored = {number: [next(entry_ids) for _ in each.entries] for number, each in publications.items()}
            self._appended.update(stored)
