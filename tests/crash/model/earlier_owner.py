"""A broker that has not noticed its own death: its writes count until the next owner has fenced it."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.analysis.crash.promises import Promise, hold
from ackstate.cursor.results import PersistTarget
from ackstate.cursor.store import StoreError
from ackstate.errors import CursorFencedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.cursor.managed import ManagedCursor
    from ackstate.cursor.results import Receipt
    from crash.model.simulated_subscription import SimulatedSubscription

_ACKS_MAX = 3


@final
class EarlierOwner:
    """A cursor that was open when its broker died, with the store of that broker.

    Args:
        side: The subscription, just before it is opened again.
        race_count: Number of writes while the next owner takes the cursor over.
    """

    def __init__(self, side: SimulatedSubscription, *, race_count: int) -> None:
        self.cursor: ManagedCursor = side.cursor
        self.store = side.store
        self.race_count = race_count
        self._log_end = len(side.simulation.log)  # it no longer sees the log grow
        # After a deletion its broker lives on, and trims entries that this owner has not acked.
        self._ledgers = side.simulation.message_log.ledgers
        self.cursor.remove_listener(side)
        self.store.forget_faults()

    def race(self, side: SimulatedSubscription) -> None:
        """Ack and persist while the next owner opens the cursor, which must have all successful acks."""
        if not self.race_count or self.store.is_over:
            return
        self.race_count -= 1
        receipts = self._ack(side)
        side.model.ack(list(receipts))
        try:
            result = self.cursor.persist(now_ms=side.simulation.now_ms)
        except (StoreError, CursorFencedError) as error:
            side.simulation.note(f"{side.name} before: -> {error}")
            side.is_certain = side.left_ledgers_clean = False
            return
        side.simulation.note(f"{side.name} before: persists", receipts)
        if result.route is not PersistTarget.NOTHING:
            side.simulation.counts["raced"] += 1
            side.wrote_before()
        for number, receipt in receipts.items():
            is_lie = self.cursor.durable(receipt) and number not in side.model.durable
            hold(Promise.I2, not is_lie, f"the receipt of {side.simulation.log.positions[number]} lied")

    def go_on(self, side: SimulatedSubscription) -> None:
        """Act as an owner after the next one has opened the cursor: no action may count.

        Raises:
            PromiseBrokenError: An action counts, or is reported to.
        """
        if self.store.is_over:
            return
        simulation, cursor = side.simulation, self.cursor
        before, receipts = side.written.raw(), self._ack(side)
        simulation.note("the owner before continues", receipts)
        acts: list[Callable[[], object]] = [
            lambda: cursor.persist(now_ms=simulation.now_ms) if cursor.view.is_dirty else self._refused(),
            lambda: cursor.set_cursor_properties({"owner": "before"}),
            lambda: cursor.tick(now_ms=simulation.now_ms) or self._refused(),
            lambda: (
                cursor.reset(simulation.log.positions[0], now_ms=simulation.now_ms) if receipts else self._refused()
            ),
        ]
        simulation.random.shuffle(acts)
        for act in acts[:3]:
            self._must_fail(side, act)
            hold(Promise.I14, side.written.raw() == before, "an earlier owner changed the durable state")
        for number, receipt in receipts.items():
            found = f"{simulation.log.positions[number]} is durable, says an earlier owner"
            hold(Promise.I14, not cursor.durable(receipt), found)

    def _must_fail(self, side: SimulatedSubscription, act: Callable[[], object]) -> None:
        try:
            act()
        except CursorFencedError:
            side.simulation.counts["fenced"] += 1
        except StoreError as error:
            side.simulation.note(f"-> {error}")
        else:
            hold(Promise.I14, False, "a write of an earlier owner ended well")

    def _refused(self) -> object:
        raise StoreError("there was nothing to do")

    def _ack(self, side: SimulatedSubscription) -> dict[int, Receipt]:
        """Ack a few entries that its log still has, and return the receipts by number."""
        simulation, positions = side.simulation, side.simulation.log.positions
        known = [number for number in range(self._log_end) if positions[number] in self._ledgers]
        numbers = [number for number in known if not self.cursor.is_acked(positions[number])]
        numbers = simulation.random.sample(numbers, min(len(numbers), simulation.random.randint(1, _ACKS_MAX)))
        return {number: self.cursor.ack(positions[number], now_ms=simulation.now_ms) for number in numbers}
