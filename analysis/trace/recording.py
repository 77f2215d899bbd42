"""Record what cursors do, for whoever embeds them, in three lines.

    recording = Recording(directory)
    recording.follow(cursor, topic=topic, subscription=name, now_ms=now_ms)   # of a Subscription: its .cursor
    ...                                                                       # ack, persist, dispatch as ever
    recording.close()

``ackstate trace DIRECTORY TRACE`` makes a trace of it, whether the process ended or was killed. Who goes on with the
same directory after a restart follows each cursor anew before its first ack: the recovery is noted then, and before it
the crash.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Self, final

from ackstate.analysis.trace.entry_set import EntrySet, SubscriptionHistory, histories
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.recorder import Recorder, read_recording, segments
from ackstate.cursor import Change

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ackstate.cursor import ManagedCursor

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
    """What happens to any number of cursors, written while it happens; safe for any number of threads.

    Each change is with the operating system before the call that made it returns, so a killed process leaves all of
    them; a power cut may take the last ones. A recording that cannot be written does not keep a cursor from working: it
    ends there, `failure` says why, and so does `close`.

    Args:
        directory: Made if missing, else gone on with: what is in it is read.

    Raises:
        TraceError: What is in it is damaged.
        UnsupportedVersionError: A newer release wrote it.
        OSError: It cannot be read or written.
    """

    def __init__(self, directory: Path) -> None:
        self._histories = histories(read_recording(directory)) if segments(directory) else {}
        self._recorder = Recorder(directory)
        self.failure: OSError | None = None

    def follow(self, cursor: ManagedCursor, *, topic: str, subscription: str, now_ms: int) -> None:
        """Record a cursor from now on, after what its opening found; a name may be followed anew once it was closed.

        Raises:
            ValueError: Somebody listens to the cursor already, or the name of the subscription is empty.
        """
        if not subscription:
            raise ValueError("a subscription without a name cannot be recorded: the empty one is the topic itself")
        history = self._histories.pop((topic, subscription), SubscriptionHistory())
        with cursor.lock:
            follower = _Follower(self, topic, subscription, max(now_ms, history.last_ts_ms))
            cursor.listen(follower)
            follower.begin(history, cursor.acked_runs())

    def published(
        self, topic: str, runs: Sequence[tuple[int, int, int]], *, now_ms: int, deliver_at_ms: int = -1
    ) -> None:
        """Record entries, (ledger id, first, last), that were appended to a topic's log.

        Args:
            topic: The topic.
            runs: The entries.
            now_ms: The present; never falls from one call for a topic to the next.
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
        """End the recording; cursors that it followed tell it nothing more that is kept.

        Raises:
            OSError: It ended before, for it could not be written.
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
class _Follower:
    """Listens to one cursor; every call comes with the cursor's lock held."""

    def __init__(self, recording: Recording, topic: str, subscription: str, now_ms: int) -> None:
        self._recording = recording
        self._topic = topic
        self._subscription = subscription
        # Callers bring their own present, and threads bring theirs in any order: a trace's time never falls.
        self._last_ms = now_ms
        self._persist_count = 0
        self._consumers: dict[str, int] = {}

    def begin(self, history: SubscriptionHistory, found: Sequence[tuple[int, int, int]]) -> None:
        """Record what the opening found, after what was recorded before; a cursor that was never used begins so."""
        acked = EntrySet()
        for ledger_id, first, last in found:
            acked.add_run(ledger_id, first, last + 1)
        if history.last_kind is None and not found:
            return
        events = []
        if history.last_kind not in _SETTLED or len(history.accepted - history.promised):
            events += [Event(history.last_ts_ms, EventKind.CRASH)]
        unknown = [(*run, EventKind.RECOVER) for run in (acked - history.accepted).runs()]
        again = [(*run, EventKind.REDELIVER) for run in (history.accepted - acked).runs()]
        events += [] if unknown else [Event(self._last_ms, EventKind.RECOVER)]
        events += [Event(self._last_ms, kind, ledger, first, end - 1) for ledger, first, end, kind in unknown + again]
        self._recording.record(self._topic, self._subscription, events)

    def changed(self, change: Change, runs: Sequence[tuple[int, int, int]], *, now_ms: int) -> None:
        """See `CursorListener`."""
        self._last_ms = ts_ms = max(now_ms, self._last_ms)
        kind = _KINDS[change]
        if change in _PERSISTS:
            self._persist_count += change is Change.PERSIST_BEGUN
            events = [Event(ts_ms, kind, number=self._persist_count)]
        else:
            events = [Event(ts_ms, kind, *run) for run in runs] or [Event(ts_ms, kind)]
        self._recording.record(self._topic, self._subscription, events)

    def delivered(self, consumer: str, runs: Sequence[tuple[int, int, int]], *, now_ms: int) -> None:
        """See `CursorListener`."""
        self._last_ms = ts_ms = max(now_ms, self._last_ms)
        number = self._consumers.setdefault(consumer, len(self._consumers))
        events = [Event(ts_ms, EventKind.DELIVER, *run, number) for run in runs]
        self._recording.record(self._topic, self._subscription, events)
