"""The parts of a subscription, and the reports about them, which change nothing."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ackstate.dispatch.admission import Admission
from ackstate.dispatch.block_reason import BlockReason, explain_blocks
from ackstate.dispatch.consumers import Consumers, SubscriptionType
from ackstate.dispatch.live_holes import HoleContext, explain_holes
from ackstate.dispatch.stats import consumer_uses, dispatch_stats
from ackstate.dispatch.unacked_messages import UnackedMessages
from ackstate.integers import check_count, integer

if TYPE_CHECKING:
    from ackstate.cursor.managed import ManagedCursor
    from ackstate.delay.view import DelayedDeliveryTracker
    from ackstate.dispatch.deliveries import Deliveries
    from ackstate.dispatch.hole_report import HoleReport
    from ackstate.dispatch.options import SubscriptionOptions
    from ackstate.dispatch.stats import ConsumerUse, DispatchStats
    from ackstate.limits.gate import DispatchGate, Usage
    from ackstate.topic.message_log import MessageLog


class SubscriptionReports:
    """The read-only half of a `Subscription`.

    Attributes:
        log: The topic's messages.
        cursor: The ack state.
        kind: How messages are distributed.
    """

    def __init__(  # noqa: PLR0913 - its parts
        self,
        log: MessageLog,
        cursor: ManagedCursor,
        *,
        gate: DispatchGate | None,
        delays: DelayedDeliveryTracker | None,
        kind: SubscriptionType,
        options: SubscriptionOptions,
    ) -> None:
        self.log = log
        self.cursor = cursor
        self.kind = kind
        self._latest_ms = cursor.opened_ms
        # Taken before any lock of the cursor.
        self._lock = threading.RLock()
        self._gate = gate
        self._consumers = Consumers(kind)
        self._admission = Admission(cursor, gate=gate, promotes_young=options.promotes_young)
        self._messages = UnackedMessages(
            log, cursor, delays=delays, admission=self._admission, consumers=self._consumers
        )
        self._context = HoleContext(
            log, cursor, self._admission.deliveries, self._messages.waiting, has_delays=delays is not None,
            is_delayed=self._messages.delayed.fills,
        )  # fmt: skip

    @property
    def unacked_messages(self) -> int:
        """Messages sent and neither acked nor returned, those of a batch one by one."""
        with self._lock:
            return self._admission.deliveries.unacked_messages

    @property
    def deliveries(self) -> Deliveries:
        """The messages in flight, with the reservations for their acks: to be read, not changed."""
        return self._admission.deliveries

    @property
    def consumers(self) -> tuple[str, ...]:
        """The open consumers, in the order they came."""
        with self._lock:
            return self._consumers.names

    @property
    def has_consumers(self) -> bool:
        """Whether a consumer is open. Takes no lock, so that a caller can look at many subscriptions."""
        return self._consumers.has_any

    @property
    def active_consumer(self) -> str | None:
        """The consumer that receives everything, with Exclusive and Failover; None if there is none."""
        with self._lock:
            return self._consumers.active

    def usage(self, consumer: str = "") -> Usage:
        """Return the present usage of the gate's limits.

        Args:
            consumer: Its unacked messages count as the consumer's; empty for none.
        """
        with self._lock:
            return self._admission.usage.of(consumer)

    def stats(self) -> DispatchStats:
        """Return the numbers of the subscription and its cursor, all of one instant.

        Raises:
            CursorClosedError: The subscription is closed.

        Complexity: O(log ledgers + closed consumers), and counting the delayed messages: with a view of a shared index
        O(ledgers with delayed messages), else O(1).
        """
        with self._lock:
            self.cursor.check_open()
            consumer_count = len(self._consumers.names)
            return dispatch_stats(self.cursor, self._admission, self._messages, consumer_count=consumer_count)

    def consumer_uses(self) -> list[ConsumerUse]:
        """Return the unacked messages of each open consumer, in the order they came. Complexity: O(consumers)."""
        with self._lock:
            return consumer_uses(self._admission, self._consumers.names)

    def why_blocked(self, *, top: int = 3, now_ms: int | None = None) -> tuple[BlockReason, ...]:
        """Return the rules that keep new messages back, each with the acks that would open it; empty if none does.

        Args:
            top: How many holes and consumers to name for each rule.
            now_ms: The present.

        Raises:
            ValueError: `top` is negative.

        Complexity: O(holes) if a limit of the ack state is closed.
        """
        check_count("top", top, least=0)
        with self._lock:
            if self._gate is None:
                return ()
            names, now_ms = self._consumers.names, self._present(now_ms)
            return explain_blocks(self._gate, self._admission, self._context, consumers=names, top=top, now_ms=now_ms)

    def explain_holes(self, top: int = 10, *, now_ms: int | None = None) -> list[HoleReport]:
        """Explain the costliest ack holes: their entries, their causes, and the bytes and ranges they take.

        Args:
            top: How many at most: the one that holds back the mark-delete position, then the costliest first.
            now_ms: The present.

        Complexity: O(holes), and reading up to 64 messages of each that is returned.
        """
        with self._lock:
            return explain_holes(self._context, top=top, now_ms=self._present(now_ms))

    def check_invariants(self) -> None:
        """Recount everything that is counted incrementally, and assert that it agrees. Complexity: O(state)."""
        with self._lock:
            self.deliveries._check()
            self._messages.waiting._check()
            self.cursor._check()

    def _at(self, now_ms: int) -> int:
        """Return the time that a call gave, and remember it as the latest."""
        self._latest_ms = integer("now_ms", now_ms)
        return self._latest_ms

    def _present(self, now_ms: int | None) -> int:
        """Return the time that a call gave or, if it gave none, the latest."""
        return self._latest_ms if now_ms is None else integer("now_ms", now_ms)
