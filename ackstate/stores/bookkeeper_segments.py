"""The segments of a `BookKeeperStore`'s ledgers: creates, recovers and reads them.

Recovery fences the segment's writer in BookKeeper and yields every entry that was ever confirmed to it, and perhaps
some that were not. The entries of an append that did not end are cut off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.errors import CorruptStateError
from ackstate.stores import zookeeper
from ackstate.stores.base import LedgerNotFoundError, StoreError
from ackstate.stores.bookkeeper_entries import EntryKind, decode_entry
from ackstate.stores.bookkeeper_errors import LEDGER_EXISTS, BookKeeperError
from ackstate.stores.bookkeeper_groups import WriterMissingError, decide, is_committed
from ackstate.stores.bookkeeper_nodes import (
    Segment,
    SegmentedLedger,
    SegmentStatus,
    decode_ledger,
    encode_ledger,
)
from ackstate.stores.bookkeeper_reads import last_readable, read_entries
from ackstate.stores.zookeeper import LedgerStatus
from ackstate.stores.zookeeper_session import LostRaceError, ZooKeeperSession, set_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ackstate.stores.bookkeeper_client import BookKeeperClient
    from ackstate.stores.bookkeeper_entries import Group
    from ackstate.stores.bookkeeper_ledger import OpenLedger, Replication


class Head(NamedTuple):
    """A ledger's state and the version of its node."""

    state: SegmentedLedger
    version: int


@final
class SegmentWriter:
    """The segment of a ledger that this process appends to.

    Attributes:
        head: The ledger's state when the segment began.
        handle: The client's handle of the segment.
        entry_count: How many entries of the segment count.
    """

    __slots__ = ("entry_count", "handle", "head")

    def __init__(self, head: Head, handle: int) -> None:
        self.head = head
        self.handle = handle
        self.entry_count = 0

    @property
    def bookkeeper_id(self) -> int:
        """The id of the segment in BookKeeper."""
        return self.head.state.segments[-1].bookkeeper_id

    @property
    def next_entry_id(self) -> int:
        """The id of the next entry, in the ledger of the store."""
        return self.head.state.sealed_count + self.entry_count

    def sealed(self) -> SegmentedLedger:
        """Return the state of the ledger after the end of the segment."""
        state = self.head.state
        return state.with_last(state.segments[-1]._replace(entry_count=self.entry_count, status=SegmentStatus.SEALED))


class NewSegment(NamedTuple):
    """A segment that this process has just created and may append to."""

    head: Head
    opened: OpenLedger


@final
class Segments:
    """Segments of the ledgers of one store; holds no state of them but ids that wait to be used.

    Args:
        session: The session with ZooKeeper.
        client: The client of BookKeeper.
        replication: Replication of new segments, and the password and checksum of all.
        custom_metadata: Stored in BookKeeper with each new segment.
    """

    def __init__(
        self,
        session: ZooKeeperSession,
        client: BookKeeperClient,
        replication: Replication,
        custom_metadata: Mapping[str, bytes],
    ) -> None:
        self._session, self._client, self._replication = session, client, replication
        self._custom_metadata = custom_metadata
        # Registered for a ledger by this process, and not created because of a failure.
        self._uncreated: dict[int, int] = {}

    def heads(self, ledger_ids: Sequence[int]) -> list[Head]:
        """Return the present states of ledgers.

        Raises:
            LedgerNotFoundError: One of them does not exist.
        """
        paths = [zookeeper.ledger_path(ledger_id) for ledger_id in ledger_ids]
        heads = []
        for ledger_id, found in zip(ledger_ids, self._session.read(*paths), strict=True):
            state = found and decode_ledger(ledger_id, found.data)
            if found is None or state is None or state.status is LedgerStatus.DELETED:
                raise LedgerNotFoundError(f"there is no ledger {ledger_id}")
            heads.append(Head(state, found.version))
        return heads

    def create(self, heads: Mapping[int, Head]) -> dict[int, NewSegment]:
        """Begin a new segment of each ledger, all of whose segments are sealed, or registered by this process.

        Each segment is registered before it is created in BookKeeper, so no crash leaves an unknown one there.

        Raises:
            LostRaceError: Another process has changed one of the ledgers.
            StoreError: BookKeeper or ZooKeeper refused.
        """
        registered = self._register(heads)
        replies = {
            ledger_id: self._client.create(
                self._replication,
                ledger_id=_last(head).bookkeeper_id,
                custom_metadata={**self._custom_metadata, "ackstate/ledger": str(ledger_id).encode()},
            )
            for ledger_id, head in registered.items()
        }
        opened: dict[int, OpenLedger] = {}
        failure: StoreError | None = None
        for ledger_id, reply in replies.items():
            try:
                opened[ledger_id] = reply.wait()
            except BookKeeperError as error:
                failure = error
                if error.code != LEDGER_EXISTS:
                    self._uncreated[ledger_id] = _last(registered[ledger_id]).bookkeeper_id
        try:
            if failure is not None:
                raise failure
            now_open = {
                ledger_id: head.state.with_last(_last(head)._replace(status=SegmentStatus.OPEN))
                for ledger_id, head in registered.items()
            }
            changed = self.put({ledger_id: head.version for ledger_id, head in registered.items()}, now_open)
        except BaseException as error:
            for ledger in opened.values():
                self._client.close_ledger(ledger.handle)
                if isinstance(error, LostRaceError):
                    # Sealed by another process as one without entries, and perhaps forgotten.
                    self._client.delete(ledger.ledger_id)
            raise
        return {ledger_id: NewSegment(changed[ledger_id], opened[ledger_id]) for ledger_id in heads}

    def put(self, versions: Mapping[int, int], states: Mapping[int, SegmentedLedger]) -> dict[int, Head]:
        """Replace the states of ledgers that are at these versions; all or nothing if they fit into one request.

        Raises:
            LostRaceError: Another process has changed one of the ledgers.
            StoreError: It is unknown whether they were replaced.
        """
        operations = (
            set_data(zookeeper.ledger_path(ledger_id), encode_ledger(ledger_id, state), versions[ledger_id])
            for ledger_id, state in states.items()
        )
        self._session.check_writable()
        changed = [result for pack in self._session.packs(operations) for result in self._session.commit(pack)]
        return {
            ledger_id: Head(state, result.version)
            for (ledger_id, state), result in zip(states.items(), changed, strict=True)
        }

    def is_uncreated(self, ledger_id: int, head: Head) -> bool:
        """Return whether the last segment was registered by this process and can still be created."""
        return bool(head.state.segments) and self._uncreated.get(ledger_id) == _last(head).bookkeeper_id

    def seal(self, ledger_id: int) -> Head:
        """Seal the last segment of a ledger, if it is not, and return the new state.

        Raises:
            LostRaceError: Another process has changed the ledger.
            LedgerNotFoundError: There is no such ledger.
            CorruptStateError: A segment is missing or damaged.
        """
        (head,) = self.heads([ledger_id])
        segment = head.state.unsealed
        if segment is None:
            return head
        count = self._recovered_count(ledger_id, segment, head) if segment.status is SegmentStatus.OPEN else 0
        sealed = head.state.with_last(Segment(segment.bookkeeper_id, count, SegmentStatus.SEALED))
        return self.put({ledger_id: head.version}, {ledger_id: sealed})[ledger_id]

    def fence(self, segment: Segment) -> None:
        """Refuse all appends to a segment of a ledger that is being deleted."""
        try:
            opened = self._client.open_and_fence(segment.bookkeeper_id, self._replication).wait()
        except LedgerNotFoundError:
            return
        self._client.close_ledger(opened.handle)

    def delete(self, segments: Sequence[Segment]) -> None:
        """Delete segments from BookKeeper; those that do not exist are no error."""
        for reply in [self._client.delete(segment.bookkeeper_id) for segment in segments]:
            try:
                reply.wait()
            except LedgerNotFoundError:
                continue

    def open_count(self, ledger_id: int, head: Head) -> int:
        """Return how many entries of the last segment count now, as long as another process may append to it.

        These are at least all that were confirmed to the other process.
        """
        segment = _last(head)
        if segment.status is SegmentStatus.CREATING:
            return 0
        opened = self._opened_to_read(ledger_id, segment, head)
        try:
            end = last_readable(self._client, opened.ledger_id, opened.handle) + 1
            return self._counting_end(ledger_id, opened, end, head, is_committed)
        except LedgerNotFoundError as error:
            raise self._missing(ledger_id, segment, head) from error
        finally:
            self._client.close_ledger(opened.handle)

    def read(self, ledger_id: int, segment: Segment, head: Head, *, first: int, end: int) -> Iterator[bytes]:
        """Yield the payloads of some entries of a segment, which all count."""
        opened = self._opened_to_read(ledger_id, segment, head)
        try:
            for entry_id, entry in enumerate(read_entries(self._client, opened.handle, first, end), first):
                yield decode_entry(entry, _entry_name(segment.bookkeeper_id, entry_id)).payload
        except LedgerNotFoundError as error:
            raise self._missing(ledger_id, segment, head) from error
        finally:
            self._client.close_ledger(opened.handle)

    def _register(self, heads: Mapping[int, Head]) -> dict[int, Head]:
        """Add a segment without entries to each ledger, unless there is one that this process has not created."""
        present = {ledger_id: head for ledger_id, head in heads.items() if self.is_uncreated(ledger_id, head)}
        missing = [ledger_id for ledger_id in heads if ledger_id not in present]
        replies = [self._client.new_ledger_id() for _ in missing]
        grown = {}
        for ledger_id, reply in zip(missing, replies, strict=True):
            state = self._without_empty(heads[ledger_id].state)
            segment = Segment(reply.wait(), 0, SegmentStatus.CREATING)
            grown[ledger_id] = state._replace(segments=(*state.segments, segment))
        added = self.put({ledger_id: heads[ledger_id].version for ledger_id in missing}, grown)
        for ledger_id in present:
            del self._uncreated[ledger_id]
        return {ledger_id: present.get(ledger_id) or added[ledger_id] for ledger_id in heads}

    def _without_empty(self, state: SegmentedLedger) -> SegmentedLedger:
        """Delete the segments without entries, which failed appends leave, and return the state without them."""
        empty = [segment for segment in state.segments if not segment.entry_count]
        try:
            self.delete(empty)
        except StoreError:
            return state
        return state._replace(segments=tuple(segment for segment in state.segments if segment.entry_count))

    def _recovered_count(self, ledger_id: int, segment: Segment, head: Head) -> int:
        """Fence the writer of a segment, and return how many of its entries count for ever."""
        try:
            opened = self._client.open_and_fence(segment.bookkeeper_id, self._replication).wait()
        except LedgerNotFoundError as error:
            raise self._missing(ledger_id, segment, head) from error
        try:
            return self._counting_end(ledger_id, opened, opened.last_confirmed + 1, head, decide)
        finally:
            self._client.close_ledger(opened.handle)

    def _counting_end(
        self,
        ledger_id: int,
        opened: OpenLedger,
        end: int,
        head: Head,
        committed: Callable[[ZooKeeperSession, Group], bool],
    ) -> int:
        """Return the end of the entries that count: a batch without its end does not, nor an uncommitted group."""
        if not end:
            return 0
        (data,) = self._client.read_unconfirmed(opened.handle, end - 1, end).wait()
        last = decode_entry(data, _entry_name(opened.ledger_id, end - 1))
        if last.group is not None:
            try:
                counts = committed(self._session, last.group)
            except WriterMissingError as error:
                found = f"no writer {last.group.writer_id:016x}"
                raise self._damaged(ledger_id, head, opened.ledger_id, found) from error
        else:
            counts = last.kind is EntryKind.END
        return end if counts else end - 1 - last.batch_index

    def _opened_to_read(self, ledger_id: int, segment: Segment, head: Head) -> OpenLedger:
        try:
            return self._client.open_to_read(segment.bookkeeper_id, self._replication).wait()
        except LedgerNotFoundError as error:
            raise self._missing(ledger_id, segment, head) from error

    def _missing(self, ledger_id: int, segment: Segment, head: Head) -> Exception:
        return self._damaged(ledger_id, head, segment.bookkeeper_id, "none, or not all of its entries")

    def _damaged(self, ledger_id: int, head: Head, bookkeeper_id: int, found: str) -> Exception:
        """Return the error for something missing, unless another process has changed the ledger meanwhile."""
        (present,) = self.heads([ledger_id])
        if present.version != head.version:
            return LostRaceError(name_taken=False)
        expected = f"ledger {bookkeeper_id} of BookKeeper"
        return CorruptStateError(f"ledger {ledger_id}", offset=0, expected=expected, found=found)


def _last(head: Head) -> Segment:
    return head.state.segments[-1]


def _entry_name(bookkeeper_id: int, entry_id: int) -> str:
    return f"entry {entry_id} of BookKeeper's ledger {bookkeeper_id}"
