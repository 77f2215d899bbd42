"""Bounds the number of acked entries that are redelivered if a broker dies now, from its own answers.

The acks in a broker's memory are known exactly. Which of them are durable is in the cursor ledger, which the admin
interface does not show. So the answer is an interval, and each end has its reason. Four facts narrow it:

- the limit on ranges, for any write at any time: no record has more than it allows;
- the size of the record that the cursor laid out last: acks that take more bytes were not in it;
- an earlier look: if the cursor ledger has grown by more writes than can have been in progress then, the acks of then
  are durable; if it has not grown at all, acks since then are not;
- an earlier look with the same acks, before the last flush: everything was written.

A broker that embeds this library reports the number itself, and then the interval is that number.

The unit is entries, which are messages if there are no batches; a broker does not report partly acked batches. The
interval is valid as long as no client seeks: a seek un-acks entries that a record may still have. If a seek is detected
between two looks, the earlier look is not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ackstate.deleted_ranges import VARINT_BYTES, range_fixed_bytes, varint_bytes
from ackstate.entry_bitmap import runs_of
from ackstate.wire.pulsar import LimitRule, RangeForm, limit_ranges
from ackstate.wire.pulsar.ranges import words_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    from pyroaring import BitMap

    from ackstate.analysis.pulsar.broker_settings import BrokerSettings
    from ackstate.analysis.pulsar.cursor_look import CursorLook
    from ackstate.deleted_ranges import DeletedRanges

# Guava's limiter admits two writes at once after an idle second; a third one waits until they are long done.
_UNDER_WAY_MAX = 2
_FRAME_BYTES = 2  # tag and length of a range, which Pulsar's own figure omits
_WORD_BYTES = 10  # the longest varint


class Bound(NamedTuple):
    """A bound on the number of entries, and its reason."""

    entries: int
    why: str


class ComesBack(NamedTuple):
    """Acked entries that are redelivered: at least `low`, at most `high`, both inclusive."""

    low: Bound
    high: Bound


def comes_back(
    now: CursorLook, settings: BrokerSettings, *, earlier: CursorLook | None = None, later: CursorLook | None = None
) -> ComesBack:
    """Return bounds on the redelivered acked entries if the broker dies at the moment of a look.

    Complexity: O(bytes of the acked ranges in either form).
    """
    if now.reported is not None:
        counted = Bound(now.reported.entries, "the broker counts the acks that are not durable")
        return ComesBack(counted, counted)
    past = _Past(earlier, now, later) if earlier is not None and not _moved_back(earlier, now) else None
    if past and past.is_all_written(settings):
        cut = cut_now(now, settings)
        why = f"nothing was acked for {settings.quiet_seconds:.0f} s, so all of it is written"
        return ComesBack(Bound(cut, f"{why} except the acks beyond the limit" if cut else why), Bound(cut, why))
    low = max(_lows(now, settings, past), key=lambda bound: bound.entries)
    high = min(_highs(now, settings, past), key=lambda bound: bound.entries)
    if low.entries > high.entries:
        return ComesBack(Bound(0, "the looks contradict each other: was there a seek?"), _everything(now))
    return ComesBack(low, high)


def cut_now(look: CursorLook, settings: BrokerSettings) -> int:
    """Return the number of acked entries that a record written now would exclude."""
    return limit_ranges(look.deleted, form=settings.form, limits=settings.limits).excluded_count


def cut_on_close(look: CursorLook, settings: BrokerSettings) -> int:
    """Return the number of acked entries that are redelivered after a graceful close, as after an unload.

    Few ranges go to the metadata record, which is a list; more go to the cursor ledger. With 4.2.4, partly acked
    batches are redelivered in the first case: it writes them but does not read them.
    """
    is_in_record = look.deleted.range_count <= settings.metadata_range_count_max
    form = RangeForm.LIST if is_in_record else settings.form
    return limit_ranges(look.deleted, form=form, limits=settings.limits).excluded_count


def _lows(now: CursorLook, settings: BrokerSettings, past: _Past | None) -> Iterator[Bound]:
    acked = len(now.deleted)
    yield Bound(0, "all of it may have been written a moment ago")
    if not now.has_written:
        return
    name = "managedLedgerMaxUnackedRangesToPersist"
    yield Bound(acked - most_within_limit(now.deleted, settings), f"{name} {settings.range_count_max:,} cuts off more")
    if now.laid_out_bytes is not None and now.below_count + acked <= settings.range_count_max:
        most = most_within_bytes(now.deleted, now.laid_out_bytes, form=settings.form)
        yield Bound(acked - most, f"the last record held ranges of {now.laid_out_bytes:,} bytes, and no more fit in")
    if past and past.was_not_written:
        covered = most_within_limit(past.earlier.deleted, settings)
        lost_before = len(past.earlier.deleted) - covered
        yield Bound(past.newly_acked + lost_before, "the cursor ledger has not grown since the earlier look")


def _highs(now: CursorLook, settings: BrokerSettings, past: _Past | None) -> Iterator[Bound]:
    yield _everything(now)
    if past is None or not past.was_written:
        return
    grown = now.last_entry - past.earlier.last_entry
    advanced = now.advanced_since(past.earlier)
    if advanced + len(now.deleted) <= settings.range_count_max:
        yield Bound(past.newly_acked, f"acked since the earlier look; {grown:,} records were written since")
    # A limit may have excluded any of the ranges, but never the mark-delete.
    yield Bound(advanced + len(now.deleted), f"the mark-delete of the earlier look is durable: {grown:,} records since")


def _everything(now: CursorLook) -> Bound:
    below = now.below_count
    if not below:
        return Bound(len(now.deleted), "every entry acked above the mark-delete: none may have been written")
    why = f"every entry acked above the mark-delete, and {below:,} up to it that are still in the topic's ledgers"
    return Bound(len(now.deleted) + below, f"{why}: a second look (--again) narrows it")


@dataclass(frozen=True, slots=True)
class _Past:
    """The facts that an earlier look adds to a look, without a seek between them."""

    earlier: CursorLook
    now: CursorLook
    later: CursorLook | None

    @property
    def is_same_ledger(self) -> bool:
        looks = [self.earlier, self.now, *([self.later] if self.later else [])]
        return all(look.has_written for look in looks) and len({look.cursor_ledger for look in looks}) == 1

    @property
    def was_written(self) -> bool:
        """Whether a record that was started after the earlier look is durable."""
        return self.is_same_ledger and self.now.last_entry - self.earlier.last_entry > _UNDER_WAY_MAX

    @property
    def was_not_written(self) -> bool:
        """Whether no record that was started after the earlier look is or becomes durable."""
        return (
            self.later is not None
            and self.is_same_ledger
            and self.earlier.last_entry == self.now.last_entry == self.later.last_entry
        )

    @property
    def newly_acked(self) -> int:
        """Entries that became acked after the earlier look."""
        before = self.earlier.deleted.copy()
        passed = before.take_at_most(self.now.mark_delete)
        gone = sum(len(bitmap) for ledger_id, bitmap in passed.bitmaps() if ledger_id not in self.now.counts)
        in_between = self.now.advanced_since(self.earlier) - (len(passed) - gone)
        return in_between + len(self.now.deleted) - len(before)

    def is_all_written(self, settings: BrokerSettings) -> bool:
        """Whether the last ack is so old that a flush has written everything.

        The first entry of a cursor ledger, written when the ledger is created, may lack the ranges.
        """
        return (
            self.is_same_ledger
            and (self.now.last_entry > 0 or not self.now.deleted)
            and self.now.asked_ms - self.earlier.answered_ms >= 1_000 * settings.quiet_seconds
            and self.now.mark_delete == self.earlier.mark_delete
            and self.now.deleted == self.earlier.deleted
        )


def _moved_back(earlier: CursorLook, now: CursorLook) -> bool:
    """Return whether any entry was un-acked between two looks."""
    if now.mark_delete < earlier.mark_delete:
        return True
    rest = earlier.deleted.copy()
    rest.remove_at_most(now.mark_delete)
    return any(not bitmap <= now.deleted.entries(ledger_id) for ledger_id, bitmap in rest.bitmaps())


# --- The most that a record can contain. It was laid out at some earlier moment, when fewer entries were acked: any
# part of the present acks, in any order.


def most_within_limit(deleted: DeletedRanges, settings: BrokerSettings) -> int:
    """Return the most acked entries that a record can contain within the limit on ranges."""
    if settings.form is RangeForm.LIST:
        return _longest_runs(deleted, settings.ranges_kept_max)
    sizes = np.array([len(bitmap) for _, bitmap in deleted.bitmaps()], np.int64)
    limit = settings.range_count_max
    if settings.rule is LimitRule.PULSAR_5_0:
        # If not even the first ledger is within the limit, the record is a list.
        return max(min(limit, int(sizes.sum())), _longest_runs(deleted, settings.ranges_kept_max))
    # The ledger that crosses the limit is kept whole.
    before = np.minimum(np.cumsum(sizes) - sizes, limit)
    return int((before + sizes).max(initial=0))


def _longest_runs(deleted: DeletedRanges, count: int) -> int:
    lengths = [last.astype(np.int64) - first + 1 for first, last in map(runs_of, _bitmaps(deleted))]
    longest = np.sort(np.concatenate([np.empty(0, np.int64), *lengths]))[::-1]
    return int(longest[:count].sum())


def most_within_bytes(deleted: DeletedRanges, size_bytes: int, *, form: RangeForm) -> int:
    """Return the most acked entries that ranges of `size_bytes` can contain, as Pulsar counts the bytes.

    It is a relaxation: a piece may be used in part, at the price of its cheapest part. So the result is never too low.
    """
    if not deleted:
        return 0
    if form is RangeForm.WORDS:
        values, costs, budget = _of_words(deleted, size_bytes)
    else:
        values, costs = _of_list(deleted)
        budget = size_bytes
    if budget <= 0 or not len(values):
        return 0
    order = np.argsort(-values / costs)
    values, costs = values[order].astype(float), costs[order]
    shares = np.clip((budget - (np.cumsum(costs) - costs)) / costs, 0.0, 1.0)
    return int((values * shares).sum() + 1e-6)


def _of_list(deleted: DeletedRanges) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the entries of each range, and the fewest bytes that any part of it takes."""
    values: list[npt.NDArray[np.float64]] = [np.empty(0)]
    costs: list[npt.NDArray[np.float64]] = [np.empty(0)]
    by_digits = np.array(VARINT_BYTES)
    for ledger_id, bitmap in deleted.bitmaps():
        first, last = runs_of(bitmap)
        values.append((last - first + 1).astype(float))
        digits = np.ceil(np.log2(np.maximum(first.astype(float), 1) + 1)).astype(np.int64)
        # A part may start behind entry 0, whose lower end of -1 takes ten bytes. One byte less is safe at a power of
        # 128.
        least = 2 * np.maximum(by_digits[np.maximum(digits - 1, 0)], 1)
        costs.append((range_fixed_bytes(ledger_id) - _FRAME_BYTES + least).astype(float))
    return np.concatenate(values), np.concatenate(costs)


def _of_words(deleted: DeletedRanges, size_bytes: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], int]:
    """Return the entries of each word, the bytes that they take at its best rate, and the available bytes."""
    words = {ledger_id: np.array(words_of(bitmap), np.int64) for ledger_id, bitmap in deleted.bitmaps()}
    key_bytes = min(1 + varint_bytes(ledger_id) for ledger_id in words)
    # A ledger of one word is written with a second one, of two bytes.
    has_second_word = all(len(each) == 2 and not each[1] for each in words.values())
    budget = size_bytes - key_bytes - (2 if has_second_word else 0)
    longest = min(_WORD_BYTES, budget - 1)
    if longest < 1:
        return np.empty(0), np.empty(0), budget
    bits = np.unpackbits(np.concatenate(list(words.values())).view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    lengths = np.arange(1, longest + 1)
    held = np.stack([bits[:, : min(7 * length, 64)].sum(axis=1) for length in lengths.tolist()], axis=1)
    rates = (held / (1 + lengths)).max(axis=1)
    values = held[:, -1].astype(float)
    some = values > 0
    return values[some], values[some] / rates[some], budget


def _bitmaps(deleted: DeletedRanges) -> Iterator[BitMap]:
    return (bitmap for _, bitmap in deleted.bitmaps())
