"""The settings of a subscription, and the checks of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ackstate.cursor.managed import ManagedCursor
from ackstate.dispatch.consumers import SubscriptionType
from ackstate.dispatch.delivery import DeadLetterPolicy
from ackstate.integers import check_count
from ackstate.limits.gate import DispatchGate

if TYPE_CHECKING:
    from ackstate.delay.view import DelayedDeliveryTracker
    from ackstate.topic.message_log import MessageLog


@dataclass(frozen=True, slots=True)
class SubscriptionOptions:
    """The optional settings of a subscription.

    Attributes:
        dead_letters: Where messages go that are given back again and again; None redelivers them without end.
        promotes_young: Whether acks too young to be persisted are persisted all the same, the oldest first, before
            they would close the gate.
        look_ahead_max: With Key_Shared, how many messages may wait for their consumers before the reader stops.
        turn_entries: With Shared, how many entries a round sends to one consumer before it is the turn of the next one;
            more if all of them can have equal shares of more. Pulsar's ``dispatcherMaxRoundRobinBatchSize``.
        round_entries_max: About how many entries one round sends to all consumers together.

    Raises:
        TypeError: A number is not an integer, or another field is of another type.
        ValueError: A number is below 1.
    """

    dead_letters: DeadLetterPolicy | None = None
    promotes_young: bool = True
    look_ahead_max: int = 20_000
    turn_entries: int = 20
    round_entries_max: int = 1_000

    def __post_init__(self) -> None:
        for name in ("look_ahead_max", "turn_entries", "round_entries_max"):
            check_count(name, getattr(self, name), least=1)
        if not isinstance(self.promotes_young, bool):
            raise TypeError(f"promotes_young must be True or False, got {self.promotes_young!r}")
        if self.dead_letters is not None and not isinstance(self.dead_letters, DeadLetterPolicy):
            raise TypeError(f"dead_letters must be a DeadLetterPolicy, got {self.dead_letters!r}")


def check_same_log(log: MessageLog, cursor: ManagedCursor) -> None:
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
    kind: SubscriptionType,
    gate: DispatchGate | None,
    delays: DelayedDeliveryTracker | None,
    options: SubscriptionOptions,
    *,
    publishes: bool,
) -> None:
    """Refuse parts that no subscription can be made of, and those that its type would not use."""
    if not isinstance(kind, SubscriptionType):
        meant = [
            each for each in SubscriptionType if str(kind).casefold() in {each.value.casefold(), each.name.casefold()}
        ]
        hint = f": use {meant[0]}" if meant else f": use one of {', '.join(map(str, SubscriptionType))}"
        raise TypeError(f"kind must be a SubscriptionType, got {kind!r}{hint}")
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
