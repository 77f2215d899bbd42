"""Records the events of cursors, in three lines of an embedding program.

    recording = Recording(directory)
    recording.follow(cursor, topic=topic, subscription=name, now_ms=now_ms)   # for a Subscription, its .cursor
    ...                                                                       # ack, persist, dispatch as usual
    recording.close()

``ackstate trace DIRECTORY TRACE`` converts it into a trace, whether the process ended or was killed. If you continue
with the same directory after a restart, follow each cursor again before its first ack: the crash and the recovery are
then recorded. The process died at an unknown time after its last event, and with the same acks in memory at all of
these times: the crash is dated at the latest of them, when the next process followed its first cursor.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Self, final

from ackstate.analysis.trace.entry_set import EntrySet, SubscriptionHistory, histories
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.recorder import Recorder, check_segment, read_recording, segments
from ackstate.cursor.listener import Change, CursorListener

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ackstate.cursor.cursor import ManagedCursor

_LOG = logging.getLogger(__name__)
_KINDS = {
    Change.ACKED: EventKind.ACK,
    Change.MARK_DELETED: EventKind.MARK_DELETE,
    Change.PERSIST_BEGUN: EventKind.PERSIST_BEGUN,
    Change.HELD_BACK: EventKind.HELD_BACK,
    Change.CUT_OFF: EventKind.CUT_OFF,
    Change.DISPLACED: EventKind.DISPLACED,
    Change.PERSIST_ENDED: EventKind.PERSIST_ENDED,
    Change.PERSIST_FAILED: EventKind.PERSIST_FAILED,
    Change.RESET: EventKind.RESET,
    Change.UNACKED: EventKind.REDELIVER,
}
_PERSISTS = frozenset((Change.PERSIST_BEGUN, Change.PERSIST_ENDED, Change.PERSIST_FAILED))
_SETTLED = frozenset((
    EventKind.PERSIST_ENDED, EventKind.CRASH, EventKind.RECOVER, EventKind.REDELIVER, EventKind.RESET, None,
))  # fmt: skip


@final
class Recording:
    """Records any number of cursors while they work. Thread-safe.

    The operating system receives each change before the call that caused it returns, so a killed process loses none; a
    power cut may lose the last ones. If the recording cannot be written, the cursors continue to work: the recording
    ends there, `failure` has the reason, and `close` raises it.

    Args:
        directory: Created if missing; else the recording in it is read and continued.

    Raises:
        TraceError: The recording in it is damaged, or one of polls.
        UnsupportedVersionError: It has another version.
        OSError: It cannot be read or written.
    """

    def __init__(self, directory: Path) -> None:
        for path in segments(directory):
            check_segment(path)
        self._histories = histories(read_recording(directory)) if segments(directory) else {}
        self._recorder = Recorder(directory)
        self._started_ms: int | None = None  # When the first cursor was followed: earlier processes were dead by then.
        self.failure: OSError | None = None

    def follow(self, cursor: ManagedCursor, *, topic: str, subscription: str, now_ms: int) -> None:
        """Record a cursor's state after its opening, then its changes; a closed name may be followed again.

        Raises:
            ValueError: The cursor already has a listener, or the name of the subscription is empty.
        """
        if not subscription:
            raise ValueError("the name of a subscription must not be empty: the empty name is the topic itself")
        history = self._histories.pop((topic, subscription), SubscriptionHistory())
        with cursor.lock:
            if self._started_ms is None:
                self._started_ms = now_ms
            follower = _Follower(self, topic, subscription, max(now_ms, history.last_ts_ms))
            cursor.add_listener(follower)
            follower.begin(history, cursor.view.acked_runs(), self._started_ms)

    def published(
        self, topic: str, runs: Sequence[tuple[int, int, int]], *, now_ms: int, deliver_at_ms: int = -1
    ) -> None:
        """Record entries, (ledger id, first, last), that were appended to a topic's log.

        Args:
            topic: The topic.
            runs: The entries.
            now_ms: The current time; never falls from one call for a topic to the next.
            deliver_at_ms: When they are due, -1 for at once.
        """
        self.record(topic, "", [Event(now_ms, EventKind.PUBLISH, *run, deliver_at_ms) for run in runs])

    def record(self, topic: str, subscription: str, events: Sequence[Event]) -> None:
        """Record events of one subscription, or of the topic, as one frame."""
        if self.failure is None:
            try:
                self._recorder.record(topic, subscription, events)
            except OSError as error:
                self.failure = error
                _LOG.exception("the recording ends here: %s", self._recorder.path)

    def close(self) -> None:
        """End the recording; later changes of its cursors are ignored.

        Raises:
            OSError: It had ended before, because it could not be written.
        """
        self._recorder.close()
        if self.failure is not None:
            raise self.failure
        self.failure = OSError("the recording is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self._recorder.close()


@final
class _Follower(CursorListener):
    """Listens to one cursor; called with the cursor's lock held."""

    def __init__(self, recording: Recording, topic: str, subscription: str, now_ms: int) -> None:
        self._recording = recording
        self._topic = topic
        self._subscription = subscription
        # Callers pass their own times, and threads in any order, but a trace's time must not fall.
        self._last_ms = now_ms
        self._persist_count = 0
        self._consumers: dict[str, int] = {}

    def begin(self, history: SubscriptionHistory, found: Sequence[tuple[int, int, int]], started_ms: int) -> None:
        """Record the state found by the opening, after any earlier recording."""
        acked = EntrySet.of((ledger_id, first, last + 1) for ledger_id, first, last in found)
        if history.last_kind is None and not found:
            return
        events = []
        is_settled = history.last_kind in _SETTLED and not len(history.accepted - history.promised)
        if not is_settled and history.last_kind is not EventKind.CRASH:
            # Not after the opening, nor before the last event, whatever the clock says.
            events += [Event(min(self._last_ms, max(started_ms, history.last_ts_ms)), EventKind.CRASH)]
        unknown = [(*run, EventKind.RECOVER) for run in (acked - history.accepted).runs()]
        again = [(*run, EventKind.REDELIVER) for run in (history.accepted - acked).runs()]
        events += [] if unknown else [Event(self._last_ms, EventKind.RECOVER)]
        events += [Event(self._last_ms, kind, ledger, first, end - 1) for ledger, first, end, kind in unknown + again]
        self._recording.record(self._topic, self._subscription, events)

    def changed(self, change: Change, runs: Sequence[tuple[int, int, int]], *, now_ms: int) -> None:
        self._last_ms = ts_ms = max(now_ms, self._last_ms)
        kind = _KINDS[change]
        if change in _PERSISTS:
            self._persist_count += change is Change.PERSIST_BEGUN
            events = [Event(ts_ms, kind, number=self._persist_count)]
        else:
            events = [Event(ts_ms, kind, *run) for run in runs] or [Event(ts_ms, kind)]
        self._recording.record(self._topic, self._subscription, events)

    def delivered(self, consumer: str, runs: Sequence[tuple[int, int, int]], *, now_ms: int) -> None:
        self._last_ms = ts_ms = max(now_ms, self._last_ms)
        number = self._consumers.setdefault(consumer, len(self._consumers))
        events: list[Event] = []
        for ledger_id, first, last in runs:
            if events and (events[-1].ledger_id, events[-1].last_entry + 1) == (ledger_id, first):
                events[-1] = events[-1]._replace(last_entry=last)
            else:
                events.append(Event(ts_ms, EventKind.DELIVER, ledger_id, first, last, number))
        self._recording.record(self._topic, self._subscription, events)
