"""The messages that wait to be sent although the reader has passed them."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.entry_bitmap import bitmaps_of
from ackstate.position_set import PositionSet

if TYPE_CHECKING:
    from collections.abc import Callable, KeysView, Sequence

    from ackstate.dispatch.hole_report import HoleReason
    from ackstate.position import Position


_JITTER_MS_MAX = 1_000  # The clocks of callers in several threads may differ by this.


class Waiting(NamedTuple):
    """The state of a waiting message.

    Attributes:
        reason: NACKED, OWNER_GONE, DELAYED (it is due now), NEVER_DELIVERED (read ahead of its turn), or DATA_LOST.
        delivery_count: How often it was sent.
        key: The key that assigns it to a consumer; None if any may have it.
        consumer: The consumer that had it last.
        until_ms: It is not sent before this time; 0 for at once.
    """

    reason: HoleReason
    delivery_count: int = 0
    key: bytes | None = None
    consumer: str = ""
    until_ms: int = 0


@final
class ReplayQueue:
    """Messages to be sent as soon as their owner may have them, the lowest first, those of a key in order.

    Args:
        owners: Returns for each of some keys the consumer that receives its messages; `ANYONE` if any may.
        became_ready: Called when messages may be sent now, or have another owner than before.
    """

    def __init__(
        self,
        owners: Callable[[Sequence[bytes | None]], list[str]],
        *,
        became_ready: Callable[[], object],
    ) -> None:
        self._owners_of = owners
        self._became_ready = became_ready
        self._all: dict[Position, Waiting] = {}
        self.get: Callable[[Position], Waiting | None] = self._all.get
        """Returns the state of a waiting message; None if it does not wait."""
        self._in_order = PositionSet()  # the same positions
        # The messages that may be sent now, by owner, and the owner of each. Invariant: both agree.
        self._ready: dict[str, PositionSet] = {}
        self._owners: dict[Position, str] = {}
        self._not_before: list[tuple[int, Position]] = []  # a heap; may have messages that were taken or put back since
        self._latest_ms: int | None = None  # the latest time since the clock was last set back
        # In order; a list, since most keys have a few messages at most.
        self._of_key: dict[bytes, list[Position]] = {}
        # The messages of a key that wait for a time. Invariant: exactly those below the lowest of them may be sent.
        self._timed_of_key: dict[bytes, PositionSet] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, position: object) -> bool:
        return position in self._all

    @property
    def positions(self) -> KeysView[Position]:
        """The messages, in any order: to be read, not changed."""
        return self._all.keys()

    @property
    def next_until_ms(self) -> int | None:
        """When the next message that waits for a time may be sent; None if none does."""
        while self._not_before:
            until_ms, position = self._not_before[0]
            waiting = self._all.get(position)
            if waiting is not None and waiting.until_ms == until_ms:
                return until_ms
            heapq.heappop(self._not_before)
        return None

    @property
    def keys(self) -> KeysView[bytes]:
        """The keys of the messages: to be read, not changed."""
        return self._of_key.keys()

    def in_order(self) -> PositionSet:
        """Return all positions: to be read, not changed."""
        return self._in_order

    def ready_for(self, owner: str) -> PositionSet:
        """Return the messages that an owner may have now: to be read, not changed.

        A set that is not empty follows each put and take until consumers are opened or closed; call again after that.
        """
        return self._ready.get(owner, _NONE)

    def put(self, position: Position, waiting: Waiting) -> None:
        """Add a message; it does not wait yet.

        Raises:
            TypeError: The time that it waits for is not an integer.
        """
        assert position not in self._all
        if not isinstance(waiting.until_ms, int):
            raise TypeError(f"until_ms of {position} must be an integer, got {waiting.until_ms!r}")
        self._all[position] = waiting
        self._in_order.add(position)
        if waiting.key is not None:
            of_key = self._of_key.get(waiting.key)
            if of_key is None:
                self._of_key[waiting.key] = [position]
            else:
                insort(of_key, position)
        if not waiting.until_ms:
            self._arrange(position, waiting.key)
            return
        heapq.heappush(self._not_before, (waiting.until_ms, position))
        if waiting.key is not None:
            self._hold_back(position, waiting.key)

    def put_all(self, positions: Sequence[Position], waiting: Sequence[Waiting]) -> None:
        """Add messages that wait for no time, as `put` does each; at a fraction of the time."""
        assert self._all.keys().isdisjoint(positions)
        self._all.update(zip(positions, waiting, strict=True))
        for ledger_id, entries in bitmaps_of(positions).items():
            self._in_order.update_entries(ledger_id, entries)
        ready: dict[str, list[Position]] = {}
        keys = [each.key for each in waiting]
        for position, key, owner in zip(positions, keys, self._owners_of(keys), strict=True):
            if key is not None:
                of_key = self._of_key.get(key)
                if of_key is None:
                    self._of_key[key] = [position]
                else:
                    insort(of_key, position)
                if key in self._timed_of_key:
                    self._arrange(position, key)
                    continue
            self._owners[position] = owner
            if owner in ready:
                ready[owner].append(position)
            else:
                ready[owner] = [position]
        for owner, mine in ready.items():
            of_owner = self._ready.setdefault(owner, PositionSet())
            for ledger_id, entries in bitmaps_of(mine).items():
                of_owner.update_entries(ledger_id, entries)
        if ready:
            self._became_ready()

    def take_all(self, owner: str, positions: Sequence[Position]) -> None:
        """Remove messages that are ready for an owner, as `take` does each; at a fraction of the time."""
        ready = self._ready[owner]
        for ledger_id, entries in bitmaps_of(positions).items():
            self._in_order.discard_entries(ledger_id, entries)
            ready.discard_entries(ledger_id, entries)
        for position in positions:
            del self._owners[position]
            key = self._all.pop(position).key
            if key is not None:
                of_key = self._of_key[key]
                if len(of_key) > 1:
                    del of_key[bisect_left(of_key, position)]
                else:
                    del self._of_key[key]

    def take(self, position: Position) -> Waiting:
        """Remove a message that waits."""
        waiting = self._all.pop(position)
        self._in_order.discard(position)
        self._unready(position)
        if waiting.key is not None:
            of_key = self._of_key[waiting.key]
            if len(of_key) > 1:
                del of_key[bisect_left(of_key, position)]
            else:
                del self._of_key[waiting.key]
            if waiting.until_ms:
                self._time_over(position, waiting.key)
        return waiting

    def follow_clock(self, *, now_ms: int) -> None:
        """Note the time. If the clock was set back, so are the times that messages wait for: no wait becomes longer.

        A step back of at most a second is ignored: it may be the difference between two callers.

        Complexity: O(1); O(messages that wait for a time) after a step back.
        """
        back_ms = 0 if self._latest_ms is None else self._latest_ms - now_ms
        if back_ms <= 0 or back_ms > _JITTER_MS_MAX:
            self._latest_ms = now_ms
        if back_ms <= _JITTER_MS_MAX:
            return
        timed = [
            (waiting.until_ms - back_ms or -1, position) for position, waiting in self._all.items() if waiting.until_ms
        ]
        for until_ms, position in timed:
            self._all[position] = self._all[position]._replace(until_ms=until_ms)
        heapq.heapify(timed)
        self._not_before = timed

    def release(self, *, now_ms: int) -> None:
        """Make the messages ready whose time has come."""
        self.follow_clock(now_ms=now_ms)
        while (until_ms := self.next_until_ms) is not None and until_ms <= now_ms:
            _, position = heapq.heappop(self._not_before)
            waiting = self._all[position] = self._all[position]._replace(until_ms=0)
            if waiting.key is None:
                self._arrange(position, None)
            else:
                self._time_over(position, waiting.key)

    def is_next_of_key(self, position: Position) -> bool:
        """Return whether no earlier message of its key waits."""
        key = self._all[position].key
        return key is None or self._of_key[key][0] == position

    def key_moved(self, key: bytes) -> None:
        """Give the waiting messages of a key to its present owner. Complexity: O(1) if it is the same as before."""
        of_key = self._of_key.get(key)
        if of_key is None:
            return
        owner = self._owners.get(of_key[0])
        if owner is not None and owner != self._owner(key):
            for position in of_key:
                if position in self._owners:
                    self._unready(position)
                    self._arrange(position, key)

    def owners_changed(self) -> None:
        """Give all waiting messages to their present owners. Complexity: O(keys + owners + moved messages)."""
        for key in self._of_key:
            self.key_moved(key)
        # Here, not as soon as one is empty: the set that `ready_for` returned stays valid until consumers come or go.
        self._ready = {owner: ready for owner, ready in self._ready.items() if ready}

    def up_to(self, position: Position) -> list[Position]:
        """Return the messages up to a position, included. Complexity: O(them)."""
        return list(takewhile(lambda each: each <= position, self._in_order))

    def clear(self) -> None:
        """Forget everything."""
        self._all.clear()
        self._in_order.clear()
        self._ready.clear()
        self._owners.clear()
        self._timed_of_key.clear()
        self._not_before.clear()
        self._of_key.clear()

    def _arrange(self, position: Position, key: bytes | None) -> None:
        """Make a message ready that waits for no time, unless an earlier one of its key waits for one."""
        lowest_timed = None if key is None else self._lowest_timed(key)
        if lowest_timed is None or position < lowest_timed:
            owner = self._owners[position] = self._owner(key)
            ready = self._ready.get(owner)
            if ready is None:
                ready = self._ready[owner] = PositionSet()
            ready.add(position)
            self._became_ready()

    def _hold_back(self, position: Position, key: bytes) -> None:
        """Hold a message of a key back until its time, and those after it with it."""
        lowest_timed = self._lowest_timed(key)
        self._timed_of_key.setdefault(key, PositionSet()).add(position)
        if lowest_timed is None or position < lowest_timed:
            of_key = self._of_key[key]
            for later in of_key[bisect_left(of_key, position) :]:
                if later == lowest_timed:
                    return
                self._unready(later)

    def _time_over(self, position: Position, key: bytes) -> None:
        """Make a message of a key ready that waited for a time, and those after it, up to the next that does."""
        timed = self._timed_of_key[key]
        was_lowest = next(iter(timed)) == position
        timed.discard(position)
        if not timed:
            del self._timed_of_key[key]
        if was_lowest and key in self._of_key:
            lowest_timed = self._lowest_timed(key)
            of_key = self._of_key[key]
            for later in of_key[bisect_left(of_key, position) :]:
                if later == lowest_timed:
                    return
                self._arrange(later, key)

    def _owner(self, key: bytes | None) -> str:
        (owner,) = self._owners_of((key,))
        return owner

    def _lowest_timed(self, key: bytes) -> Position | None:
        timed = self._timed_of_key.get(key)
        return None if timed is None else next(iter(timed))

    def _unready(self, position: Position) -> None:
        owner = self._owners.pop(position, None)
        if owner is not None:
            self._ready[owner].discard(position)

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(waiting)."""
        assert {position: owner for owner, ready in self._ready.items() for position in ready} == self._owners
        assert self._owners.keys() <= self._all.keys()
        assert list(self._in_order) == sorted(self._all)
        assert all(not self._all[position].until_ms for position in self._owners)
        assert {position for of_key in self._of_key.values() for position in of_key} == {
            position for position, waiting in self._all.items() if waiting.key is not None
        }
        timed = {position for position, waiting in self._all.items() if waiting.until_ms and waiting.key is not None}
        assert timed == {position for of_key in self._timed_of_key.values() for position in of_key}
        for key, of_key in self._of_key.items():
            lowest_timed = self._lowest_timed(key)
            may_go = {position for position in of_key if lowest_timed is None or position < lowest_timed}
            assert may_go == {position for position in of_key if position in self._owners}
            assert {self._owners[position] for position in may_go} <= {self._owner(key)}
        free = {position for position, waiting in self._all.items() if not waiting.until_ms and waiting.key is None}
        assert free <= self._owners.keys()


_NONE = PositionSet()
