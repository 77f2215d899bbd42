"""The settings of a schedule: drawn from its seed, or given by a story."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum

from ackstate.cursor.config import CursorConfig
from ackstate.cursor.formats import Format
from ackstate.dispatch import RetryPolicy, SubscriptionType
from ackstate.limits.rules import GateLimits
from ackstate.selection import Keep
from ackstate.stores.memory import FaultKind
from ackstate.wire.pulsar import LimitRule, RangeForm

CONSUMERS = ("a", "b", "c", "d")
TICK_MS = 10  # tick time of delayed messages
RETRY_MS = 1_000  # after a promotion failed
RETRIES = RetryPolicy(100, 300)


class Encoded(Enum):
    """The type of some written bytes."""

    ENTRY = "entry"
    RECORD = "record"


class Tracker(Enum):
    """The tracker of delayed messages."""

    VIEW = "view"
    IN_MEMORY = "in memory"
    BUCKETED = "bucketed"
    VIEW_OF_BUCKETS = "view of buckets"


@dataclass(frozen=True, slots=True)
class Settings:
    """One broker, its load and its faults; the defaults are the plainest."""

    # Initial limits of every gate
    limits: GateLimits = field(default_factory=lambda: GateLimits(max_unpersisted_ack_record_bytes=1_024))
    config: CursorConfig = field(default_factory=CursorConfig)  # Initial configuration of every cursor
    starts_high: bool = False  # Whether the log starts shortly before entry 16,384, the first id of three bytes
    first_ledger_id: int = 1  # First ledger id of the log; 128 and 16,384 are the first ids of one byte more
    entries_per_ledger_max: int = 1_000  # Most entries in a ledger of the log
    kind: SubscriptionType = SubscriptionType.SHARED  # The subscription type
    subscription_count: int = 1  # 1 or 2
    consumer_count: int = 2  # Consumers of each subscription, 1 to 4
    promotes_young: bool = True  # See `SubscriptionOptions`
    has_dead_letters: bool = False  # Whether messages go to the dead letters after they were given back three times
    batch_share: float = 0  # Share of entries that are batches; 0 to 1
    delay_share: float = 0  # Share of messages that are delayed; 0 to 1
    tracker: Tracker = Tracker.VIEW  # The tracker of delayed messages
    # For a shared index, the most bytes of due messages that it keeps for a lagging view
    due_log_bytes_max: int = 1 << 20
    lag_events: int = 0  # The second subscription is idle for this many events at a time; 0 for never
    race_count_max: int = 0  # Most writes of the previous owner while a cursor is opened
    broker_max: int = 0  # The limit on unacked messages shared by all subscriptions; 0 for none
    fault_share: float = 0  # Share of events with a fault of the store; 0 to 1
    fault_kinds: tuple[FaultKind, ...] = tuple(FaultKind)  # The kinds of these faults
    burst_share: float = 0.3  # Share of faults that affect several writes in a row; 0 to 1
    write_weight: float = 1  # Relative frequency of writes, where 1 is the usual
    crash_weight: float = 0  # Weight of crashes, where all other events together have about 120
    reconfigures: bool = False  # Whether a broker may restart with other settings of its cursors
    count_max: int = 1_000  # Most messages of one event

    def text(self):
        return ", ".join(_differences(self, Settings())) or "nothing"


def drawn(random):
    draw = random.choice
    delay_share = draw((0, 0, 0.2, 0.5))
    tracker = draw((Tracker.VIEW, *Tracker)) if delay_share else Tracker.VIEW
    subscription_count = 2 if delay_share and tracker is Tracker.VIEW else draw((1, 1, 1, 2))
    settings = Settings(
        limits=drawn_limits(random),
        config=drawn_config(random),
        starts_high=draw((True, False, False, False)),
        first_ledger_id=draw((1, 126, 126, 16_382)),
        entries_per_ledger_max=draw((40, 150, 150, 400)),
        kind=draw((SubscriptionType.SHARED,) * 4 + (SubscriptionType.KEY_SHARED,)),
        subscription_count=subscription_count,
        consumer_count=draw((1, 2, 4)),
        promotes_young=draw((True, True, False)),
        has_dead_letters=draw((False,) * 7 + (True,)),
        batch_share=draw((0, 0.3)),
        delay_share=delay_share,
        tracker=tracker,
        due_log_bytes_max=draw((0, 0, 100, 1 << 20)),
        lag_events=draw((0, 25)),
        race_count_max=2,
        broker_max=draw((0, 0, 12, 30)) if subscription_count > 1 else 0,
        fault_share=draw((0, 0, 0.05, 0.2)),
        crash_weight=draw((3, 3, 11, 20)),
        reconfigures=draw((True, True, False)),
    )
    if draw((True, False)):
        return _with_failing_writes(settings, random)
    if settings.tracker in {Tracker.BUCKETED, Tracker.VIEW_OF_BUCKETS}:
        # A bucket is sealed at the end of a ledger; with long ledgers a crash rarely meets a partly due bucket.
        return replace(settings, entries_per_ledger_max=draw((5, 10)))
    return settings


def _with_failing_writes(settings, random):
    """Return a broker with a tiny log whose writes fail more often than not, several in a row.

    Few entries meet in every combination: an ack advances the mark-delete position while a persist fails on every
    target, an append of unknown outcome is followed by a metadata store without room.
    """
    draw, is_native = random.choice, settings.config.format is Format.NATIVE
    return replace(
        settings,
        config=replace(
            settings.config,
            flush_interval_ms=10,
            compaction_bytes_min=draw((0, 65_536)),
            ledger_entry_count_max=draw((2, 50_000)),
            range_count_max=draw((None, None, 0, 1, 2)) if is_native else None,
            metadata_range_count_max=draw((None, 0, 1)) if is_native else None,
            metadata_bytes_max=draw((900_000, 60, 90)) if is_native else 900_000,
            become_old_ack_record_seconds=draw((0, 1, 1)),
            ledger_retry_ms=0,
        ),
        entries_per_ledger_max=draw((3, 6, 12)),
        starts_high=False,
        delay_share=0,
        tracker=Tracker.VIEW,
        count_max=draw((3, 5, 10)),
        fault_share=draw((0.2, 0.5)),
        fault_kinds=(FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER, FaultKind.FULL),
        burst_share=0.6,
        write_weight=2.5,
        reconfigures=False,
        crash_weight=3,
    )


def drawn_limits(random):
    """Return limits of a gate: none, narrow ones, wide ones."""
    draw = random.choice
    return GateLimits(
        max_unpersisted_ack_record_bytes=draw((1_024, 1_024, 1_024, 1_100, 1_500, 0)),
        max_unacked_messages=draw((200_000, 200_000, 10, 30)),
        unpersisted_release_ratio=draw((0.8, 1.0, 1.0, 0.3)),
        unacked_release_ratio=draw((0.5, 1.0)),
        max_unacked_ranges=draw((0, 0, 0, 5, 20, 40)),
        max_unacked_messages_per_consumer=draw((50_000, 50_000, 4, 12)),
    )


def drawn_config(random):
    draw = random.choice
    config = CursorConfig(
        format=draw((Format.NATIVE, Format.NATIVE, Format.PULSAR)),
        flush_interval_ms=draw((10, 1_000)),
        mark_delete_rate_limit=draw((0, 0, 1, 10)),
        compaction_bytes_min=draw((0, 200, 65_536)),
        ledger_entry_count_max=draw((2, 50_000, 50_000)),
        ledger_rollover_ms=draw((0, 0, 2_000)),
        range_count_max=draw((None, None, 1, 3, 8, 20)),
        keep=draw((Keep.LOWEST, Keep.WIDEST)),
        batch_count_max=draw((10_000, 1)),
        metadata_range_count_max=draw((None, None, 2, 10)),
        metadata_bytes_max=draw((900_000, 900_000, 250, 120)),
        range_form=draw((RangeForm.LIST, RangeForm.WORDS)),
        become_old_ack_record_seconds=draw((0, 0, 0, 1, 2, 5, 3)),
        ledger_retry_ms=draw((0, 10, 1_000)),
    )
    if config.format is Format.PULSAR and config.keep is Keep.LOWEST:
        return replace(config, range_limit_rule=draw((LimitRule.EXACT, *LimitRule)))
    return config


def _differences(value, default):
    texts = []
    for each in fields(value):
        mine, usual = getattr(value, each.name), getattr(default, each.name)
        if isinstance(mine, GateLimits | CursorConfig):
            texts += _differences(mine, usual)
        elif mine != usual:
            texts.append(f"{each.name}={mine.name if isinstance(mine, Enum) else mine}")
    return texts
