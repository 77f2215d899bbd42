"""The message log of a topic, in ledgers of a store.

One owner at a time writes a log: `MessageLog.open` fences every earlier one (`ackstate.cursor.topic.log_ownership`).
"""

from __future__ import annotations

from operator import index as operator_index
from typing import TYPE_CHECKING, NamedTuple, Protocol, final
from weakref import WeakSet

from ackstate.cursor.store import LedgerFencedError, LedgerNotFoundError
from ackstate.cursor.topic.log_ownership import LogOwnership, log_owner
from ackstate.cursor.topic.message import NO_DELAY, Message, checked_messages, decode_messages, encode_message
from ackstate.cursor.topic_name import check_name
from ackstate.integers import check_within
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position, positions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ackstate.cursor.store import Store
    from ackstate.delay.shared_index import SharedDelayIndex
    from ackstate.errors import AckStateError

__all__ = ["NO_DELAY", "Message", "MessageLog", "Publication"]

_COUNT_END = 2**32


class LogListener(Protocol):
    """An object that a log reports publishes to."""

    def messages_came(self) -> object:
        """Called after each publish, inside that call: be quick, and raise nothing."""
        ...


class Publication(NamedTuple):
    """Messages that are about to be appended to a log; made by `MessageLog.prepare`.

    Attributes:
        log: The log.
        messages: The messages.
        entries: For each the ledger that it goes to, and its bytes.
        on_stored: Called when they are stored.
    """

    log: MessageLog
    messages: Sequence[Message]
    entries: list[tuple[int, bytes]]
    on_stored: Callable[[], object] | None = None

    def stored(self, entry_ids: Sequence[int]) -> list[Position]:
        """Note that the entries were appended and synced, and return their positions."""
        positions = self.log._published(self.messages, self.entries[0][0], entry_ids) if entry_ids else []
        if self.on_stored is not None:
            self.on_stored()
        return positions

    def fenced(self, cause: AckStateError) -> AckStateError:
        """Return the error for entries that were refused since another owner has the log."""
        return self.log._fenced(cause)


@final
class MessageLog:
    """The messages of one topic, appended in batches with one sync each, in ledgers of a bounded number of entries.

    Created by `open`. After an open the first batch begins a new ledger, as in Pulsar. One writer at a time.

    Attributes:
        topic: The name of the topic.
        ledgers: How many entries each ledger holds; the topic's cursors are opened with it.
        store: Where the ledgers live.
    """

    def __init__(self, store: Store, topic: str, counts: dict[int, int], ownership: LogOwnership | None) -> None:
        self.topic = topic
        self.ledgers = LedgerMap.from_counts(counts)
        self.store = store
        self._ownership = ownership  # None for a log that is only read
        self._entries_per_ledger_max = 0
        self._room = 0  # how many entries the open ledger may still take; 0 after a recovery
        # Weak, since an index lives as long as its views, and a listener as long as its subscription.
        self._fed: WeakSet[SharedDelayIndex] = WeakSet()
        self._listeners: WeakSet[LogListener] = WeakSet()

    @classmethod
    def open(cls, store: Store, *, topic: str, entries_per_ledger_max: int = 50_000) -> MessageLog:
        """Open a topic's log and take it over from its owner, or create it if the store has none.

        From then on no earlier owner can append, and all messages that any of them has published are in this log.

        Args:
            store: Where the ledgers live; stays open.
            topic: Any text but an empty one.
            entries_per_ledger_max: A ledger that has this many is closed and a new one begun; Pulsar's
                ``managedLedgerMaxEntriesPerLedger``.

        Raises:
            TypeError: The topic is no text, or the limit no integer.
            ValueError: The topic is empty, or the limit below 1 or above 2**32.
            UnsupportedVersionError: A newer release has opened the log; nothing was changed.
            CorruptStateError: The length of a ledger cannot be read.
            StoreError: The storage failed.
        """
        check_name("topic", topic)
        check_within("entries_per_ledger_max", entries_per_ledger_max, least=1, most=_COUNT_END)
        ownership = LogOwnership.take_over(store, topic)
        counts = _counts(store, topic)
        room = 0
        if not counts:
            counts, room = {ownership.begin_ledger(): 0}, entries_per_ledger_max
        log = cls(store, topic, counts, ownership)
        log._entries_per_ledger_max, log._room = entries_per_ledger_max, room
        return log

    @classmethod
    def find(cls, store: Store, *, topic: str) -> MessageLog | None:
        """Return a topic's log to be read only, None if the store has none. Its owner keeps it; nothing is written.

        Raises:
            TypeError, ValueError: The topic is no text, or is empty.
            CorruptStateError: The length of a ledger cannot be read.
            StoreError: The storage failed.
        """
        check_name("topic", topic)
        counts = _counts(store, topic)
        return cls(store, topic, counts, None) if counts else None

    def feed(self, index: SharedDelayIndex) -> None:
        """Report to a delay index, from now on, when each delayed message is due, as soon as it is published.

        A subscription with a view of the index calls this when it is created. Messages that were published before are
        offered to the index by the first reader that comes to them. The log holds no reference to the index.
        """
        if index not in self._fed:
            self._fed.add(index)
            index.complete_from = _following(self.ledgers.last_confirmed)

    def add_listener(self, listener: LogListener) -> None:
        """Report each later publish to a listener; no-op if it is registered. The log holds no reference to it."""
        self._listeners.add(listener)

    def publish(self, messages: Sequence[Message]) -> list[Position]:
        """Append messages with one sync, all or nothing, and return their positions in order.

        A batch that does not fit into the open ledger begins a new one, and may itself be larger than a ledger's limit.

        Raises:
            TypeError: `messages` is no sequence of `Message`, or a field of a message is of another type.
            ValueError: A number is out of range, or the log was opened by `find`.
            LogFencedError: Another owner has opened the log; nothing was appended, and nothing ever will be.
            StoreError: The append failed, or its outcome is unknown. The log's ledgers are as before; messages that
                were stored nevertheless are in the log from the next append, or the next open, on.
        """
        publication = self.prepare(messages)
        if not publication.entries:
            return []
        try:
            entry_ids = self.store.ledgers.append_all(publication.entries)
        except (LedgerFencedError, LedgerNotFoundError) as error:
            raise publication.fenced(error) from error
        return publication.stored(entry_ids)

    def prepare(self, messages: Sequence[Message]) -> Publication:
        """Return the next messages, encoded for the open ledger; one with too little room for them is closed.

        Raises:
            As `publish`; nothing is stored.
        """
        messages = checked_messages(messages)
        contents = [encode_message(message) for message in messages]
        if self._ownership is None:
            raise ValueError(f"the message log of topic {self.topic!r} was opened to be read; open it to publish")
        if contents and self._room < len(contents):
            self._begin_ledger(self._ownership)
        ledger_id = self.ledgers.current_ledger_id
        return Publication(self, messages, [(ledger_id, content) for content in contents])

    def _published(self, messages: Sequence[Message], ledger_id: int, entry_ids: Sequence[int]) -> list[Position]:
        self._room -= self._count_up_to(entry_ids[-1], published=len(entry_ids))
        positions = list(positions_of(ledger_id, entry_ids))
        if self._fed:
            self._feed_all(positions, messages)
        for listener in self._listeners:
            listener.messages_came()
        return positions

    def _fenced(self, cause: AckStateError) -> AckStateError:
        assert self._ownership is not None
        error = self._ownership.fenced()
        error.__cause__ = cause
        return error

    def _begin_ledger(self, ownership: LogOwnership) -> None:
        """Close the open ledger and begin the next one."""
        self._room = 0  # From here on it is closed, or may be.
        last = ownership.close_ledger()
        if last is not None:
            self._count_up_to(last, published=0)
        self.ledgers.roll(ownership.begin_ledger())
        self._room = self._entries_per_ledger_max

    def _count_up_to(self, last: int, *, published: int) -> int:
        """Count the entries of the open ledger up to its last one, and return how many are new.

        The store says how many there are: an append that failed may have happened.
        """
        ledger_id = self.ledgers.current_ledger_id
        new = last + 1 - self.ledgers.entry_count(ledger_id)
        self.ledgers.append(new)
        if new > published:  # No index was told of the messages of that append: their first reader offers them.
            for index in self._fed:
                index.complete_from = Position(ledger_id, last + 1 - published)
        return new

    def _feed_all(self, positions: Sequence[Position], messages: Sequence[Message]) -> None:
        delayed = [
            (position, operator_index(message.deliver_at_ms))
            for position, message in zip(positions, messages, strict=True)
            if message.deliver_at_ms > 0
        ]
        if delayed:
            for index in self._fed:
                index.learn(delayed)

    def read(self, positions: Sequence[Position]) -> Iterator[Message]:
        """Yield the messages at positions, in their order; neighbours are read from the store together.

        Raises:
            TypeError: `positions` is a single position.
            LedgerNotFoundError: A position is not in the log.
            CorruptStateError: The entry there is not a message.
        """
        if isinstance(positions, Position):
            raise TypeError(f"positions must be a list of Position, got a single one, {positions}")
        read = self.store.ledgers.read
        return decode_messages((ledger_id, read(ledger_id, first, end)) for ledger_id, first, end in _runs(positions))


def _runs(positions: Iterable[Position]) -> Iterator[tuple[int, int, int]]:
    """Yield the ledger, the first entry and the end (exclusive) of neighbours, in the order of the positions."""
    recent_id, first, end = -1, 0, 0
    for ledger_id, entry_id in positions:
        if ledger_id != recent_id or entry_id != end:
            if recent_id >= 0:
                yield recent_id, first, end
            recent_id, first = ledger_id, entry_id
        end = entry_id + 1
    if recent_id >= 0:
        yield recent_id, first, end


def _following(position: Position) -> Position:
    return Position(position.ledger_id, position.entry_id + 1)


def _counts(store: Store, topic: str) -> dict[int, int]:
    """Return how many entries each ledger of a topic's log holds, by ledger id; empty if there is none."""
    return {ledger_id: store.ledgers.last(ledger_id) + 1 for ledger_id in store.ledgers.owned_by(log_owner(topic))}
