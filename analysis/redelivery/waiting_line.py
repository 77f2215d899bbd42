"""Messages that wait for their delivery, and times of messages, as arrays: thousands come and go at once."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
from pyroaring import BitMap

from ackstate.entry_bitmap import bitmap_of
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.analysis.redelivery.acked import Bools, Int64s
    from ackstate.analysis.redelivery.state_fields import Fields
    from ackstate.position import Position

_NONE = BitMap()


class Times(NamedTuple):
    """A time for each of some messages, as parallel arrays."""

    ts_ms: Int64s
    ledger_id: Int64s
    entry_id: Int64s

    def to_record(self) -> dict[str, Any]:
        """Return its fields as a state has them."""
        return {"ts_ms": self.ts_ms.tolist(), "ledger_id": self.ledger_id.tolist(), "entry_id": self.entry_id.tolist()}

    @classmethod
    def of(cls, fields: Fields) -> Times:
        """Build from fields that `to_record` returned."""
        ts_ms = fields.array("ts_ms")
        ledger_id = fields.array("ledger_id", least=0, most=LEDGER_ID_MAX, count=len(ts_ms))
        return cls(ts_ms, ledger_id, fields.array("entry_id", least=0, most=ENTRY_ID_MAX, count=len(ts_ms)))

    def those(self, which: slice | Int64s | Bools) -> Times:
        """Return some of them."""
        return Times(self.ts_ms[which], self.ledger_id[which], self.entry_id[which])

    def until(self, end_ms: int) -> Times:
        """Return those up to a time, where they are in order."""
        return self.those(slice(int(np.searchsorted(self.ts_ms, end_ms, "right"))))

    def later(self, by_ms: Int64s | int) -> Times:
        """Return them at later times."""
        return self._replace(ts_ms=self.ts_ms + by_ms)

    def and_those(self, others: Times) -> Times:
        """Return them and others, in order of time and position."""
        ts_ms, ledger_id, entry_id = (np.concatenate(columns) for columns in zip(self, others, strict=True))
        return Times(ts_ms, ledger_id, entry_id).those(np.lexsort((entry_id, ledger_id, ts_ms)))


NO_TIMES = Times(*np.empty((3, 0), np.int64))


def entries_by_ledger(ledger_ids: Int64s, entry_ids: Int64s) -> dict[int, BitMap]:
    """Return messages as bitmaps."""
    if len(ledger_ids) and (ledger_ids == ledger_ids[0]).all():
        return {int(ledger_ids[0]): bitmap_of(entry_ids.astype(np.uint32))}
    return {each: bitmap_of(entry_ids[ledger_ids == each].astype(np.uint32)) for each in np.unique(ledger_ids).tolist()}


@final
class TimesKept:
    """Times of messages, to be found by message."""

    def __init__(self) -> None:
        self._of: dict[int, dict[int, int]] = {}

    def __bool__(self) -> bool:
        return any(self._of.values())

    def has_any(self, ledger_id: int, entries: BitMap) -> bool:
        """Tell whether one of some messages of a ledger has a time."""
        return any(each in entries for each in self._of.get(ledger_id, ()))

    def times(self) -> Times:
        """Return all of them, in order of position."""
        rows = [(ts_ms, ledger_id, entry_id) for ledger_id, of_ledger in sorted(self._of.items())
                for entry_id, ts_ms in sorted(of_ledger.items())]  # fmt: skip
        return Times(*np.array(rows, np.int64).reshape(-1, 3).T)

    def put(self, times: Times) -> None:
        """Keep the times of messages that have none."""
        for ledger_id in np.unique(times.ledger_id).tolist():
            of_ledger = self._of.setdefault(ledger_id, {})
            found = times.those(times.ledger_id == ledger_id)
            for entry_id, ts_ms in zip(found.entry_id.tolist(), found.ts_ms.tolist(), strict=True):
                of_ledger.setdefault(entry_id, ts_ms)

    def get(self, ledger_ids: Int64s, entry_ids: Int64s) -> Int64s:
        """Return the times of messages, -1 where there is none."""
        return self._each(ledger_ids, entry_ids, dict.get)

    def pop(self, ledger_ids: Int64s, entry_ids: Int64s) -> Int64s:
        """Return the times of messages as `get` does, and forget them."""
        return self._each(ledger_ids, entry_ids, dict.pop)

    def _each(
        self, ledger_ids: Int64s, entry_ids: Int64s, look_up: Callable[[dict[int, int], int, int], int]
    ) -> Int64s:
        found = np.full(len(entry_ids), -1)
        for ledger_id in np.unique(ledger_ids).tolist():
            of_ledger, which = self._of.get(ledger_id), ledger_ids == ledger_id
            if of_ledger is not None:
                found[which] = [look_up(of_ledger, each, -1) for each in entry_ids[which].tolist()]
                if not of_ledger:
                    del self._of[ledger_id]
        return found


@final
class WaitingLine:
    """Messages that wait, each once: the first that came goes first.

    Attributes:
        acked_ms: When those are acked in the recording of which it says so.
    """

    def __init__(self) -> None:
        self.acked_ms = TimesKept()
        self._parts: deque[Times] = deque()
        # Invariant: as many as in all parts, and those by ledger.
        self._count = 0
        self._entries: dict[int, BitMap] = {}

    def __len__(self) -> int:
        return self._count

    def __contains__(self, position: Position) -> bool:
        return position.entry_id in self.entries(position.ledger_id)

    def entries(self, ledger_id: int) -> BitMap:
        """Return those of a ledger: to be read, not changed."""
        return self._entries.get(ledger_id, _NONE)

    def join(self, times: Times) -> None:
        """Let messages wait since a time each; they come after all others."""
        if len(times.ts_ms):
            self._parts.append(times)
            self._count += len(times.ts_ms)
            for ledger_id, entries in entries_by_ledger(times.ledger_id, times.entry_id).items():
                self._entries.setdefault(ledger_id, BitMap()).update(entries)

    def first(self, count_max: int) -> Times:
        """Return since when which messages wait: the first ones, so many or all."""
        parts, count = [], 0
        for part in self._parts:
            if count >= count_max:
                break
            parts.append(part)
            count += len(part.ts_ms)
        if not parts:
            return NO_TIMES
        return Times(*map(np.concatenate, zip(*parts, strict=True))).those(slice(count_max))

    def leave(self, count: int) -> Times:
        """Let the first so many go, and return since when which waited."""
        left = self.first(count)
        self._count -= count
        while count:
            part = self._parts.popleft()
            if len(part.ts_ms) > count:
                self._parts.appendleft(part.those(slice(count, None)))
            count -= min(count, len(part.ts_ms))
        for ledger_id, entries in entries_by_ledger(left.ledger_id, left.entry_id).items():
            self._entries[ledger_id] -= entries
            if not self._entries[ledger_id]:
                del self._entries[ledger_id]
        return left

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(them)."""
        every = self.first(self._count)
        assert len(every.ts_ms) == self._count == sum(map(len, self._entries.values()))
        assert entries_by_ledger(every.ledger_id, every.entry_id) == self._entries
