"""Reads the messages that a subscription is about to send, each once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, final

from ackstate.errors import CorruptStateError
from ackstate.stores.base import LedgerNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ackstate.position import Position
    from ackstate.topic.message_log import Message, MessageLog

_LOG = logging.getLogger(__name__)
_KEPT_BYTES_MAX = 4 << 20
_MESSAGE_BYTES = 250  # of a message beside its payload and key, with its entry in a dict


@final
class MessageReader:
    """Reads messages from the log, and keeps those that were read and not sent.

    Kept messages take at most 4 MiB; beyond that the first ones are dropped, and read again.

    Args:
        log: The topic's messages.
        postpone: Called with each message that is lost or damaged, and the present.

    Attributes:
        kept: The kept messages: to be read, not changed.
    """

    def __init__(self, log: MessageLog, *, postpone: Callable[[Position, int], None]) -> None:
        self._log = log
        self._postpone = postpone
        self.kept: dict[Position, Message] = {}
        self._kept_bytes = 0

    def read(self, positions: Sequence[Position], *, now_ms: int) -> list[tuple[Position, Message]]:
        """Return the messages at positions, in their order, without the unreadable ones; none of them is kept.

        Raises:
            StoreError: The store failed; the messages are kept or not as before.
        """
        if self.kept.keys().isdisjoint(positions):
            return self._load(positions, now_ms=now_ms)
        kept = list(map(self.kept.get, positions))
        missing = [position for position, message in zip(positions, kept, strict=True) if message is None]
        loaded = dict(self._load(missing, now_ms=now_ms))
        self.forget(positions)
        return [
            (position, found)
            for position, message in zip(positions, kept, strict=True)
            if (found := loaded.get(position) if message is None else message) is not None
        ]

    def keep(self, unsent: Iterable[tuple[Position, Message]]) -> None:
        """Keep messages that were read and not sent, for the next `read`."""
        kept = self.kept
        for position, message in unsent:
            before = kept.pop(position, None)
            if before is None:
                self._kept_bytes += _size(message)
            kept[position] = message
        while self._kept_bytes > _KEPT_BYTES_MAX:
            self.forget((next(iter(self.kept)),))

    def forget(self, positions: Iterable[Position]) -> None:
        """Drop the messages at positions, such as acked ones, if they are kept."""
        kept = self.kept
        for position in positions if kept else ():
            message = kept.pop(position, None)
            if message is not None:
                self._kept_bytes -= _size(message)

    def forget_up_to(self, position: Position) -> None:
        """Drop the messages up to a position, included. Complexity: O(kept)."""
        self.forget([each for each in self.kept if each <= position])

    def clear(self) -> None:
        """Drop everything."""
        self.kept.clear()
        self._kept_bytes = 0

    def _load(self, positions: Sequence[Position], *, now_ms: int) -> list[tuple[Position, Message]]:
        if not positions:
            return []
        try:
            return list(zip(positions, self._log.read(positions), strict=True))
        except (LedgerNotFoundError, CorruptStateError):
            pass
        readable = []
        for position in positions:
            try:
                (message,) = self._log.read([position])
            except (LedgerNotFoundError, CorruptStateError) as error:
                _LOG.warning("message %s cannot be read, and waits: %s", position, error)
                self._postpone(position, now_ms)
            else:
                readable.append((position, message))
        return readable


def _size(message: Message) -> int:
    return _MESSAGE_BYTES + len(message.payload) + len(message.key or b"")
