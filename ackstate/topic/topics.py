"""The topics of one store: opened, listed and deleted by name, persisted and published to with one sync."""

from __future__ import annotations

from copy import copy
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Self, final
from urllib.parse import unquote

from ackstate.checks import present
from ackstate.cursor.persist import tick_all
from ackstate.errors import AckStateError
from ackstate.limits.policies import Policies
from ackstate.stores.base import call_each, outcome_of
from ackstate.topic.log import MessageLog, Publication, log_owner, log_path
from ackstate.topic.publish import policy_owner
from ackstate.topic.settings import TopicSettings, wall_clock
from ackstate.topic.topic import Topic, close_topics, delete_topic, subscribe_all
from ackstate.topic_name import check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Executor

    from ackstate.cursor.results import PersistResult
    from ackstate.dispatch.subscription import Subscription
    from ackstate.message import Message
    from ackstate.position import Position
    from ackstate.stores.base import Store
    from ackstate.topic.publish import TopicPublisher
    from ackstate.topic.topic import SubscriptionRequest


@final
class Topics:
    """The topics of a store that are open, by name. For one thread at a time, as each `Topic`.

    Args:
        store: Where they are stored; stays open.
        settings: The settings of every topic; None for the defaults.
        executor: Opens many topics or subscriptions, and begins ledgers of many; None for a pool of 64 threads that
            lives for one call. No thread of it may be the caller's.
        clock: Returns the present, in milliseconds, for calls of the topics and their subscriptions without `now_ms`.
            Any thread may call it.
    """

    def __init__(
        self,
        store: Store,
        *,
        settings: TopicSettings | None = None,
        executor: Executor | None = None,
        clock: Callable[[], int] = wall_clock,
    ) -> None:
        self.store, self.executor, self.clock = store, executor, clock
        self.settings = TopicSettings() if settings is None else settings
        if not isinstance(self.settings, TopicSettings):
            raise TypeError(f"settings must be a TopicSettings, got {settings!r}")
        self._topics: dict[str, Topic] = {}
        self._given_ms: int | None = None  # by the last call, for the end of `with`

    def __repr__(self) -> str:
        return f"<Topics: {len(self._topics)} open in {self.store!r}>"

    def open(self, name: str, *, now_ms: int | None = None) -> Topic:
        """Open a topic, or create it; return the same object if it is open already.

        Raises:
            As `Topic.open`.
        """
        now_ms = self._at(now_ms)
        topic = self._topics.get(name)
        if topic is None or topic.is_closed:
            topic = Topic.open(self.store, name, settings=self.settings, now_ms=now_ms, clock=self.clock)
            self._opened(topic)
        return topic

    def open_all(self, names: Iterable[str], *, now_ms: int | None = None) -> dict[str, Topic | AckStateError]:
        """Open or create many topics, as `open` each, in threads: a store on a disk lets them share syncs.

        Returns:
            For each, by its name, the topic, or the error that its own `open` would have raised.

        Raises:
            TypeError, ValueError: A name is no text, or is empty; nothing was written.
        """
        now_ms = self._at(now_ms)
        wanted = list(dict.fromkeys(names))
        for name in wanted:
            check_name("topic", name)
        closed = [name for name in wanted if name not in self]
        opened = call_each(
            lambda name: Topic.open(self.store, name, settings=self.settings, now_ms=now_ms, clock=self.clock),
            closed,
            self.executor,
        )
        for topic in opened:
            if isinstance(topic, Topic):
                self._opened(topic)
        outcomes = {**self._topics, **dict(zip(closed, opened, strict=True))}
        return {name: outcomes[name] for name in wanted}

    def subscribe_all(
        self, requests: Mapping[str, Iterable[SubscriptionRequest]], *, now_ms: int | None = None
    ) -> dict[tuple[str, str], Subscription | AckStateError]:
        """Open or create subscriptions of many open topics, as `Topic.subscribe_all`.

        Args:
            requests: By the name of the topic.
            now_ms: The present.

        Returns:
            The outcome of each, by the names of its topic and of the subscription.

        Raises:
            KeyError: A topic is not open; nothing was written.
            As `Topic.subscribe_all`.
        """
        now_ms = self._at(now_ms)
        wanted = [(self[name], request) for name, of_topic in requests.items() for request in of_topic]
        outcomes = subscribe_all(wanted, now_ms=now_ms, executor=self.executor)
        names = [(topic.name, request.name) for topic, request in wanted]
        return dict(zip(names, outcomes, strict=True))

    def __getitem__(self, name: str) -> Topic:
        topic = self._topics[name]
        if topic.is_closed:
            raise KeyError(name)
        return topic

    def __contains__(self, name: object) -> bool:
        return name in self._topics and not self._topics[str(name)].is_closed

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, topic in self._topics.items() if not topic.is_closed])

    def __len__(self) -> int:
        return sum(not topic.is_closed for topic in self._topics.values())

    @property
    def open_subscriptions(self) -> list[tuple[str, str, Subscription]]:
        """The names of the topic and the subscription, and the subscription, for each that is open.

        Any thread may read it. One that was closed by itself may still be among them.
        """
        # Copies of dicts, which are atomic, because another thread may open topics meanwhile.
        topics = list(self._topics.values())
        return [(topic.name, name, each) for topic in topics for name, each in topic.copy_subscriptions().items()]

    def stored(self) -> list[str]:
        """Return the names of all topics that the store has, open or not, sorted.

        Raises:
            StoreError, CorruptStateError: The storage failed.

        Complexity: O(ledgers of the store).
        """
        root, prefix = log_path("x").rpartition("/")[0], log_owner("")
        owners = self.store.ledgers.owners()
        owning = (owner.removeprefix(prefix) for owner in owners if owner.startswith(prefix))
        return sorted({unquote(name) for name in (*self.store.metadata.children(root), *owning) if name})

    def delete(self, name: str, *, now_ms: int | None = None) -> bool:
        """Delete a topic, open or not, with its subscriptions, messages and policies; return whether there was one.

        If it is open, it and its subscriptions are closed.

        Raises:
            As `delete_topic`; if that fails, an open topic stays open, and is fenced.
        """
        now_ms = self._at(now_ms)
        is_found = delete_topic(self.store, name)
        policies, owner = self.settings.policies, policy_owner(name)
        if policies is not None and owner is not None:
            policies.update(owner, lambda _: Policies())
        topic = self._topics.pop(name, None)
        if topic is not None:
            topic.abandon(now_ms=now_ms)
        return is_found

    def publish(
        self, messages: Mapping[str, Sequence[Message]], *, now_ms: int | None = None
    ) -> dict[str, list[Position] | AckStateError]:
        """Publish to many open topics with one sync; the messages of one topic all or none.

        Returns:
            For each topic the positions, or the error that its own `publish` would have raised.

        Raises:
            KeyError: A topic is not open; nothing was stored.
            TypeError, ValueError: As `MessageLog.publish`; nothing was stored.
        """
        batches = [(self[name], batch) for name, batch in messages.items()]
        outcomes = publish_all(batches, now_ms=self._at(now_ms), executor=self.executor)
        return dict(zip(messages, outcomes, strict=True))

    def tick(self, *, now_ms: int | None = None) -> dict[tuple[str, str], PersistResult | AckStateError]:
        """Persist all subscriptions that are due, with one sync.

        Returns:
            The outcome of each, by the names of its topic and of the subscription.
        """
        now_ms = self._at(now_ms)
        cursors = chain.from_iterable(topic.cursors for topic in list(self._topics.values()))
        return tick_all(cursors, now_ms=now_ms, executor=self.executor)

    def trim(self, *, now_ms: int | None = None) -> int:
        """Delete ledgers of all topics that need them no longer, as `Topic.trim`, and return how many.

        Neither another call of the topics and their subscriptions nor a persist may overlap.

        Raises:
            As `Topic.trim`, the first error; all other topics were trimmed.

        Complexity: O(open subscriptions) while nothing can be deleted.
        """
        now_ms, count = self._at(now_ms), 0
        topics = [each for each in self._topics.values() if not each.is_closed and each.may_trim(now_ms=now_ms)]
        for outcome in [outcome_of(partial(topic.trim, now_ms=now_ms)) for topic in topics]:
            if isinstance(outcome, AckStateError):
                raise outcome
            count += outcome
        return count

    @property
    def next_wake_ms(self) -> int | None:
        """The lowest `Topic.next_wake_ms`; None if no topic waits for a time."""
        times = [topic.next_wake_ms for topic in list(self._topics.values())]
        return min((time for time in times if time is not None), default=None)

    def close(self, *, now_ms: int | None = None) -> None:
        """Persist everything with one sync, and close all topics; closing twice does nothing.

        Raises:
            As `Topic.close`, the first error; all that could be closed are closed.
        """
        close_topics(list(self._topics.values()), now_ms=self._at(now_ms), executor=self.executor)
        self._topics.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(now_ms=self._given_ms)

    def _opened(self, topic: Topic) -> None:
        topic._publish_elsewhere = lambda name, message, now_ms: self.open(name, now_ms=now_ms).publish(
            [message], now_ms=now_ms
        )
        self._topics[topic.name] = topic

    def _at(self, now_ms: int | None) -> int:
        self._given_ms = now_ms
        return present(now_ms, self.clock)


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

    prepared: dict[int, Publication | AckStateError] = {}
    waiting = []
    for number, (_, messages) in enumerate(batches):
        if logs[number].has_room_for(len(messages)):
            prepared[number] = outcome_of(prepare, number)
        else:
            waiting.append(number)
    prepared.update(zip(waiting, call_each(prepare, waiting, executor), strict=True))
    in_order = [prepared[number] for number in range(len(batches))]
    appended = iter(append_publications([each for each in in_order if isinstance(each, Publication)]))
    return [each if isinstance(each, AckStateError) else each.finish(next(appended)) for each in in_order]


def append_publications(publications: Sequence[Publication]) -> list[int | AckStateError]:
    """Append with one sync; return, for `Publication.finish` of each, the id of its last entry or why it failed."""
    # This only writes: it may overlap with any call but a publish to one of the logs. One without entries has id -1.
    appends = [(each.ledger_id, each.entries) for each in publications if each.entries]
    if not appends:
        return [-1 for _ in publications]
    try:
        outcomes = iter(publications[0].log.store.ledgers.append_many(appends))
    except AckStateError as error:
        outcomes = iter([copy(error) for _ in appends])
    return [next(outcomes) if each.entries else -1 for each in publications]
