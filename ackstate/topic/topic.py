"""A topic: its message log, publisher, delay index and subscriptions, opened, closed and deleted together."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Self, TypedDict, Unpack, final

from ackstate.checks import member, present
from ackstate.cursor.cursor import CursorOpening, open_cursors
from ackstate.cursor.formats import INTERNAL_PREFIX, Repair
from ackstate.cursor.journal import cursor_path, delete_cursor
from ackstate.cursor.persist import abandon, close_all, tick_all
from ackstate.delay.bucket_storage import SnapshotStorage
from ackstate.delay.buckets import BucketedDelayIndex
from ackstate.delay.config import TrackerKind
from ackstate.delay.index import TopicDelayIndex
from ackstate.delay.view import check_time
from ackstate.dispatch.consumers import SubscriptionType
from ackstate.dispatch.options import (
    Start,
    StartTime,
    SubscriptionOptions,
    check_parts,
    checked_start,
    dead_letter,
    start_position,
)
from ackstate.dispatch.subscription import Subscription
from ackstate.errors import AckStateError, CorruptStateError, RescheduleRefusedError, TopicClosedError
from ackstate.limits.gate import DispatchGate
from ackstate.stores.base import StoreError, call_each, outcome_of
from ackstate.topic.log import LogOwnership, MessageLog, log_owner, log_path
from ackstate.topic.publish import TopicPublisher, delay_policies
from ackstate.topic.retention import backlog_report, is_backlog_exceeded, stored_mark_deletes, trim_behind
from ackstate.topic.schedule import DelaySchedule
from ackstate.topic.settings import TopicSettings, delay_config, subscription_settings, wall_clock
from ackstate.topic.subscriptions import (
    SCHEDULE,
    TYPE_PROPERTY,
    check_type,
    stored_properties,
    stored_subscriptions,
    subscription_paths,
    type_of,
)
from ackstate.topic_name import check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Executor

    from ackstate.cursor.cursor import ManagedCursor
    from ackstate.cursor.results import PersistResult
    from ackstate.delay.config import DelayConfig
    from ackstate.dispatch.options import Delivery
    from ackstate.limits.gate import GateLimits
    from ackstate.message import Message
    from ackstate.position import Position
    from ackstate.stores.base import Store
    from ackstate.topic.log import Publication
    from ackstate.topic.retention import BacklogReport
    from ackstate.topic.subscriptions import StoredSubscription

    Planned = tuple[CursorOpening, SubscriptionType, DispatchGate | None, SubscriptionOptions]

_LOOK_AGAIN_MS = 60_000
_LOG = logging.getLogger("ackstate.topic")


class RequestedFields(TypedDict, total=False):
    """The fields of a `SubscriptionRequest`, for functions that take them as named arguments."""

    start: Start | StartTime | Position | str
    kind: SubscriptionType | str | None
    limits: GateLimits | None
    options: SubscriptionOptions | None
    properties: Mapping[str, str] | None
    repair: Repair | str


@dataclass(frozen=True, slots=True)
class SubscriptionRequest:
    """A subscription to be opened or created, for `Topic.subscribe` and `Topic.subscribe_all`.

    Attributes:
        name: The name of the subscription, not empty.
        start: The first message that a new subscription reads, as for `Subscription.seek`; a stored one continues
            where it is.
        kind: The type; None for the stored one, Shared for a new one.
        limits: Those of this subscription; None for those of the topic. Exclusive and Failover have none.
        options: Likewise.
        properties: The application's properties of a new subscription.
        repair: Used if the stored subscription cannot be read, as for `ManagedCursor.open`.

    Start, type and repair may be given by their names, such as ``"earliest"`` or ``"key_shared"``.

    Raises:
        TypeError: One of these is of another type.
        ValueError: One has an unknown name.
    """

    name: str
    start: Start | StartTime | Position = Start.LATEST
    kind: SubscriptionType | None = None
    limits: GateLimits | None = None
    options: SubscriptionOptions | None = None
    properties: Mapping[str, str] | None = None
    repair: Repair = Repair.NONE

    def __post_init__(self) -> None:
        # A frozen object sets its fields so.
        object.__setattr__(self, "start", checked_start("start", self.start))
        object.__setattr__(self, "repair", member("repair", self.repair, Repair))
        if self.kind is not None:
            object.__setattr__(self, "kind", member("kind", self.kind, SubscriptionType))


@final
class Topic:
    """One topic, opened by `open`. It has no thread, and its parts may be used on their own.

    Its methods are for one thread at a time, and none of them may overlap with a call of one of its subscriptions;
    `tick` and `next_wake_ms` may. Subscriptions may be used in parallel, as without a topic.

    Attributes:
        name: The name of the topic.
        store: Where it is stored; stays open when the topic is closed.
        settings: The settings that it was opened with.
        log: The messages.
        publisher: Publishes under the policies.
        delays: The messages that are not yet due, for all Shared and Key_Shared subscriptions; None without an index.

    Source: ``PersistentTopic`` of Apache Pulsar.
    """

    def __init__(
        self,
        log: MessageLog,
        settings: TopicSettings,
        delays: TopicDelayIndex | BucketedDelayIndex | None,
        *,
        now_ms: int,
        clock: Callable[[], int],
    ) -> None:
        self.name = log.topic
        self.store = log.store
        self.settings = settings
        self.log = log
        self._policies = delay_policies(self.name, settings.policies, settings.delayed_delivery)
        self.publisher = TopicPublisher(log, topic=self.name, policies=self._policies, counters=settings.counters)
        self.delays = delays
        self._refuses_publish = settings.retention.refuses_publish
        self._schedule = None if delays is None else DelaySchedule(log, delays, now_ms=now_ms)
        self.is_closed = False
        self._subscriptions: dict[str, Subscription] = {}
        # Theirs, with the names of topic and subscription: every tick goes through them.
        self.cursors: list[tuple[tuple[str, str], ManagedCursor]] = []
        self._publish_elsewhere: Callable[[str, Message, int], object] | None = None
        """Publishes a dead letter to another topic, at a time; None without `Topics`."""
        self.clock = clock
        self._latest_ms = now_ms
        self._given_ms: int | None = now_ms  # by the last call, for the end of `with`
        self._ledger_seen = log.ledgers.current_ledger_id, now_ms  # the open ledger, and when it was seen first
        self._trim_attempt: tuple[int, ...] | None = None
        # As they were read last, and when; None if one was opened, closed or deleted since.
        self._mark_deletes: tuple[int, dict[str, Position | None]] | None = None

    def __repr__(self) -> str:
        return f"<Topic {self.name} in {self.store!r}>"

    @classmethod
    def open(
        cls,
        store: Store,
        name: str,
        *,
        settings: TopicSettings | None = None,
        now_ms: int | None = None,
        clock: Callable[[], int] = wall_clock,
    ) -> Topic:
        """Open a topic and take it over from its owner, or create it. Its subscriptions are opened by `subscribe`.

        Args:
            store: Where it is stored.
            name: The name of the topic, any text but an empty one. Policies apply to names like
                ``persistent://public/default/orders``.
            settings: None for the defaults.
            now_ms: The present, in milliseconds; None for that of the clock, here and in every other call.
            clock: As for `Topics`.

        Raises:
            TypeError: An argument is of another type.
            As `MessageLog.open`; with policies, as `PolicyStore.read`.
        """
        settings = TopicSettings() if settings is None else settings
        if not isinstance(settings, TopicSettings):
            raise TypeError(f"settings must be a TopicSettings, got {settings!r}")
        now_ms = present(now_ms, clock)
        config = delay_config(settings, name)
        log = MessageLog.open(
            store, topic=name, entries_per_ledger_max=settings.entries_per_ledger_max,
            bytes_per_ledger_max=settings.bytes_per_ledger_max, now_ms=now_ms,
        )  # fmt: skip
        return cls(log, settings, _open_delays(log, config, now_ms=now_ms), now_ms=now_ms, clock=clock)

    @property
    def subscriptions(self) -> Mapping[str, Subscription]:
        """The open subscriptions, by name. Complexity: O(subscriptions)."""
        for name, subscription in list(self._subscriptions.items()):
            if subscription.cursor.view.is_closed:  # It was closed by itself.
                self._remove(name)
        return MappingProxyType(self._subscriptions)

    def copy_subscriptions(self) -> dict[str, Subscription]:
        """Return the open subscriptions, by name; any thread may call this, at any time."""
        return self._subscriptions.copy()

    def publish(self, messages: Sequence[Message], *, now_ms: int | None = None) -> list[Position]:
        """Append messages with one sync, all or nothing, and return their positions in order.

        Args:
            messages: Those without a publish time are published at `now_ms`.
            now_ms: The present, from which the retention counts the age of the ledger; None for the clock's.

        Raises:
            TopicClosedError: The topic is closed.
            BacklogQuotaExceededError: The backlog is above its limit, and the retention has messages refused then.
            As `TopicPublisher.publish`.
        """
        return self.publisher.publish(messages, now_ms=self._before_publish(now_ms=now_ms))

    def prepare(self, messages: Sequence[Message], *, now_ms: int | None) -> Publication:
        """Return messages for `publish_all`; errors as `publish`, and nothing is stored."""
        return self.publisher.prepare(messages, now_ms=self._before_publish(now_ms=now_ms))

    def prepares_at_once(self, count: int, *, now_ms: int) -> bool:
        """Return whether `prepare` of a number of messages waits for no disk."""
        reads = self.settings.policies is not None or self._refuses_publish
        return not reads and not self._is_ledger_old(now_ms=now_ms) and self.log.has_room_for(count)

    def _before_publish(self, *, now_ms: int | None) -> int:
        now_ms = self._at(now_ms)
        if self._is_ledger_old(now_ms=now_ms):
            self.log.end_ledger()
        if self._refuses_publish and self._is_backlog_exceeded():
            # The store decides: a subscription may have been deleted, or acked more, without this topic.
            self.backlog_report().check(self.name)
        return now_ms

    def _is_ledger_old(self, *, now_ms: int) -> bool:
        """Return whether a publish ends the open ledger for its age. A clock that went back by as much counts, too."""
        ledger_id = self.log.ledgers.current_ledger_id
        if ledger_id != self._ledger_seen[0]:
            self._ledger_seen = ledger_id, now_ms
        return 0 < self.settings.ledger_rollover_ms <= abs(now_ms - self._ledger_seen[1])

    def _is_backlog_exceeded(self) -> bool:
        """Return whether the backlog seems above its limit, by subscriptions that were read a minute ago at most."""
        log, limit = self.log, self.settings.retention.backlog_bytes_max
        if limit is None or log.sizes.whole <= limit:
            return False
        if self._mark_deletes is None or abs(self._latest_ms - self._mark_deletes[0]) >= _LOOK_AGAIN_MS:
            self._read_mark_deletes()
        assert self._mark_deletes is not None
        _, found = self._mark_deletes
        of_open = {
            name: each.persisted_mark_delete_position for name, each in self._open_cursors().items() if name in found
        }
        return is_backlog_exceeded(log, limit, (found | of_open).values())

    def cancel(self, position: Position, *, now_ms: int | None = None) -> None:
        """Take a delayed message back before it is due: no subscription receives it, present or later.

        It counts as acked by each open subscription at once, if its limits allow it, else where it would be sent.

        Raises: As `reschedule`.
        """
        self._change_schedule(position, None, now_ms=now_ms)

    def reschedule(self, position: Position, *, deliver_at_ms: int, now_ms: int | None = None) -> None:
        """Change when a delayed message is delivered, before it is due, for all subscriptions at once.

        The change is one record: a crash leaves all of it or nothing.

        Args:
            position: The message.
            deliver_at_ms: When it is delivered instead, earlier or later; by a time that has come, at once.
            now_ms: The present; None for that of the clock.

        Raises:
            TypeError, ValueError: The position or the time is of another type or out of range.
            InvalidPositionError: The log has no such message.
            RescheduleRefusedError: The message is not delayed, is due, was cancelled before, or was acked by, or handed
                out to, an open subscription; or the topic has no delay index.
            DeliveryDelayExceededError: The delay from now on is above the maximum of the policies.
            LogFencedError, CursorFencedError: Another owner has opened the topic.
            StoreError: The change may have happened; the next one, or the next open, reads whether it did.
            TopicClosedError: The topic is closed.
        """
        self._change_schedule(position, deliver_at_ms, now_ms=now_ms)

    def _change_schedule(self, position: Position, deliver_at_ms: int | None, *, now_ms: int | None) -> None:
        now_ms = self._at(now_ms)
        if self._schedule is None:
            raise RescheduleRefusedError(f"topic {self.name!r} has no delay index: its messages are not delayed")
        if deliver_at_ms is not None:
            deliver_at_ms = check_time(deliver_at_ms, name="deliver_at_ms")
            self._policies().deliver_at(now_ms, deliver_at_ms)
        self._schedule.change(position, deliver_at_ms, self.subscriptions, now_ms=now_ms)

    def subscribe(self, name: str, *, now_ms: int | None = None, **wanted: Unpack[RequestedFields]) -> Subscription:
        """Open a subscription where it is stored, or create it; return the same object if it is open already.

        A new subscription is durable when this returns, with its start, its type and its properties.

        Args:
            name: The name of the subscription, not empty.
            now_ms: The present.
            wanted: The other fields of `SubscriptionRequest`: `start`, `kind`, `limits`, `options`, `properties` and
                `repair`.

        Raises:
            SubscriptionTypeError: It is stored with another type; it was not opened.
            TopicClosedError: The topic is closed.
            LogFencedError: Another owner has opened the topic; nothing was written.
            TypeError, ValueError: An argument is of another type or out of range.
            As `ManagedCursor.open` and `start_position`.
        """
        request = SubscriptionRequest(name, **wanted)  # type: ignore[arg-type] # which replaces names by members
        (outcome,) = subscribe_all([(self, request)], now_ms=present(now_ms, self.clock))
        if isinstance(outcome, AckStateError):
            raise outcome
        return outcome

    def subscribe_all(
        self, requests: Iterable[SubscriptionRequest], *, now_ms: int | None = None, executor: Executor | None = None
    ) -> dict[str, Subscription | AckStateError]:
        """Open or create many subscriptions, as `subscribe` each, in threads: a store on a disk lets them share syncs.

        Args:
            requests: The subscriptions.
            now_ms: The present.
            executor: As for `persist_all`.

        Returns:
            For each, by its name, the subscription, or the error that its own `subscribe` would have raised.

        Raises:
            TopicClosedError: The topic is closed.
            TypeError, ValueError: A name comes twice, or an argument is of another type or out of range. No new
                subscription was written.
        """
        requests = list(requests)
        wanted = [(self, request) for request in requests]
        outcomes = subscribe_all(wanted, now_ms=self._at(now_ms), executor=executor)
        return {request.name: outcome for request, outcome in zip(requests, outcomes, strict=True)}

    def _find_open(self, request: SubscriptionRequest, now_ms: int) -> Subscription | None:
        """Return a requested subscription that is open already."""
        self._at(now_ms)
        name = request.name
        opened = self._subscriptions.get(name)
        if opened is not None and opened.cursor.view.is_closed:  # It was closed by itself.
            self._remove(name)
            opened = None
        if opened is None:
            self._mark_deletes = None
        else:
            check_type(request.kind, opened.kind, subscription=name)
        return opened

    def _plan(self, request: SubscriptionRequest) -> Planned:
        """Check a request for a new subscription, or against the stored one; nothing is written."""
        log, settings, name = self.log, self.settings, request.name
        options = settings.options if request.options is None else request.options
        stored = stored_properties(self.store, topic=self.name, subscription=name)
        of_type = None if stored is None else type_of(stored, subscription=name)
        check_type(request.kind, of_type, subscription=name)
        kind = request.kind or of_type or SubscriptionType.SHARED
        config, of_topic = subscription_settings(settings, self.name)
        gate = None if kind.is_single_active else DispatchGate(request.limits or of_topic, broker=settings.broker_limit)
        check_parts(kind, gate, None, options, publishes=self._publish_elsewhere is not None)
        if options.dead_letters is not None and options.dead_letters.topic == self.name:
            if request.options is not None:
                raise ValueError(
                    f"dead letters of topic {self.name!r} must go to another topic, or they would come again"
                )
            options = replace(options, dead_letters=None)
        properties = dict(request.properties or {})
        for each in properties:
            if str(each).startswith(INTERNAL_PREFIX):
                raise ValueError(f"properties must not have names that begin with {INTERNAL_PREFIX!r}, got {each!r}")
        opening = CursorOpening(
            topic=self.name, subscription=name, ledgers=log.ledgers, config=config, repair=request.repair,
            start=start_position(log, request.start) if stored is None else None,
            properties=properties | {TYPE_PROPERTY: kind.value},
            check=log.check_owned,
        )  # fmt: skip
        return opening, kind, gate, options

    def _subscribed(self, planned: Planned, cursor: ManagedCursor) -> Subscription:
        """Compose a subscription of its open cursor, and add it to the topic's."""
        opening, kind, gate, options = planned
        name = opening.subscription
        if TYPE_PROPERTY not in cursor.cursor_properties:  # It was created without one.
            cursor.put_internal_property(TYPE_PROPERTY, kind.value)
        view = None if self.delays is None or kind.is_single_active else self.delays.open_view(cursor.is_acked)
        dead_letters, publish = options.dead_letters, None
        if self._publish_elsewhere is not None and dead_letters is not None and dead_letters.topic is not None:
            publish = partial(self._publish_dead_letter, dead_letters.topic, name)
        subscription = Subscription(
            self.log, cursor, gate=gate, delays=view, kind=kind, options=options, publish_dead_letter=publish,
            clock=self.clock,
        )  # fmt: skip
        self._subscriptions[name] = subscription
        self.cursors.append(((self.name, name), cursor))
        return subscription

    def _publish_dead_letter(self, topic: str, subscription: str, delivery: Delivery, now_ms: int) -> bool:
        assert self._publish_elsewhere is not None
        self._publish_elsewhere(topic, dead_letter(delivery, topic=self.name, subscription=subscription), now_ms)
        return True

    def stored_subscriptions(self) -> list[StoredSubscription]:
        """Return the stored subscriptions, open or not, as they are stored; none is opened.

        Raises: As `ackstate.topic.stored_subscriptions`.
        """
        return stored_subscriptions(self.store, self.name, ledgers=self.log.ledgers)

    def unsubscribe(self, name: str, *, now_ms: int | None = None) -> bool:
        """Delete a subscription, open or not, with its acks; return whether there was one.

        If it is open, it is closed, and its waiters are called. A subscription that is opened under this name
        afterwards is new.

        Raises:
            TopicClosedError: The topic is closed.
            LogFencedError: Another owner has opened the topic; nothing was deleted.
            As `delete_subscription`; if that fails, an open subscription stays open, and may be fenced.
        """
        now_ms = self._at(now_ms)
        self._mark_deletes = None
        is_found = delete_cursor(self.store, cursor_path(self.name, name), check=self.log.check_owned)
        subscription = self._remove(name)
        if subscription is not None:
            abandon(subscription.cursor)
            subscription.close(now_ms=now_ms)
        return is_found

    def tick(self, *, now_ms: int | None = None) -> dict[str, PersistResult | AckStateError]:
        """Persist the subscriptions that are due, with one sync, and return the outcome of each by its name.

        Raises:
            TopicClosedError: The topic is closed.
        """
        outcomes = tick_all(self.cursors, now_ms=self._at(now_ms))
        return {name: outcome for (_, name), outcome in outcomes.items()}

    def trim(self, *, now_ms: int | None = None) -> int:
        """Delete the ledgers that no subscription needs and the retention does not keep, and return how many left.

        Neither another call of the topic or a subscription nor a persist may overlap.

        Raises:
            TopicClosedError: The topic is closed.
            As `trim_log`.
        """
        now_ms = self._at(now_ms)
        self._trim_attempt = self._trim_state(now_ms=now_ms)
        count = trim_behind(self.log, self.settings.retention, self._read_mark_deletes, now_ms=now_ms)
        if count and self.delays is not None and self._schedule is not None:
            self.delays.forget_before(self.log.ledgers.first_ledger_id)
            self._schedule.trim(now_ms=now_ms)
        return count

    def may_trim(self, *, now_ms: int | None = None) -> bool:
        """Return whether `trim` may find something: a subscription left a ledger behind, or the last try is old.

        O(open subscriptions).
        """
        state = self._trim_state(now_ms=present(now_ms, self.clock))
        return state is not None and state != self._trim_attempt

    def backlog_report(self) -> BacklogReport:
        """Return how much of the log its stored subscriptions need and which of them needs most, at the latest call.

        Raises:
            As `ackstate.topic.retention.backlog_report`.

        Complexity: O(ledgers), and as `stored_subscriptions`.
        """
        retention, stored = self.settings.retention, self._read_mark_deletes()
        return backlog_report(self.log, retention, {}, stored=stored, now_ms=self._latest_ms)

    def _read_mark_deletes(self) -> dict[str, Position | None]:
        found = stored_mark_deletes(self.log, self._open_cursors())
        self._mark_deletes = self._latest_ms, found
        return found

    def _open_cursors(self) -> dict[str, ManagedCursor]:
        return {name: each.cursor for name, each in self.subscriptions.items()}

    def _trim_state(self, *, now_ms: int) -> tuple[int, ...] | None:
        """Return numbers of which one changes when more can be trimmed; None if nothing can."""
        ledgers = self.log.ledgers
        first_ledger_id, current_ledger_id = ledgers.first_ledger_id, ledgers.current_ledger_id
        if first_ledger_id == current_ledger_id:
            return None
        known = None if self._mark_deletes is None else self._mark_deletes[1]
        durable = [
            each.cursor.persisted_mark_delete_position
            for name, each in self.copy_subscriptions().items()
            if known is None or name in known
        ]
        lowest = ledgers.next_valid(min(durable)).ledger_id if durable else current_ledger_id
        if lowest <= first_ledger_id:
            return None
        return first_ledger_id, current_ledger_id, lowest, now_ms // _LOOK_AGAIN_MS

    @property
    def next_wake_ms(self) -> int | None:
        """When to call `tick`, or `dispatch` of a subscription, next because a time will have come; None for never.

        Subscriptions without an open consumer wait for no time to dispatch at.
        """
        times = [cursor.view.next_tick_ms for _, cursor in self.cursors]
        times += [each.next_wake_ms for each in self.copy_subscriptions().values() if each.has_consumers]
        return min((time for time in times if time is not None), default=None)

    def close(self, *, now_ms: int | None = None) -> None:
        """Persist everything with one sync, and close all subscriptions; closing twice does nothing.

        Raises:
            StoreError, CursorFencedError: The last persist of a subscription failed. The subscriptions that failed and
                the topic stay open; the others are closed.
        """
        if not self.is_closed:
            close_topics([self], now_ms=self._at(now_ms))

    def abandon(self, *, now_ms: int) -> None:
        """Close the topic and all subscriptions without persisting anything, as the topic was deleted."""
        self.is_closed = True
        for subscription in self._subscriptions.values():
            abandon(subscription.cursor)
        self._forget(now_ms=now_ms)

    def _forget(self, *, now_ms: int) -> None:
        """Close the subscriptions whose cursors are closed, and the topic if none is left."""
        for name, subscription in list(self._subscriptions.items()):
            if subscription.cursor.view.is_closed:
                subscription.close(now_ms=now_ms)
                self._remove(name)
        if not self._subscriptions:
            self.is_closed = True
            if self.delays is not None:
                self.delays.close()
            self.settings.counters.remove_topic(self.name)

    def _remove(self, name: str) -> Subscription | None:
        """Remove a subscription that was closed from the open ones."""
        self._mark_deletes = None
        self.cursors = [each for each in self.cursors if each[0][1] != name]
        return self._subscriptions.pop(name, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(now_ms=self._given_ms)

    def _at(self, now_ms: int | None) -> int:
        """Return the time that a call gave, or that of the clock, and remember it as the latest."""
        if self.is_closed:
            raise TopicClosedError(f"topic {self.name!r} is closed")
        self._given_ms = now_ms
        self._latest_ms = now_ms if type(now_ms) is int else present(now_ms, self.clock)
        return self._latest_ms


def close_topics(topics: Sequence[Topic], *, now_ms: int, executor: Executor | None = None) -> None:
    """Close topics of one store, with shared syncs; raise the first error, after all the others were closed."""
    for subscription in (each for topic in topics for each in topic.subscriptions.values()):
        subscription._count_in_flight()
    errors = close_all([cursor for topic in topics for _, cursor in topic.cursors], now_ms=now_ms, executor=executor)
    for topic in topics:
        topic._forget(now_ms=now_ms)
    for error in errors:
        if error is not None:
            raise error


def subscribe_all(
    requests: Sequence[tuple[Topic, SubscriptionRequest]], *, now_ms: int, executor: Executor | None = None
) -> list[Subscription | AckStateError]:
    """Open or create subscriptions of topics of one store, as `Topic.subscribe_all`; returns an outcome for each."""
    if len({(topic.name, request.name) for topic, request in requests}) < len(requests):
        raise ValueError("subscriptions that are opened together must have different names")
    outcomes = [outcome_of(topic._find_open, request, now_ms) for topic, request in requests]
    new = [number for number, outcome in enumerate(outcomes) if outcome is None]
    # All are planned before the first write, so that an invalid argument changes nothing.
    planned = call_each(lambda number: requests[number][0]._plan(requests[number][1]), new, executor)
    plans: dict[int, Planned] = {}
    for number, plan in zip(new, planned, strict=True):
        if isinstance(plan, AckStateError):
            outcomes[number] = plan
        else:
            plans[number] = plan
    openings = [opening for opening, *_ in plans.values()]
    cursors = open_cursors(requests[0][0].store, openings, now_ms=now_ms, executor=executor) if plans else []
    # Composed in this thread: several may be of one topic.
    for (number, plan), cursor in zip(plans.items(), cursors, strict=True):
        subscribed = requests[number][0]._subscribed
        outcomes[number] = cursor if isinstance(cursor, AckStateError) else outcome_of(subscribed, plan, cursor)
    return [outcome for outcome in outcomes if outcome is not None]


def _open_delays(
    log: MessageLog, config: DelayConfig | None, *, now_ms: int
) -> TopicDelayIndex | BucketedDelayIndex | None:
    """Open a topic's delay index, whose owner the owner of the log is."""

    def read_deliver_at_ms(positions: Sequence[Position]) -> list[int]:
        return [message.deliver_at_ms for message in log.read(positions)]

    storage = SnapshotStorage.of_topic(
        log.store, log.topic, check=log.check_owned, read_deliver_at_ms=read_deliver_at_ms
    )
    if config is not None and config.tracker is TrackerKind.BUCKETED:
        index, report = BucketedDelayIndex.recover(config, storage=storage, now_ms=now_ms)
        if report.fell_back:
            _LOG.warning("topic %r: its delay buckets cannot be read, nor written: %s", log.topic, report.fell_back)
        return index
    with suppress(StoreError, CorruptStateError):
        # Of a time when it was bucketed: garbage, which the next open deletes otherwise.
        if storage.registry.is_stored:
            storage.delete()
    return None if config is None else TopicDelayIndex.from_config(config)


def delete_topic(store: Store, topic: str) -> bool:
    """Delete a topic with all of its subscriptions. Owners that have it open are fenced.

    First the log is taken over. Then the subscriptions are deleted, then the delay buckets, then all messages at once,
    and last the record of the log. So a crash leaves a topic that opens, with fewer subscriptions or without messages,
    or none. If another owner opens the topic before the messages are deleted, it keeps them, and the subscriptions that
    are left; it rebuilds delay buckets that are gone from them. The policies of the topic stay.

    Returns:
        Whether there was anything to delete.

    Raises:
        TypeError, ValueError: The topic is no text, or is empty.
        UnsupportedVersionError: The record of the log or of a subscription has another version.
        LogFencedError: Another owner has opened the topic meanwhile; some subscriptions may be deleted, no message is.
        StoreError, CorruptStateError: The storage failed; a part may be deleted. Call again, or open the topic.

    Complexity: O(ledgers of the store).
    """
    check_name("topic", topic)
    paths = sorted(subscription_paths(store, topic))
    root, _, name = log_path(topic).rpartition("/")
    is_stored = bool(store.ledgers.owned_by(log_owner(topic))) or name in store.metadata.children(root)
    schedule = cursor_path(topic, SCHEDULE)
    is_stored |= store.metadata.get(schedule) is not None
    if not paths and not is_stored and not SnapshotStorage.of_topic(store, topic).is_stored:
        return False
    ownership = LogOwnership.take_over(store, topic)
    for path in paths:
        delete_cursor(store, path, check=ownership.check)
    SnapshotStorage.of_topic(store, topic, check=ownership.check).delete()
    ownership.delete()
    delete_cursor(store, schedule)  # Last: as long as there are messages, the cancelled ones are known.
    return True
