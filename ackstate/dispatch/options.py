"""The settings and values of a subscription: its start, its options, its deliveries, and checks of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ackstate.checks import LONG_MAX, check_count, check_within, integer, member
from ackstate.cursor import ManagedCursor
from ackstate.dispatch.consumers import SubscriptionType
from ackstate.limits import DispatchGate
from ackstate.message import Message
from ackstate.position import Position, check_position
from ackstate.topic_name import check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ackstate.delay.view import DelayedDeliveryTracker, SharedDelayIndex
    from ackstate.dispatch.admission import RoundWaiter
    from ackstate.ledger_map import LedgerMap
    from ackstate.position_set import PositionSet


class ReadableLog(Protocol):
    """The messages of one topic, to be read only."""

    @property
    def ledgers(self) -> LedgerMap:
        """How many entries each ledger holds."""
        ...

    def can_read(self, ledger_id: int) -> bool:
        """Return whether the messages of a ledger are in the store, so that one that cannot be read is lost."""
        ...

    def read(self, positions: Sequence[Position]) -> Iterator[Message]:
        """Yield the messages at positions, in order; else `LedgerNotFoundError` or `CorruptStateError`."""
        ...


class TopicLog(ReadableLog, Protocol):
    """The message log of one topic, as a subscription uses it; `ackstate.topic.MessageLog` is one."""

    topic: str

    @property
    def cancelled(self) -> PositionSet | None:
        """Messages that no subscription receives: they are acked instead. None if no message was ever changed."""
        ...

    @property
    def sole_use(self) -> SoleUse:
        """Refuses that one thread reads the log while another changes it."""
        ...

    def feed(self, index: SharedDelayIndex) -> None:
        """Report each delayed message to an index from now on, as soon as it is published."""
        ...

    def add_listener(self, listener: RoundWaiter) -> None:
        """Call `messages_came` of a waiter after each publish from now on, inside that call."""
        ...


class SoleUse(Protocol):
    """See `TopicLog`."""

    def check(self) -> None:
        """Raise `RuntimeError` if another thread changes the log at this moment."""
        ...


class Start(Enum):
    """An end of the message log, by Pulsar's name."""

    EARLIEST = "Earliest"
    """The first message that the log still has."""

    LATEST = "Latest"
    """The next message to be published."""


class StartTime(NamedTuple):
    """The first message that was published at a time or later.

    Attributes:
        time_ms: The time, as in `Message.publish_time_ms`.
    """

    time_ms: int


def checked_start(name: str, start: Start | StartTime | Position | str) -> Start | StartTime | Position:
    """Return a start that may be an end of the log by its name, in any case."""
    if isinstance(start, StartTime):
        return StartTime(integer("time_ms", start.time_ms))
    if isinstance(start, Start | str):
        return member(name, start, Start)
    if not isinstance(start, tuple):
        raise TypeError(f"{name} must be 'earliest', 'latest', a StartTime or a Position, got {start!r}")
    return check_position(start)


def start_position(log: ReadableLog, start: Start | StartTime | Position) -> Position:
    """Return the position that is read first. It need not be in the log: the next entry that is takes its place."""
    # A time is found by bisection, so publish times should rise along the log. Where they do not, as with producers
    # whose clocks differ, the result is a message at or after the time that follows one before it; messages at or after
    # the time may come before it, and earlier ones after it.
    # Source: ``PersistentSubscription.resetCursor`` and ``PersistentMessageFinder`` of Apache Pulsar, which starts
    # after the newest message before the time.
    ledgers = log.ledgers
    if start is Start.EARLIEST:
        return ledgers.next_valid(ledgers.first_position)
    if start is Start.LATEST:
        return ledgers.next_valid(ledgers.last_confirmed)
    if isinstance(start, StartTime):
        return _first_published(log, start.time_ms)
    return check_position(start)


def _first_published(log: ReadableLog, time_ms: int) -> Position:
    ledgers = log.ledgers
    before = ledgers.first_position
    low, high = 0, ledgers.count_between(before, ledgers.last_confirmed)
    while low < high:
        middle = (low + high) // 2
        (message,) = log.read([ledgers.position_after(before, middle + 1)])
        low, high = (middle + 1, high) if message.publish_time_ms < time_ms else (low, middle)
    return ledgers.next_valid(ledgers.position_after(before, low))


class Delivery(NamedTuple):
    """One message that is sent to a consumer.

    Attributes:
        position: Its position in the log.
        message: The published message.
        redelivery_count: How often it was sent before.
        unacked_words: The unacked messages of a batch that is partly acked, as in `BatchIndexes`; else empty.
    """

    position: Position
    message: Message
    redelivery_count: int = 0
    unacked_words: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DeadLetterPolicy:
    """The policy for a message that is given back again and again: who gets it, or the topic it is published to.

    A dead letter that could not be handed over or published, or whose ack would exceed a limit by then, stays unacked
    and waits for a second before the next attempt. No attempt is remembered by a crash or a seek, so a dead letter may
    be handed over more than once.

    A message is not sent again before its earlier deliveries are durable, so that each crash adds one delivery at most:
    a dispatch with such messages persists first, once. Not in Pulsar's format, which has no place for delivery counts,
    nor while the store has no room for them.

    Attributes:
        max_redelivery_count: How often it is sent again, 0 or more; the next time it is handed over instead.
        hand_over: Receives it; the message is acked when this returns. It is called inside `dispatch`, with locks held,
            and its errors pass through that. With asyncio it is called in a thread, for one message of a subscription
            at a time, and its errors are logged; if it is a coroutine function, or returns an awaitable, that is
            awaited in the event loop before the ack, for any number of messages at once.
        topic: The topic that it is published to, opened or created by the same `Topics` or `AsyncTopics`; it is durable
            there before it is acked. It keeps payload, key, message count and properties, and gets the properties
            ``REAL_TOPIC``, ``REAL_SUBSCRIPTION`` and ``ORIGIN_MESSAGE_ID``, unless it has them already, as in Pulsar.
            The policy does not apply to subscriptions of that topic itself.

    Raises:
        TypeError: The count is not an integer, `hand_over` cannot be called, or the topic is no text.
        ValueError: The count is negative, the topic empty, or not exactly one of `hand_over` and `topic` is given.
    """

    max_redelivery_count: int
    hand_over: Callable[[Delivery], object] | None = None
    topic: str | None = None

    def __post_init__(self) -> None:
        check_count("max_redelivery_count", self.max_redelivery_count, least=0)
        if self.hand_over is not None and not callable(self.hand_over):
            raise TypeError(f"hand_over must take a delivery, got {self.hand_over!r}")
        if self.topic is not None:
            check_name("topic", self.topic)
        if (self.hand_over is None) == (self.topic is None):
            raise ValueError(f"give either hand_over or topic, got {self.hand_over!r} and {self.topic!r}")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a message waits that is given back without a delay of its own, and how often it is sent.

    After its n-th delivery it waits ``min(max_ms, min_ms * multiplier ** (n - 1))`` milliseconds. The journal keeps the
    time with the number of deliveries: a restart neither forgets nor repeats the wait. A message of a consumer that
    went away does not wait.

    Attributes:
        min_ms: The first wait, 1 or more.
        max_ms: The longest wait, not below `min_ms`.
        multiplier: How much longer each wait is than the one before, 1 or more.
        deliveries_max: After so many deliveries it is a dead letter at once, if the `DeadLetterPolicy` allows more;
            None leaves it to that policy.

    Raises:
        TypeError: A number is of another type.
        ValueError: A number is out of range.
    """

    min_ms: int
    max_ms: int
    multiplier: float = 2
    deliveries_max: int | None = None

    def __post_init__(self) -> None:
        check_count("min_ms", self.min_ms, least=1)
        check_within("max_ms", self.max_ms, least=self.min_ms, most=LONG_MAX, unit="milliseconds")
        if isinstance(self.multiplier, bool) or not isinstance(self.multiplier, int | float):
            raise TypeError(f"multiplier must be a number, got {self.multiplier!r}")
        if not 1 <= self.multiplier < float("inf"):
            raise ValueError(f"multiplier must be at least 1 and finite, got {self.multiplier!r}")
        if self.deliveries_max is not None:
            check_count("deliveries_max", self.deliveries_max, least=1)

    def wait_ms(self, delivery_count: int) -> int:
        """Return how long a message waits after its n-th delivery."""
        try:
            return int(min(self.max_ms, self.min_ms * self.multiplier ** (delivery_count - 1)))
        except OverflowError:
            return self.max_ms


def dead_letter(delivery: Delivery, *, topic: str, subscription: str) -> Message:
    """Return the message that is published for a dead letter of a subscription."""
    # Source: ``ConsumerImpl.getPropertiesMap`` of Apache Pulsar.
    message = delivery.message
    origin = {"REAL_TOPIC": topic, "REAL_SUBSCRIPTION": subscription, "ORIGIN_MESSAGE_ID": str(delivery.position)}
    return Message(
        message.payload, key=message.key, message_count=message.message_count,
        properties={**origin, **message.properties},
    )  # fmt: skip


class DispatchRound(NamedTuple):
    """The result of `Subscription.dispatch_all`.

    Attributes:
        deliveries: Each consumer that receives messages, once, with its messages in the order they were sent.
        next_wake_ms: When to call again because a message's time will have come; None if none waits for a time, or no
            consumer has permits.
    """

    deliveries: list[tuple[str, list[Delivery]]]
    next_wake_ms: int | None


@dataclass(frozen=True, slots=True)
class SubscriptionOptions:
    """The optional settings of a subscription.

    Attributes:
        dead_letters: Where messages go that are given back again and again; None redelivers them without end.
        retries: How long messages wait that are given back without a delay; None sends them again at once.
        promotes_young: Whether acks too young to be persisted are persisted all the same, the oldest first, before
            they would close the gate.
        look_ahead_max: With Key_Shared, how many messages may wait for their consumers before the reader stops.
        turn_entries: With Shared, how many entries a round sends to one consumer before it is the turn of the next one;
            more if all of them can have equal shares of more. Pulsar's ``dispatcherMaxRoundRobinBatchSize``.
        round_entries_max: About how many entries one round sends to all consumers together.

    Raises:
        TypeError: A number is not an integer, or another field is of another type.
        ValueError: A number is below 1, or the retries have a `deliveries_max` and no dead letters follow it.
    """

    dead_letters: DeadLetterPolicy | None = None
    promotes_young: bool = True
    look_ahead_max: int = 20_000
    turn_entries: int = 20
    round_entries_max: int = 1_000
    retries: RetryPolicy | None = None

    def __post_init__(self) -> None:
        for name in ("look_ahead_max", "turn_entries", "round_entries_max"):
            check_count(name, getattr(self, name), least=1)
        if not isinstance(self.promotes_young, bool):
            raise TypeError(f"promotes_young must be True or False, got {self.promotes_young!r}")
        if self.dead_letters is not None and not isinstance(self.dead_letters, DeadLetterPolicy):
            raise TypeError(f"dead_letters must be a DeadLetterPolicy, got {self.dead_letters!r}")
        if self.retries is not None and not isinstance(self.retries, RetryPolicy):
            raise TypeError(f"retries must be a RetryPolicy, got {self.retries!r}")
        if self.dead_letters is None and self.retries is not None and self.retries.deliveries_max is not None:
            raise ValueError("deliveries_max needs dead_letters: without them nothing happens after the last delivery")

    @property
    def deliveries_max(self) -> int | None:
        """How often a message is sent before it is a dead letter; None for no limit."""
        if self.dead_letters is None:
            return None
        limit = self.dead_letters.max_redelivery_count + 1
        return min(limit, limit if self.retries is None else self.retries.deliveries_max or limit)


def check_same_log(log: TopicLog, cursor: ManagedCursor) -> None:
    """Refuse a cursor that acknowledges the messages of another log, or of an earlier opening of this one."""
    if not isinstance(cursor, ManagedCursor):
        raise TypeError(f"cursor must be a ManagedCursor, got a {type(cursor).__name__}")
    if log.topic != cursor.topic:
        raise ValueError(f"cursor must be of the log's topic {log.topic!r}, got one of topic {cursor.topic!r}")
    if log.ledgers is not cursor.ledgers:
        raise ValueError(
            f"cursor must be opened with the ledgers of this log of topic {log.topic!r}, got one that was opened with "
            "others; pass ledgers=log.ledgers to ManagedCursor.open, and open the cursor again whenever the log is"
        )


def check_parts(
    kind: SubscriptionType | str,
    gate: DispatchGate | None,
    delays: DelayedDeliveryTracker | None,
    options: SubscriptionOptions,
    *,
    publishes: bool,
) -> SubscriptionType:
    """Return the type; refuse parts that no subscription can be made of, and those that its type would not use."""
    kind = member("kind", kind, SubscriptionType)
    if gate is not None and not isinstance(gate, DispatchGate):
        raise TypeError(f"gate must be a DispatchGate, got {gate!r}")
    if delays is not None and not callable(getattr(delays, "scheduled_messages", None)):
        raise TypeError(f"delays must be a DelayedDeliveryTracker, got {delays!r}")
    if not isinstance(options, SubscriptionOptions):
        raise TypeError(f"options must be a SubscriptionOptions, got {options!r}")
    dead_letters = options.dead_letters
    if dead_letters is not None and dead_letters.topic is not None and not publishes:
        raise ValueError(
            f"dead letters for topic {dead_letters.topic!r} are published by Topics or AsyncTopics: subscribe with one "
            "of them, or give hand_over"
        )
    if kind.is_single_active:
        for name, given in (("gate", gate), ("delays", delays)):
            if given is not None:
                raise ValueError(
                    f"{name} must be None for a subscription of type {kind.value}, got a {type(given).__name__}: "
                    "its one consumer gets everything at once and in order"
                )
    return kind
