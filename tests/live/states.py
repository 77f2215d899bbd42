"""States of cursors, as different as Pulsar's format allows: each is one subscription of one of three topics."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import NamedTuple

from ackstate import CursorConfig, Format
from ackstate.wire.pulsar import Compression, RangeForm


class OneState(NamedTuple):
    """How one cursor is written.

    Attributes:
        topic: ``single`` (one ledger), ``many`` (ledgers of 50 entries) or ``batched`` (entries of 10 messages).
        name: The subscription.
        acks: A function of the cursor and the entries of the topic.
        place: ``record`` (a closed cursor, state in the metadata store), ``ledger`` (a sealed cursor ledger) or
            ``unclosed`` (one that its writer left open).
        settings: Of the cursor.
    """

    topic: str
    name: str
    acks: object
    place: str
    settings: dict

    def config(self):
        """Return the cursor's settings."""
        return CursorConfig(format=Format.PULSAR, flush_interval_ms=10**9, **self.settings)


def alternate(cursor, entries, rng):
    cursor.ack_many(entries[1::2], now_ms=1)


def every_third(cursor, entries, rng):
    cursor.ack_many(entries[::3], now_ms=1)


def half(cursor, entries, rng):
    cursor.ack_many(sorted(rng.sample(entries, len(entries) // 2)), now_ms=1)


def most(cursor, entries, rng):
    cursor.ack_many(sorted(rng.sample(entries, len(entries) * 97 // 100)), now_ms=1)


def few(cursor, entries, rng):
    cursor.ack_many(sorted(rng.sample(entries, 5)), now_ms=1)


def nothing(cursor, entries, rng):
    pass


def everything(cursor, entries, rng):
    cursor.mark_delete(entries[-1], now_ms=1)


def middle(cursor, entries, rng):
    cursor.mark_delete(entries[len(entries) // 3], now_ms=1)
    cursor.ack_many(entries[len(entries) // 2 :: 5], now_ms=1)


def ledger_end(cursor, entries, rng):
    ends = [lower for lower, upper in pairwise(entries) if lower.ledger_id != upper.ledger_id]
    cursor.mark_delete(ends[len(ends) // 2] if ends else entries[9], now_ms=1)
    cursor.ack_many(entries[-5:-1], now_ms=1)


def whole_ledgers(cursor, entries, rng):
    ledgers = sorted({entry.ledger_id for entry in entries})
    cursor.ack_many([entry for entry in entries if ledgers.index(entry.ledger_id) % 2], now_ms=1)
    cursor.ack_many(entries[3:6], now_ms=1)


def below_a_word(cursor, entries, rng):
    cursor.ack_many(entries[1:40:2], now_ms=1)


def with_properties(cursor, entries, rng):
    cursor.mark_delete(entries[4], properties={"a": -1, "näme": 2**62}, now_ms=1)
    cursor.ack_many(entries[9:200:2], now_ms=1)
    cursor.set_cursor_properties({"owner": "ackstate", "ключ": "wert"})


def batches(cursor, entries, rng):
    for number, entry in enumerate(entries):
        if number % 4 == 1:
            cursor.ack(entry, now_ms=1)
        elif number % 4 == 2:
            cursor.ack_batch(entry, [0b01_0101_0101], now_ms=1)


def random_batches(cursor, entries, rng):
    for entry in rng.sample(entries, len(entries) // 2):
        cursor.ack_batch(entry, [rng.randrange(1, 2**10)], now_ms=1)


_PLAIN = (alternate, every_third, half, most, few, nothing, everything, middle, ledger_end, whole_ledgers, below_a_word)
_LIST = {"range_form": RangeForm.LIST}
_PLACES = (
    ("record", {}), ("ledger", {}), ("unclosed", {}), ("ledger-list", _LIST), ("unclosed-list", _LIST),
)  # fmt: skip


def all_states():
    """Return the states to write: each pattern of acks in each place, codecs, properties, batches and limits."""
    found = [
        OneState(topic, f"{acks.__name__}-{place}", acks, place.removesuffix("-list"), settings)
        for topic in ("single", "many")
        for acks in _PLAIN
        for place, settings in _PLACES
    ]
    for codec in Compression:
        small = {"compression": codec, "compression_bytes_min": 100}
        found += [
            OneState("many", f"{codec.name.lower()}-{acks.__name__}", acks, "record", small)
            for acks in (alternate, half)
        ]
        found.append(OneState("single", f"{codec.name.lower()}-900", alternate, "record", small))
    for topic in ("single", "many"):
        found += [OneState(topic, f"properties-{place}", with_properties, place.removesuffix("-list"), settings)
                  for place, settings in _PLACES]  # fmt: skip
        limits = {"range_count_max": 40}
        found += [OneState(topic, f"limit-{place}", half, place.removesuffix("-list"), settings | limits)
                  for place, settings in _PLACES]  # fmt: skip
    found += [
        OneState("batched", f"{acks.__name__}-{place}", acks, place.removesuffix("-list"), settings)
        for acks in (batches, random_batches, alternate)
        for place, settings in _PLACES
    ]
    limits = {"batch_count_max": 3}
    found += [
        OneState("batched", f"batch-limit-{place}", random_batches, place.removesuffix("-list"), settings | limits)
        for place, settings in _PLACES
    ]
    # Names that Pulsar encodes.
    found += [OneState("many", name, few, "unclosed", {}) for name in ("with space", "a/b", "ü~*%25", "plus+")]
    return found


def seeded(state):
    """Return a generator of random numbers for one state."""
    return random.Random(f"{state.topic} {state.name}")
