"""Schedules of the crash model without chance: short stories, told event by event, in which planted bugs show."""

from contextlib import suppress

from serial import SerialExecutor

from ackstate import CursorConfig, Format, Message
from ackstate.cursor import persist_all
from ackstate.cursor.results import PersistTarget
from ackstate.limits import GateLimits
from ackstate.stores.base import StoreError
from ackstate.stores.memory import Fault, FaultKind
from crash.model.client_events import ack, ack_at_once, append, dispatch
from crash.model.settings import Settings, Tracker
from crash.model.simulation import BrokerSimulation


class ScheduleStory:
    """A schedule without chance: events told one by one, by a call or as words."""

    def __init__(self, **settings):
        self.schedule = BrokerSimulation(0, Settings(**settings))
        self.side = self.schedule.sides[0]

    def __call__(self, name, *args, **named):
        self.schedule.step(name, *args, **named)

    def tell(self, text):
        """Tell steps: an event of the model with its arguments, or one of these words."""
        for step in text.split("; "):
            verb, *words = step.split()
            self.do(verb, [int(word) if word.isdigit() else word for word in words])
        return self

    def do(self, verb, words):  # noqa: PLR0912 - one case a word
        schedule, side = self.schedule, self.side
        match verb:
            case "sent":
                self.sent(*words)
            case "ack":
                self.ack(*words)
            case "odd":  # those in flight are acked
                self.ack(*[number for number in side.model.in_flight if number % 2])
            case "together":
                ack_at_once(schedule, side, words)
            case "meanwhile":  # one is acked while a persist writes
                self.ack_while_a_persist_writes(*words)
            case "alone":  # nothing happens while a persist writes
                schedule.meanwhile_share = 0
            case "plain":
                append(schedule, [Message(b"")] * words[0])
            case "delayed":
                append(schedule, [Message(b"", deliver_at_ms=10 + 10 * number) for number in range(words[0])])
            case "batch":  # of so many messages, so many
                append(schedule, [Message(b"", message_count=words[0])] * words[1])
            case "all":  # subscriptions get so many
                for each in schedule.sides:
                    dispatch(schedule, each, "a", words[0])
            case "at":
                schedule.now_ms = words[0]
            case "later":
                schedule.now_ms += words[0]
            case "fail":  # writes of a kind, so many
                schedule.script_faults(side, FaultKind[words[0]], count=words[1])
            case "broken":
                side.store.break_ledgers()
            case "ranges":  # the limit of the next broker
                side.limits = GateLimits(max_unacked_ranges=words[0])
            case "pulsar":  # the format of the next broker
                side.config = CursorConfig(format=Format.PULSAR)
            case "count":  # is exactly, or more than another or a number
                name, *more, least = words
                least = schedule.counts[least] if isinstance(least, str) else least
                assert schedule.counts[name] > least if more else schedule.counts[name] == least, schedule.counts
            case "young":
                assert side.cursor.stats().redelivery_young == words[0]
            case "told":
                assert " ".join(words) in schedule.story()[-1]
            case "end":
                self.end()
            case _:
                self(verb, *words)

    def sent(self, count):
        self("publish", count)
        self("dispatch", "a", count)

    def ack(self, *numbers):
        for number in numbers:
            self("ack", number)

    def ack_while_a_persist_writes(self, number):
        def ack_once(schedule, side):
            schedule.meanwhile_share = 0
            ack(schedule, side, number)

        self.schedule.meanwhile, self.schedule.meanwhile_share = ack_once, 1
        self("persist")

    def end(self):
        self.schedule.check_all()
        self.schedule.drain()


def config(**settings):
    return {"config": CursorConfig(**settings)}


STORIES = {  # with settings
    "acks while a persist writes": ({}, "sent 5; ack 1; meanwhile 3; end"),
    "persists into a full disk": ({}, "sent 3; ack 1; fail FULL 1; broken; persist; end"),
    "ticks more often than the rate limit lets through": (
        config(flush_interval_ms=60_000, mark_delete_rate_limit=1), "sent 5; ack 1; tick; ack 3; tick; crash; end",
    ),
    "has more ranges than may be durable": (config(range_count_max=1), "sent 5; ack 1 3; persist; end"),
    "acks until the gate is shut": ({}, "publish 200; " + "dispatch a 10; odd; " * 20 + "end"),
    "fills the first hole while a persist writes": (
        config(ledger_entry_count_max=1), "sent 5; ack 1 2; meanwhile 0; end",
    ),
    "restarts above a limit": ({}, "sent 9; ack 1 3 5; persist; ranges 1; crash; end"),
    "restarts in the other format": ({}, "sent 5; ack 1 3; persist; pulsar; crash; end"),
    "restarts when a delayed message is due": (
        {"delay_share": 1, "tracker": Tracker.BUCKETED, "entries_per_ledger_max": 8},
        "delayed 8; dispatch a 8; " * 3 + "at 50; crash; end",
    ),
    "seeks back": ({}, "sent 5; ack 1 3; seek; end"),
    "opens copies that are damaged": ({}, "sent 3; ack 1; persist; " + "open_damaged_copy; " * 8 + "end"),
    # The owner before writes once more while the next one comes, and then goes on.
    "is fenced after a crash": (
        {"race_count_max": 2},
        "sent 40; "
        + "".join(f"ack {each}; persist; crash; go_on_before; dispatch a 40; " for each in range(0, 40, 4))
        + "count fenced > 10; count raced > 0; end",
    ),
    # The broker before publishes while the next one opens the log, and again afterwards.
    "publishes as an earlier owner": (
        {"race_count_max": 2, "entries_per_ledger_max": 6},
        "sent 3; crash; go_on_before; " * 12 + "count fenced_publishes 12; count published_in_a_race > 0; end",
    ),
    "persists together where nothing has room": (
        {"subscription_count": 2, **config(metadata_bytes_max=120)},
        "alone; plain 30; all 30; broken; persist_together; told no ledger can be written; end",
    ),
    "falls behind": (
        {"subscription_count": 2, "delay_share": 0.5, "due_log_bytes_max": 0},
        "fall_behind; dispatch a 5; end; count derived > 0",
    ),
    "acks the batch that closed the limit of the broker": (
        {"broker_max": 12}, "plain 2; batch 20 1; plain 1; dispatch a 4; ack 0; together 2; dispatch b 4; end",
    ),
    "ticks after the interval": ({}, "sent 3; ack 1; later 1000; tick; end"),
    "persists without ledgers": ({}, "sent 3; ack 1; broken; persist; count metadata 1; end"),
    "seeks in vain": (
        {"fault_share": 1e-9},
        "sent 3; seek_in_vain; ack 0; persist; seek_in_vain; ack 1; persist; seek_in_vain; ack 2; persist; "
        "count failed_resets 3; end",
    ),
    "attaches properties": ({}, "set_cursor_properties; crash; end"),
    "acks into a batch": ({}, "batch 3 2; persist; " + "ack_into_batch; persist; " * 3 + "end"),
    "appends with unknown outcome where nothing else has room": (
        config(metadata_bytes_max=1, ledger_retry_ms=0),
        "sent 5; ack 1; fail FAIL_AFTER 1; persist; ack 3; persist; end",
    ),
    # The held-back acks are old by now: the mark-delete moves over them while they are written, and after that.
    "acks up to old acks while no write succeeds": (
        config(become_old_ack_record_seconds=1),
        "alone; sent 3; ack 1; persist; young 1; later 2000; fail FAIL_BEFORE 6; meanwhile 0; ack 2; persist; sent 3; "
        "ack 4; persist; young 1; later 2000; fail FAIL_BEFORE 6; persist; ack 3; ack 5; persist; end",
    ),
    "persists after the ledger became old": (
        config(ledger_rollover_ms=1_000),
        "alone; sent 8; " + "".join(f"later 800; ack {each}; persist; " for each in (1, 3, 5, 7))
        + "count delta 2; count snapshot 2; end",
    ),
    "compacts": (
        config(compaction_bytes_min=0),
        "alone; sent 40; " + "".join(f"ack {each}; persist; " for each in range(1, 40, 2))
        + "count snapshot > 1; count delta > snapshot; end",
    ),
    # No message leaves the log before it is acked durably; then whole ledgers do, but the last.
    "trims": (
        {"entries_per_ledger_max": 3},
        "sent 3; sent 3; sent 3; ack 0 1 2 3 4 5 6 7 8; trim; count trimmed_ledgers 0; persist; trim; "
        "count trimmed_ledgers 2; crash; end",
    ),
}  # fmt: skip


def tell(name):
    settings, text = STORIES[name]
    ScheduleStory(**settings).tell(text)


def persists_together_with_a_fault():
    story = ScheduleStory(subscription_count=2)
    schedule = story.schedule
    story.tell("alone; plain 200; all 20; persist_together; count group_persists > 0")
    for side in schedule.sides:
        ack(schedule, side, max(side.model.in_flight))
    schedule.script_faults(schedule.at_work, FaultKind.FAIL_BEFORE, count=1)
    outcomes = schedule.interleave(
        schedule.sides,
        lambda: persist_all(
            [side.cursor for side in schedule.sides], now_ms=schedule.now_ms, executor=SerialExecutor()
        ),
    )
    assert [outcome.route for outcome in outcomes].count(PersistTarget.METADATA) == 1
    story.end()


def crashes_while_it_recovers_from_a_persist_of_unknown_outcome():
    story = ScheduleStory(fault_share=1e-9)
    story.tell("sent 3; ack 1; fail CRASH_AFTER 1")
    with suppress(StoreError):
        story.side.cursor.persist(now_ms=story.schedule.now_ms)
    assert not story.side.is_certain
    story.side.crash_and_recover([Fault(0, FaultKind.FULL)])
    assert story.side.model.acked == {1}
    story.end()
