"""The consumers of a subscription, and which of them receives the messages of a key."""

from __future__ import annotations

from collections import Counter, OrderedDict
from enum import Enum
from hashlib import blake2b
from itertools import repeat
from typing import TYPE_CHECKING, cast, final

import google_crc32c

from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from ackstate.message import Message
    from ackstate.position import Position


@final
class Permits:
    """The permits of the open consumers, in messages. The consumers with permits form one line for each priority."""

    # Source: ``Consumer.messagePermits`` and ``AbstractDispatcherMultipleConsumers.getNextConsumer`` of Apache Pulsar.

    def __init__(self) -> None:
        self.total = 0
        self._counts: dict[str, int] = {}
        self._priorities: dict[str, int] = {}
        # Invariant: each consumer with permits is in the line of its priority; the lines are sorted, and none is empty.
        self._lines: dict[int, OrderedDict[str, None]] = {}

    def of(self, name: str) -> int:
        """Return how many messages a consumer may still receive; below 0 if a batch was larger than its permits."""
        return self._counts.get(name, 0)

    def open(self, name: str, *, priority: int) -> None:
        """Add a consumer without permits."""
        self._counts[name] = 0
        self._priorities[name] = priority

    def close(self, name: str) -> None:
        """Remove a consumer with its permits."""
        self.add(name, -self._counts[name])
        del self._counts[name], self._priorities[name]

    def add(self, name: str, count: int) -> None:
        """Add permits, or take them if the number is below 0. A consumer that had none goes to the end of its line."""
        before = self._counts[name]
        after = self._counts[name] = before + count
        self.total += max(after, 0) - max(before, 0)
        if before <= 0 < after:
            self._line(self._priorities[name])[name] = None
        elif after <= 0 < before:
            priority = self._priorities[name]
            del self._lines[priority][name]
            if not self._lines[priority]:
                del self._lines[priority]

    def first(self, *, besides: Container[str] = ()) -> str | None:
        """Return the consumer with permits whose turn it is: the first in the line of the lowest priority number."""
        for line in self._lines.values():
            for name in line:
                if name not in besides:
                    return name
        return None

    def in_turn(self) -> list[str]:
        """Return all consumers with permits in the order of their turns. Complexity: O(them)."""
        return [name for line in self._lines.values() for name in line]

    def peer_count(self, name: str) -> int:
        """Return how many consumers with permits have the priority of one of them, itself included."""
        return len(self._lines.get(self._priorities[name], ()))

    def turn_over(self, name: str) -> None:
        """Send a consumer to the end of its line, unless it has no permits left."""
        if self._counts.get(name, 0) > 0:
            self._lines[self._priorities[name]].move_to_end(name)

    def _line(self, priority: int) -> OrderedDict[str, None]:
        line = self._lines.get(priority)
        if line is None:
            line = self._lines[priority] = OrderedDict()
            self._lines = dict(sorted(self._lines.items()))
        return line

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(consumers)."""
        assert self.total == sum(max(count, 0) for count in self._counts.values())
        assert list(self._lines) == sorted(self._lines)
        assert all(self._lines.values())
        standing = {name: priority for priority, line in self._lines.items() for name in line}
        assert standing == {name: self._priorities[name] for name, count in self._counts.items() if count > 0}


ANYONE = ""
"""The owner of a message that any consumer may have."""

_SLOT_COUNT = 65_536
_EVERYTHING = b""
_CLOSED_MAX = 1_000


class SubscriptionType(Enum):
    """How a subscription distributes messages, by Pulsar's name."""

    EXCLUSIVE = "Exclusive"
    FAILOVER = "Failover"
    SHARED = "Shared"
    KEY_SHARED = "Key_Shared"

    @property
    def is_single_active(self) -> bool:
        """Whether one consumer at a time receives everything, in order; no limit holds it back, as in Pulsar."""
        return self is SubscriptionType.EXCLUSIVE or self is SubscriptionType.FAILOVER


class ConsumerBusyError(AckStateError):
    """An exclusive subscription has a consumer already, or a consumer of that name is open."""


class ConsumerClosedError(AckStateError):
    """The consumer was closed and not opened again: no one would return the messages sent to it."""


@final
class Consumers:
    """The open consumers of a subscription, in the order they came."""

    def __init__(self, kind: SubscriptionType) -> None:
        self.kind = kind
        self.needs_keys = kind is SubscriptionType.KEY_SHARED
        self.is_single_active = kind.is_single_active
        self.permits = Permits()
        # The consumer that has unacked messages of a key, which receives the next ones as well, and how many it has.
        # Invariant: both have the same keys.
        self._holders: dict[bytes, str] = {}
        self._held: Counter[bytes] = Counter()
        self._names: dict[str, int] = {}  # to its priority
        self._closed: dict[str, None] = {}  # the latest to be closed last
        self._slot_owners: dict[int, str] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @property
    def names(self) -> tuple[str, ...]:
        """The open consumers."""
        return tuple(self._names)

    @property
    def active(self) -> str | None:
        """The only receiver, with Exclusive and Failover: the consumer of the lowest priority, then by name."""
        if not self.is_single_active:
            return None
        return min(self._names, key=lambda name: (self._names[name], name), default=None)

    def open(self, name: str, *, priority: int) -> None:
        """Open a consumer."""
        _check_name(name)
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise TypeError(f"priority of consumer {name!r} must be an integer, got {priority!r}")
        if name in self._names:
            raise ConsumerBusyError(f"consumer {name!r} is open: close it first, or choose another name")
        if self._names and self.kind is SubscriptionType.EXCLUSIVE:
            raise ConsumerBusyError(f"consumer {name!r}: {self.active!r} has this exclusive subscription")
        self._names[name] = priority
        # With Key_Shared no priority counts, as in Pulsar.
        self.permits.open(name, priority=0 if self.needs_keys else priority)
        self._closed.pop(name, None)
        self._slot_owners.clear()

    def check_not_closed(self, name: str) -> None:
        """Refuse one of the last 1,000 consumers that were closed, unless it was opened again."""
        _check_name(name)
        if name in self._closed:
            raise ConsumerClosedError(f"consumer {name!r} was closed: open it again first (consumer_opened)")

    def close(self, name: str) -> None:
        """Close a consumer; no-op if it is not open."""
        if self._names.pop(name, None) is not None:
            self.permits.close(name)
            self._closed[name] = None
            if len(self._closed) > _CLOSED_MAX:
                del self._closed[next(iter(self._closed))]
        self._slot_owners.clear()

    def sticky_key(self, position: Position, key: bytes | None) -> bytes | None:
        """Return the key that assigns a message to a consumer and orders it; None if any may have it, in any order."""
        # That is its own key, or its position if it has none. If one consumer receives everything, all have one key.
        if not self.needs_keys:
            return _EVERYTHING if self.is_single_active else None
        return _key_of(position) if key is None else key

    def sticky_keys(self, messages: Sequence[tuple[Position, Message]]) -> list[bytes]:
        """Return `sticky_key` of each message, if keys decide which consumer receives a message."""
        keys = [message.key for _, message in messages]
        if None in keys:
            keys = [
                _key_of(position) if key is None else key for (position, _), key in zip(messages, keys, strict=True)
            ]
        return cast("list[bytes]", keys)

    def hold_keys(self, consumer: str, keys: Sequence[bytes]) -> None:
        """Note that a consumer, and no other, was sent a message of each key: it receives the next ones, too."""
        self._holders.update(zip(keys, repeat(consumer)))
        self._held.update(keys)

    def release(self, keys: Iterable[bytes | None]) -> list[bytes]:
        """Note that messages of keys are acked or returned; None is no key."""
        held, released = self._held, []
        for key in keys:
            if key is None or key not in held:
                continue
            if held[key] > 1:
                held[key] -= 1
            else:
                del held[key], self._holders[key]
                released.append(key)
        return released

    def release_keys(self) -> None:
        """Note that no consumer has any message."""
        self._holders.clear()
        self._held.clear()

    def owners(self, keys: Sequence[bytes | None]) -> list[str]:
        """Return the owner of each key."""
        owner_of, holder_of = self.owner, self._holders.get
        return [holder_of(key) or owner_of(key) for key in keys]  # type: ignore[arg-type] # no key has no holder

    def owner(self, key: bytes | None) -> str:
        """Return the owner of a key: the consumer with messages of it, else the winner of its slot, else `ANYONE`."""
        # Each slot goes to the consumer that comes first in an order of the slot's own (rendezvous hashing), so that a
        # consumer that comes or goes moves only its own slots.
        if key is None or not self._names or not self.needs_keys:
            return ANYONE
        holder = self._holders.get(key)
        if holder is not None:
            return holder
        slot = google_crc32c.value(key) % _SLOT_COUNT
        owner = self._slot_owners.get(slot)
        if owner is None:
            seed = slot.to_bytes(2, "little")
            # Not by a CRC: that is linear, and would give one consumer of five half the keys of its neighbours.
            owner = max(self._names, key=lambda name: (blake2b(seed + name.encode(), digest_size=8).digest(), name))
            self._slot_owners[slot] = owner
        return owner


def _key_of(position: Position) -> bytes:
    """Return the key of a message that has none of its own."""
    # No other key begins with this many zeros by accident; if one did, it would only share a consumer.
    return bytes(8) + b"%d:%d" % position


def _check_name(name: str) -> None:
    """Refuse a name that could not be compared or hashed later."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a consumer must be text, got {name!r}")
    if not name:
        raise ValueError("the name of a consumer must not be empty")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the name of a consumer must be UTF-8, got {name!r}") from None
