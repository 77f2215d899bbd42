"""Orders queued messages by how much of the ack state their acks free, while a limit holds new messages back."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import TYPE_CHECKING, final

from ackstate.integers import check_count
from ackstate.position import ENTRY_ID_MAX, Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ackstate.ack_hole import AckHole
    from ackstate.cursor.managed import ManagedCursor
    from ackstate.delay.position_set import PositionSet

# A dispatch stops after this many holes of which no message could be sent; the next dispatch continues there.
_PASSED_OVER_MAX = 256
# At most this many messages at the lower end of a hole are examined for one that was not tried too often.
_LOOKED_AT_MAX = 16
# Beyond this many changes at once, and a share of the holes in the queue, it is cheaper to rebuild.
_CHANGED_COUNT_MIN = 1_000
# Looking up the hole of one message takes as long as iterating over this many holes.
_HOLES_PER_PUT = 2


@final
class HoleQueue:
    """Holes with waiting messages, first those that free the most bytes for each message; ties go to the lowest.

    The bytes are those of the whole ack record or, if the limit is on un-persisted acks, of that part.

    A hole is added when one of its messages begins to wait or its bounds change. An outdated entry is noticed when its
    turn comes. A hole that was passed over comes again after all others.

    Args:
        cursor: The ack state with the holes.
        tries_max: How often a message is offered before others that were offered less often.
        counts_unpersisted: Whether the bytes are those of un-persisted acks.

    Raises:
        TypeError: `tries_max` is not an integer.
        ValueError: `tries_max` is below 1.
    """

    def __init__(self, cursor: ManagedCursor, *, tries_max: int, counts_unpersisted: bool) -> None:
        check_count("hole_tries_max", tries_max, least=1)
        self.counts_unpersisted = counts_unpersisted
        self._cursor = cursor
        self._tries_max = tries_max
        self._heap: list[tuple[float, Position]] = []  # minus the worth, and the first entry
        self._passed_over: list[tuple[float, Position]] = []
        self._worth: dict[Position, float] = {}  # of each hole that is in, by its first entry
        self._tries: Counter[Position] = Counter()
        self._tries_now = tries_max
        self._was_sent = False  # whether an offered message was sent
        self._has_skipped = False  # whether this round left out a message that was tried too often

    def fill(self, ready: PositionSet) -> None:
        """Rebuild the queue from every hole that has messages in a set; the numbers of tries are kept.

        Complexity: O(holes), or O(messages) if those are far fewer.
        """
        self._heap.clear()
        self._passed_over.clear()
        self._worth.clear()
        is_acked = self._cursor.is_acked
        self._tries = Counter({each: count for each, count in self._tries.items() if not is_acked(each)})
        if len(ready) * _HOLES_PER_PUT < self._cursor.deleted.range_count:
            self._put_all(ready)
        else:
            self._merge(ready)

    def note_all(self, changed: Sequence[Position], ready: PositionSet) -> None:
        """Note entries that were acked, or were added to a set, since the last call.

        Their present state counts: they may have changed more than once, and may come in any order.

        Complexity: O(entries), or O(set) if that is smaller; O(holes) now and then.
        """
        acked = [position for position in changed if self._cursor.is_acked(position)]
        for position in acked:
            self._tries.pop(position, None)
        count = min(len(changed), len(ready))
        # An outdated entry stays until its turn comes, and the turn of the worst may never come.
        has_leftovers = len(self._heap) + len(self._passed_over) > 2 * len(ready) + _CHANGED_COUNT_MIN
        if has_leftovers or count > max(_CHANGED_COUNT_MIN, len(self._worth) // 4):
            self.fill(ready)
        elif len(ready) < len(changed):
            self._put_all(ready)
        else:
            for position in changed:
                if position in ready:
                    self.put(position)
            for position in acked:
                self.acked(position, ready)

    def _put_all(self, ready: PositionSet) -> None:
        """Put in the hole of each message of a set."""
        above = Position(0, 0)
        for position in ready:
            if position >= above:
                ledger_id, _, end = self.put(position)
                above = Position(ledger_id, end)

    def _merge(self, ready: PositionSet) -> None:
        """Put in every hole that has messages in a set, iterating over both side by side; the queue is empty."""
        positions = iter(ready)
        position = next(positions, None)
        for hole in self._cursor.view.holes():
            first, last = hole.first_position, hole.last_position
            while position is not None and position < first:
                position = next(positions, None)
            if position is not None and position <= last:
                self._worth[first] = self._worth_of(hole)
            while position is not None and position <= last:
                position = next(positions, None)
        self._heap += ((-worth, first) for first, worth in self._worth.items())
        heapq.heapify(self._heap)
        while position is not None:  # above the highest ack
            self.put(position)
            position = next(positions, None)

    def put(self, position: Position) -> tuple[int, int, int]:
        """Put in the hole that an entry lies in, and return it: its ledger, first entry and end (exclusive)."""
        hole, worth = self._hole(position)
        first = Position(hole[0], hole[1])
        if self._worth.get(first) != worth:
            self._worth[first] = worth
            heapq.heappush(self._heap, (-worth, first))
        return hole

    def acked(self, position: Position, ready: PositionSet) -> None:
        """Note that an entry was acked: the holes beside it have changed."""
        ledger_id, entry_id = position
        for neighbour in (
            Position(ledger_id, max(entry_id - 1, 0)),
            Position(ledger_id, min(entry_id + 1, ENTRY_ID_MAX)),
        ):
            hole = self._cursor.view.hole_at(neighbour)
            has_waiting = hole is not None and ready.lowest_in(hole.ledger_id, hole.first, hole.end)
            if has_waiting or neighbour in ready:
                self.put(neighbour)

    def offered(self, ready: PositionSet) -> Iterator[Position]:
        """Yield messages of a set, the best first; one that is still in the set at the next step is passed over.

        Only the message that was yielded last may leave the set meanwhile.
        """
        # Holes that an earlier call passed over come last.
        round_count = 2 if self._heap and self._passed_over else 1
        self._was_sent = False
        while round_count:
            self._has_skipped = False
            for _ in range(round_count):
                yield from self._one_round(ready)
                if self._was_sent:
                    return
            # Only messages that were tried too often can be sent: better than to be stuck.
            round_count = int(self._has_skipped)
            self._tries_now += self._has_skipped * self._tries_max

    def _one_round(self, ready: PositionSet) -> Iterator[Position]:
        if not self._heap:
            self._heap, self._passed_over = self._passed_over, []
            heapq.heapify(self._heap)
        refused = 0
        # To stop before anything was sent could mean to be stuck, if nothing changes before the next call.
        while self._heap and (refused < _PASSED_OVER_MAX or not self._was_sent):
            key, first = heapq.heappop(self._heap)
            if self._worth.get(first) != -key:
                continue  # It was put in again, with its present worth.
            hole, worth = self._hole(first)
            if worth != -key or hole[1] != first.entry_id or not ready.lowest_in(*hole):
                del self._worth[first]
                if self._cursor.is_acked(first):
                    self.acked(first, ready)
                elif ready.lowest_in(*hole):
                    self.put(first)
                continue
            position = None
            try:
                for position in self._candidates(ready, hole):
                    yield position
                    if position not in ready:
                        break
            finally:  # The caller stops when it has enough.
                was_sent = position is not None and position not in ready
                if position is not None and was_sent:
                    self._was_sent = True
                    self._tries[position] += 1
                    heapq.heappush(self._heap, (key, first))
                else:
                    self._passed_over.append((key, first))
            refused += position is not None and not was_sent

    def _candidates(self, ready: PositionSet, hole: tuple[int, int, int]) -> Iterator[Position]:
        """Yield the ends of a hole that wait and may be tried: a message between them would divide it."""
        ledger_id, first, end = hole
        lowest = ready.lowest_in(ledger_id, first, end)
        for _ in range(_LOOKED_AT_MAX):
            if lowest is None or self._may_try(lowest):
                break
            lowest = ready.lowest_in(ledger_id, lowest.entry_id + 1, end)
        else:
            return
        if lowest is None:
            return
        yield lowest
        highest = ready.highest_in(ledger_id, first, end)
        if highest is not None and highest != lowest and self._may_try(highest):
            yield highest

    def _may_try(self, position: Position) -> bool:
        is_fresh = self._tries[position] < self._tries_now
        self._has_skipped |= not is_fresh
        return is_fresh

    def _hole(self, position: Position) -> tuple[tuple[int, int, int], float]:
        """Return the hole of an unacked entry and the worth of each of its messages; above the last ack, the entry."""
        cursor = self._cursor
        hole = cursor.view.hole_at(position)
        if hole is None:
            added = (
                cursor.view.unpersisted_bytes_added(position)
                if self.counts_unpersisted
                else cursor.view.ack_effect(position).record_bytes
            )
            return (*position, position[1] + 1), -added
        return (hole.ledger_id, hole.first, hole.end), self._worth_of(hole)

    def _worth_of(self, hole: AckHole) -> float:
        freed_bytes = self._cursor.view.unpersisted_bytes_freed(hole) if self.counts_unpersisted else hole.freed_bytes
        return freed_bytes / hole.entry_count


@final
class HoleQueues:
    """A queue of holes for each owner of messages; changes reach it when it is used next.

    Args:
        cursor: The ack state with the holes.
        tries_max: As for `HoleQueue`.
        waiting_count: Returns how many messages wait now: beyond a part of that it is cheaper to rebuild the queues.

    Attributes:
        queues: The queues by owner: to be read, not changed.
    """

    def __init__(self, cursor: ManagedCursor, *, tries_max: int, waiting_count: Callable[[], int]) -> None:
        self._cursor = cursor
        self._tries_max = tries_max
        self._waiting_count = waiting_count
        self.queues: dict[str, HoleQueue] = {}
        # Entries that were acked, or began to wait, and how many of them each queue has received.
        self._changed: list[Position] = []
        self._told: dict[str, int] = {}

    def note(self, position: Position) -> None:
        """Remember that an entry was acked, or waits."""
        if self.queues:
            self.note_all((position,))

    def note_all(self, positions: Sequence[Position]) -> None:
        """Remember that entries were acked, or wait."""
        if not self.queues:
            return
        self._changed += positions
        if len(self._changed) > max(_CHANGED_COUNT_MIN, self._waiting_count() // 4):
            self._trim()

    def expect(self, count: int) -> None:
        """Prepare for `count` changes at once."""
        if count > _CHANGED_COUNT_MIN:
            self.clear()

    def of(self, owner: str, ready: PositionSet, *, counts_unpersisted: bool) -> HoleQueue:
        """Return the up-to-date queue of an owner.

        Args:
            owner: The owner of its messages.
            ready: Those of them that may be sent.
            counts_unpersisted: As for `HoleQueue`.
        """
        queue = self.queues.get(owner)
        if queue is None or queue.counts_unpersisted != counts_unpersisted:
            queue = HoleQueue(self._cursor, tries_max=self._tries_max, counts_unpersisted=counts_unpersisted)
            queue.fill(ready)
            self.queues[owner] = queue
        else:
            queue.note_all(self._changed[self._told[owner] :], ready)
        if len(self.queues) == 1:
            self._changed.clear()
        self._told[owner] = len(self._changed)
        return queue

    def is_current(self, owner: str) -> bool:
        """Return whether nothing has changed since the queue of an owner was last requested."""
        return self._told.get(owner) == len(self._changed)

    def forget(self, owner: str) -> None:
        """Forget the queue of an owner that is gone."""
        self.queues.pop(owner, None)
        self._told.pop(owner, None)

    def clear(self) -> None:
        """Forget all queues: they are rebuilt when they are used next."""
        self.queues.clear()
        self._told.clear()
        self._changed.clear()

    def _trim(self) -> None:
        """Forget the older half of the changes, and the queues that have not received them."""
        gone = len(self._changed) // 2
        del self._changed[:gone]
        for owner, told in list(self._told.items()):
            if told < gone:
                self.forget(owner)
            else:
                self._told[owner] = told - gone
