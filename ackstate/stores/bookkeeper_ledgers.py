"""The ledgers of a `BookKeeperStore`: a node with the segments of each, and its entries in BookKeeper.

An append needs ZooKeeper only if it begins a segment or has entries for several ledgers. After a failed append this
process recovers the segment as another one would, and so finds out whether the append has happened.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar, final

from ackstate.errors import AckStateError
from ackstate.stores import zookeeper
from ackstate.stores.base import LedgerFencedError, LedgerNotFoundError, PayloadTooLargeError, StoreError, check_owner
from ackstate.stores.bookkeeper_appends import append_all
from ackstate.stores.bookkeeper_entries import ENTRY_ROOM_BYTES, encode_batch
from ackstate.stores.bookkeeper_groups import GroupWriter, decide
from ackstate.stores.bookkeeper_nodes import SegmentedLedger, decode_ledger, encode_ledger
from ackstate.stores.bookkeeper_segments import SegmentWriter
from ackstate.stores.busy_ledgers import BusyLedgers
from ackstate.stores.zookeeper import LedgerIndex, LedgerStatus, garbage_path
from ackstate.stores.zookeeper_session import LostRaceError, ZooKeeperSession, create, delete, set_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ackstate.stores.bookkeeper_client import BookKeeperClient
    from ackstate.stores.bookkeeper_entries import Group
    from ackstate.stores.bookkeeper_segments import Head, Segments

_Result = TypeVar("_Result")

# How often an append is repeated because another process has taken its ledger over; each time costs a segment.
_TAKEOVERS_MAX = 20
# BookKeeper's ledger was fenced by another process, and perhaps deleted, because it had no entries.
_TAKEN_OVER = (LedgerFencedError, LedgerNotFoundError)


@final
class BookKeeperLedgers:
    """The logs of one store."""

    def __init__(self, session: ZooKeeperSession, client: BookKeeperClient, segments: Segments) -> None:
        self._session, self._client, self._segments = session, client, segments
        self._index = LedgerIndex(session)
        self._groups = GroupWriter(session)
        self._busy = BusyLedgers()
        self._writers: dict[int, SegmentWriter] = {}
        # Ledgers whose last append may have happened; nothing is read before their segment is sealed.
        self._unsettled: set[int] = set()

    def finish_deletions(self) -> None:
        """Finish interrupted deletions, as far as BookKeeper answers."""
        for ledger_id in self._index.garbage():
            with suppress(StoreError):
                self._clear(ledger_id)

    def create(self, owner: str) -> int:
        return self.create_all([owner])[0]

    def create_all(self, owners: Sequence[str]) -> list[int]:
        """Create a ledger for each owner in one transaction, and return their ids in order.

        Raises:
            PayloadTooLargeError: The nodes do not fit into one request.
        """
        for owner in owners:
            check_owner(owner)
        return self._session.settle(lambda: self._try_create(owners))

    def append(self, ledger_id: int, entry: bytes) -> int:
        """See `LedgerStore.append`; errors as for `append_all`."""
        return self.append_all([(ledger_id, entry)])[0]

    def append_all(self, entries: Sequence[tuple[int, bytes]]) -> list[int]:
        """See `LedgerStore.append_all`.

        Raises:
            PayloadTooLargeError: An entry exceeds BookKeeper's limit, 5 MiB by default; nothing was sent.
        """
        # Through a memoryview, because bytes(5) is five zeros.
        batch = [(ledger_id, bytes(memoryview(entry))) for ledger_id, entry in entries]
        self._session.check_writable()
        self._client.check_usable()
        payloads: dict[int, list[bytes]] = {}
        for ledger_id, entry in batch:
            self._check_size(entry)
            payloads.setdefault(ledger_id, []).append(entry)
        if not batch:
            return []
        with self._busy.holding(payloads.keys()):
            ends = self._append(payloads)
        entry_ids = []
        for ledger_id, _ in batch:
            entry_ids.append(ends[ledger_id])
            ends[ledger_id] += 1
        return entry_ids

    def read(self, ledger_id: int, first: int, end: int) -> list[bytes]:
        if not 0 <= first <= end:
            raise ValueError(f"first and end must be 0 <= first <= end, got {first} and {end}")
        return self._until_no_race(lambda: list(self._read(ledger_id, first, end)))

    def last(self, ledger_id: int) -> int:
        return self._until_no_race(lambda: sum(self._counts(ledger_id)[1])) - 1

    def delete(self, ledger_id: int) -> None:
        """See `LedgerStore.delete`.

        One transaction removes the ledger. The rest of an interrupted call is invisible to every caller, and done by
        the next opening of the store for writing.
        """
        self._session.check_writable()
        with self._busy.holding({ledger_id}):
            own = self._writers.get(ledger_id)
            # Before the deletion, of which it may remain unknown whether it has happened.
            self._drop(ledger_id)
            state = self._session.settle(lambda: self._take_away(ledger_id))
            if state is None:
                return
            unsealed = state.unsealed
            if unsealed is not None and (own is None or own.bookkeeper_id != unsealed.bookkeeper_id):
                # Otherwise another process could continue to append to it.
                self._segments.fence(unsealed)
            with suppress(StoreError):
                self._clear(ledger_id)

    def fence(self, ledger_id: int) -> int:
        self._session.check_writable()
        with self._busy.holding({ledger_id}):
            self._drop(ledger_id)
            self._session.settle(lambda: self._try_mark_fenced(ledger_id))
            sealed = self._session.settle(lambda: self._segments.seal(ledger_id))
            self._unsettled.discard(ledger_id)
        return sealed.state.sealed_count - 1

    def owned_by(self, owner: str) -> list[int]:
        return self._index.owned_by(owner)

    def owners(self) -> list[str]:
        return self._index.owners()

    def seal_all(self) -> None:
        """Seal the segments of this process, as far as the cluster answers, so that the next opening recovers none."""
        ledger_ids = set(self._writers)
        with self._busy.holding(ledger_ids), suppress(AckStateError, LostRaceError):
            writers = {ledger_id: self._writers.pop(ledger_id) for ledger_id in ledger_ids & self._writers.keys()}
            for reply in [self._client.close_ledger(writer.handle) for writer in writers.values()]:
                reply.wait()
            sealed = {ledger_id: writer.sealed() for ledger_id, writer in writers.items()}
            self._segments.put({ledger_id: writer.head.version for ledger_id, writer in writers.items()}, sealed)
            with self._groups.lock:
                # Segments of appends that started meanwhile may end with a group.
                if not self._unsettled and not self._writers:
                    self._groups.remove()

    def _check_size(self, entry: bytes) -> None:
        bytes_max = self._client.entry_bytes_max - ENTRY_ROOM_BYTES
        if len(entry) > bytes_max:
            raise PayloadTooLargeError(
                f"an entry must have at most {bytes_max} bytes (BookKeeper's nettyMaxFrameSizeBytes less the headers),"
                f" got {len(entry)}; nothing was sent"
            )

    def _try_create(self, owners: Sequence[str]) -> list[int]:
        ledger_ids, operations = self._index.additions(owners)
        states = {
            ledger_id: SegmentedLedger(LedgerStatus.OPEN, owner, ())
            for ledger_id, owner in zip(ledger_ids, owners, strict=True)
        }
        self._session.commit([
            *operations,
            *(create(zookeeper.ledger_path(each), encode_ledger(each, state)) for each, state in states.items()),
        ])  # fmt: skip
        return ledger_ids

    def _append(self, payloads: Mapping[int, list[bytes]]) -> dict[int, int]:
        """Append a batch to each ledger, and return the entry ids of the first entries."""
        for _ in range(_TAKEOVERS_MAX):
            writers = self._writers_of(list(payloads))
            firsts = {ledger_id: writer.next_entry_id for ledger_id, writer in writers.items()}
            attempt = self._append_alone if len(payloads) == 1 else self._append_group
            if attempt(writers, payloads):
                return firsts
        raise StoreError(f"other processes have taken over the ledgers {_TAKEOVERS_MAX} times; nothing was appended")

    def _writers_of(self, ledger_ids: Sequence[int]) -> dict[int, SegmentWriter]:
        """Return the open segments of ledgers, new ones where this process has none.

        Raises:
            LedgerNotFoundError, LedgerFencedError: One of the ledgers takes no appends; nothing was changed.
        """
        missing = [ledger_id for ledger_id in ledger_ids if ledger_id not in self._writers]
        if missing:
            self._session.settle(lambda: self._begin_segments(missing))
        return {ledger_id: self._writers[ledger_id] for ledger_id in ledger_ids}

    def _begin_segments(self, ledger_ids: Sequence[int]) -> None:
        heads = dict(zip(ledger_ids, self._segments.heads(ledger_ids), strict=True))
        for ledger_id, head in heads.items():
            if head.state.status is LedgerStatus.FENCED:
                raise LedgerFencedError(f"ledger {ledger_id} was fenced")
        for ledger_id, head in heads.items():
            if head.state.unsealed is not None and not self._segments.is_uncreated(ledger_id, head):
                heads[ledger_id] = self._segments.seal(ledger_id)
            self._unsettled.discard(ledger_id)
        for ledger_id, new in self._segments.create(heads).items():
            self._writers[ledger_id] = SegmentWriter(new.head, new.opened.handle)

    def _append_alone(self, writers: Mapping[int, SegmentWriter], payloads: Mapping[int, list[bytes]]) -> bool:
        """Append a batch to one ledger; False if another process has taken the ledger over before it happened."""
        ((ledger_id, writer),) = writers.items()
        entries = encode_batch(payloads[ledger_id], None)
        error = self._send(writers, {ledger_id: entries})
        if error is None:
            return True
        try:
            sealed = self._session.settle(lambda: self._segments.seal(ledger_id))
        except LedgerNotFoundError:
            raise
        except StoreError:
            raise error from None
        self._unsettled.discard(ledger_id)
        # A segment without entries may have been removed.
        counts = {segment.bookkeeper_id: segment.entry_count for segment in sealed.state.segments}
        if counts.get(writer.bookkeeper_id, 0) >= writer.entry_count + len(entries):
            return True
        if isinstance(error, _TAKEN_OVER):
            return False
        raise error

    def _append_group(self, writers: Mapping[int, SegmentWriter], payloads: Mapping[int, list[bytes]]) -> bool:
        """Append a batch to each ledger, all or nothing; False if another process has prevented it."""
        with self._groups.lock:
            group = self._groups.begin()
            batches = {ledger_id: encode_batch(entries, group) for ledger_id, entries in payloads.items()}
            try:
                error = self._send(writers, batches, group)
            except BaseException:
                self._groups.abandon()
                raise
            if error is None:
                return True
            self._groups.abandon()
            # From now on the group cannot count, even if a recovery reads some of its batches.
            if decide(self._session, group):
                raise StoreError("a group was committed by another process") from error
        if isinstance(error, (*_TAKEN_OVER, _WriterClosedError)):
            return False
        raise error

    def _send(
        self, writers: Mapping[int, SegmentWriter], batches: Mapping[int, list[bytes]], group: Group | None = None
    ) -> StoreError | None:
        """Append batches and commit their group; return the error after which they may be lost, None if they count.

        Unless they do, their ledgers are unsettled.
        """
        try:
            entries = [(writers[ledger_id].handle, entry) for ledger_id, batch in batches.items() for entry in batch]
            error = self._first_error(entries)
            if error is None and group is not None and not self._groups.commit(group):
                error = _WriterClosedError("another process has closed the writer of the group")
        except BaseException:
            self._unsettle(batches)
            raise
        if error is not None:
            self._unsettle(batches)
            return error
        for ledger_id, batch in batches.items():
            writers[ledger_id].entry_count += len(batch)
        return None

    def _first_error(self, entries: Sequence[tuple[int, bytes]]) -> StoreError | None:
        """Append entries, and return the first error."""
        outcomes = append_all(self._client, entries)
        return next((outcome for outcome in outcomes if isinstance(outcome, StoreError)), None)

    def _unsettle(self, ledger_ids: Mapping[int, object]) -> None:
        for ledger_id in ledger_ids:
            self._unsettled.add(ledger_id)
            self._drop(ledger_id)

    def _drop(self, ledger_id: int) -> None:
        """Append no more to this process's segment of a ledger, if there is one."""
        writer = self._writers.pop(ledger_id, None)
        if writer is not None:
            with suppress(StoreError):
                self._client.forget_ledger(writer.handle)

    def _counts(self, ledger_id: int) -> tuple[Head, list[int]]:
        """Return a ledger's state, and how many entries count of each segment."""
        if ledger_id in self._unsettled:
            self._settle(ledger_id)
        writer = self._writers.get(ledger_id)
        (head,) = self._segments.heads([ledger_id])
        counts = [segment.entry_count for segment in head.state.segments]
        unsealed = head.state.unsealed
        if unsealed is not None:
            is_own = writer is not None and writer.bookkeeper_id == unsealed.bookkeeper_id
            counts[-1] = writer.entry_count if is_own and writer else self._segments.open_count(ledger_id, head)
        return head, counts

    def _settle(self, ledger_id: int) -> None:
        """Find out whether the last append of this process to a ledger has happened."""
        with self._busy.holding({ledger_id}):
            if ledger_id in self._unsettled:
                self._session.settle(lambda: self._segments.seal(ledger_id))
                self._unsettled.discard(ledger_id)

    def _read(self, ledger_id: int, first: int, end: int) -> Iterator[bytes]:
        head, counts = self._counts(ledger_id)
        if first == end:
            return
        if end > sum(counts):
            raise LedgerNotFoundError(f"ledger {ledger_id} ends before entry {end - 1}")
        begin = 0
        for segment, count in zip(head.state.segments, counts, strict=True):
            low, high = max(first - begin, 0), min(end - begin, count)
            if low < high:
                yield from self._segments.read(ledger_id, segment, head, first=low, end=high)
            begin += count

    def _until_no_race(self, look: Callable[[], _Result]) -> _Result:
        """Return the result of a read; it is repeated if the ledger changes meanwhile."""
        for _ in range(_TAKEOVERS_MAX):
            with suppress(LostRaceError):
                return look()
        raise StoreError(f"the ledger has changed {_TAKEOVERS_MAX} times while it was read")

    def _try_mark_fenced(self, ledger_id: int) -> None:
        (head,) = self._segments.heads([ledger_id])
        if head.state.status is not LedgerStatus.FENCED:
            fenced = head.state._replace(status=LedgerStatus.FENCED)
            self._segments.put({ledger_id: head.version}, {ledger_id: fenced})

    def _take_away(self, ledger_id: int) -> SegmentedLedger | None:
        """Make a ledger invisible to every caller, and return its state; None if there is none."""
        try:
            (head,) = self._segments.heads([ledger_id])
        except LedgerNotFoundError:
            return None
        gone = encode_ledger(ledger_id, head.state._replace(status=LedgerStatus.DELETED))
        node = set_data(zookeeper.ledger_path(ledger_id), gone, head.version)
        self._session.commit([node, *self._index.removal(ledger_id, head.state.owner)])
        return head.state

    def _clear(self, ledger_id: int) -> None:
        """Remove an invisible ledger; another process may be removing it too."""
        self._session.settle(lambda: self._try_clear(ledger_id))

    def _try_clear(self, ledger_id: int) -> None:
        path = zookeeper.ledger_path(ledger_id)
        (found,) = self._session.read(path)
        if found is not None:
            self._segments.delete(decode_ledger(ledger_id, found.data).segments)
            self._session.commit([delete(path), delete(garbage_path(ledger_id))])


class _WriterClosedError(StoreError):
    """A recovery by another process has closed the writer, so the group does not count."""
