"""The gate of a gated replay: the library's own gate and admission, and the usage at which a closed gate opens."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.analysis.replay.in_flight_set import CONSUMER
from ackstate.cursor.results import PersistResult, PersistTarget
from ackstate.dispatch.admission import Admission
from ackstate.dispatch.deliveries import Sent
from ackstate.errors import AckStateError
from ackstate.limits.gate import DispatchGate, GateLimits, Usage
from ackstate.record_size import isolated_range_bytes

if TYPE_CHECKING:
    from ackstate.analysis.replay.in_flight_set import InFlightSet
    from ackstate.analysis.replay.policy import Policy
    from ackstate.cursor.managed import ManagedCursor
    from ackstate.position import Position

_SENT = Sent(CONSUMER)
_MOST_USED = Usage(2**62, 0, 0)


@final
class ReplayGate:
    """Decides which messages are sent under a policy that `blocks`.

    Args:
        policy: The policy.
        cursor: The ack state.
        sent: The messages in flight; grows by those that are sent.
    """

    def __init__(self, policy: Policy, cursor: ManagedCursor, sent: InFlightSet) -> None:
        self._limit = policy.max_unpersisted_ack_record_bytes
        # Without young acks the gate opens when its usage falls; with them it may open at any usage.
        self._is_young = policy.cursor.become_old_ack_record_seconds != 0
        self._cursor = cursor
        self._sent = sent
        limits = GateLimits(
            max_unpersisted_ack_record_bytes=self._limit, max_unacked_messages=0, max_unacked_messages_per_consumer=0
        )
        self._gate = DispatchGate(limits)
        self._admission = Admission(cursor, gate=self._gate, promotes_young=True, sent=sent)
        # A closed gate stays closed while the usage is above this.
        self._may_open_at = _MOST_USED.unpersisted_record_bytes

    @property
    def is_closed(self) -> bool:
        """Whether new messages wait."""
        return self._gate.is_closed

    @property
    def room(self) -> int:
        """The bytes that are neither used nor reserved; below 0 above the limit."""
        return self._limit - self._cursor.view.unpersisted_record_bytes - self._sent.reserved_bytes

    def observe(self) -> None:
        """Close the gate if a cursor that was just opened is above the limit."""
        self._admission.observe(now_ms=0)

    def sends_at_once(self, position: Position) -> bool:
        """Send a message if it needs no decision: no acks are young, and an open gate has room."""
        if self._is_young:
            return False
        sent = Sent(CONSUMER, record_bytes=isolated_range_bytes(*position), range_count=1)
        if sent.record_bytes > self.room:
            return False
        self._sent.add(position, sent)
        return True

    def sends(self, position: Position, *, now_ms: int) -> bool:
        """Send a message if the admission admits it; otherwise note the usage at which the closed gate opens."""
        if self._admission.send_new(position, _SENT, now_ms=now_ms):
            return True
        closed = () if self._is_young else self._gate.why_blocked(_MOST_USED)
        self._may_open_at = closed[0].released_at if closed else _MOST_USED.unpersisted_record_bytes
        return False

    def opens_after_ack(self, *, now_ms: int) -> bool:
        """Return whether a closed gate may have opened because an ack lowered the usage."""
        if not self._gate.is_closed or self._limit - self.room > self._may_open_at:
            return False
        self._admission.usage_decreased(now_ms=now_ms)
        return True

    def record_bytes_max(self) -> int | None:
        return self._admission.record_bytes_max()

    def persisted(self, outcome: PersistResult | AckStateError, *, now_ms: int) -> None:
        """Receive the outcome of a persist; one that had nothing to write shows nothing about the store."""
        if isinstance(outcome, AckStateError):
            self._admission.persisted(outcome, now_ms=now_ms)
            return
        error = self._admission.store_error if outcome.route is PersistTarget.NOTHING else None
        self._admission.persisted(error, now_ms=now_ms)
