"""A delayed message is cancelled or rescheduled for all subscriptions at once, in one record, or not at all."""

import pytest

from ackstate import GateLimits, ManagedCursor, MemoryStore, Message, Position, SubscriptionType, Topic, TopicSettings
from ackstate.cursor.journal import cursor_path
from ackstate.cursor.recovery import UnreadableCursorError
from ackstate.delay import DelayConfig, TrackerKind
from ackstate.errors import AckStateError, CursorFencedError, InvalidPositionError, RescheduleRefusedError
from ackstate.inspect import inspect_store
from ackstate.stores.memory import Fault, FaultKind
from ackstate.topic import MessageLog, delete_topic
from ackstate.topic.subscriptions import SCHEDULE

BUCKETS = DelayConfig(
    tracker=TrackerKind.BUCKETED, is_deliver_at_time_strict=True, min_index_count_per_bucket=2,
    max_indexes_per_segment=2, max_bucket_count=2,
)  # fmt: skip
SETTINGS = {
    "in memory": TopicSettings(entries_per_ledger_max=4, delay_index=DelayConfig(tick_time_ms=10)),
    "bucketed": TopicSettings(entries_per_ledger_max=4, delay_index=BUCKETS),
}
both = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


class Delayed:
    """A topic whose message `n` is due at 1,000 + 100 n, and its subscriptions, which have read all 12."""

    def __init__(self, settings=SETTINGS["in memory"], *, names="ab", **wanted):
        self.store, self.settings, self.names, self.wanted = MemoryStore(), settings, names, wanted
        self.positions = []
        self.crash()
        for number in range(12):
            self.publish(1_000 + 100 * number)
        self.due(0)

    def tell(self, story):
        """Do each step, and compare the answer or, if it is refused and nothing is written, a part of the reason."""
        for step in story.split("; "):
            (verb, *numbers), expected = step.partition(" -> ")[0].split(), step.partition(" -> ")[2]
            before = self.store.mutation_count
            try:
                answer = getattr(self, verb)(*map(int, numbers))
            except RescheduleRefusedError as error:
                answer = expected if expected in str(error) and self.store.mutation_count == before else str(error)
            assert not expected or answer == expected, step

    def crash(self):
        self.store = MemoryStore(self.store.disk)
        self.topic = Topic.open(self.store, "t", settings=self.settings, now_ms=0)
        self.subscriptions = [
            self.topic.subscribe(name, start="earliest", now_ms=0, **self.wanted) for name in self.names
        ]

    def publish(self, deliver_at_ms):
        payload = b"%d" % len(self.positions)
        self.positions += self.topic.publish([Message(payload, deliver_at_ms=deliver_at_ms)], now_ms=0)

    def cancel(self, number, now_ms=0):
        self.topic.cancel(self.positions[number], now_ms=now_ms)

    def move(self, number, deliver_at_ms, now_ms=0):
        self.topic.reschedule(self.positions[number], deliver_at_ms=deliver_at_ms, now_ms=now_ms)

    def send(self, now_ms):
        self.subscriptions[0].dispatch("ann", 1, now_ms=now_ms)

    def ack(self, number):
        self.subscriptions[0].ack(self.positions[number], now_ms=0)

    def due(self, now_ms):
        """Send what is due to each subscription, and ack it."""
        found = set()
        for subscription in self.subscriptions:
            sent = subscription.dispatch("ann", 100, now_ms=now_ms)
            subscription.ack_many([each.position for each in sent], now_ms=now_ms)
            found.add(" ".join(map(str, sorted(int(each.message.payload) for each in sent))) or "-")
        return " or ".join(found)

    def backlog(self):
        return str(max(each.cursor.backlog for each in self.subscriptions))


@both
@pytest.mark.parametrize("story", ["{}", "crash; {}", "{}; crash"], ids=["no crash", "before it", "after it"])
def test_no_subscription_receives_a_cancelled_message_and_all_receive_a_rescheduled_one_at_its_new_time(
    settings, story
):
    topic = Delayed(settings)
    # Later, earlier; after a publish that seals the bucket which has it, twice, and at once.
    topic.tell(
        story.format(
            "cancel 0; cancel 5; cancel 11; move 1 1500; move 8 1010; publish 8000; move 2 5000; move 2 1450; move 3 0"
        )
    )
    topic.tell(
        "due 0 -> 3; due 1009 -> -; due 1010 -> 8; due 1449 -> 4; due 1450 -> 2; due 1499 -> -; due 1500 -> 1; "
        "due 9000 -> 6 7 9 10 12; backlog -> 0"
    )
    topic.topic.delays._check()
    topic.subscriptions[1] = topic.topic.subscribe("later", start="earliest", now_ms=9_000)
    topic.subscriptions[0].seek("earliest", now_ms=9_000)
    topic.tell("due 9000 -> 1 2 3 4 6 7 8 9 10 12")


@both
def test_what_cannot_be_changed_is_refused_by_name_and_nothing_is_written(settings):
    topic = Delayed(settings)
    topic.tell(
        "publish -1; move 12 9000 -> of topic 't' is not delayed; cancel 4; cancel 4 -> was cancelled before; "
        "move 4 9000 -> was cancelled before; ack 3; cancel 3 -> was acked by subscription 'a'; move 1 0; "
        "cancel 1 -> is due since 0 ms; send 999; cancel 1 -> was handed out to consumer 'ann' of subscription 'a'; "
        "move 0 9000 1000 -> is due since 1000 ms"
    )
    for position, deliver_at_ms, error in (
        (Position(99, 0), 5, InvalidPositionError),
        (topic.positions[-1]._replace(entry_id=9), 5, InvalidPositionError),
        ("x", 5, (TypeError, ValueError)),
        (topic.positions[0], -1, ValueError),
        (topic.positions[0], "x", TypeError),
    ):
        with pytest.raises(error):
            topic.topic.reschedule(position, deliver_at_ms=deliver_at_ms, now_ms=0)
    with pytest.raises(RescheduleRefusedError, match="no delay index"):
        Topic.open(MemoryStore(), "t", settings=TopicSettings(delay_index=None), now_ms=0).cancel(Position(1, 0))


def test_a_consumer_that_ignores_delays_receives_no_cancelled_message():
    topic = Delayed(names="x", kind=SubscriptionType.EXCLUSIVE)
    topic.subscriptions[0].seek("earliest", now_ms=0)
    topic.tell("send 0; cancel 0 -> consumer 'ann' of subscription 'x'; cancel 1; due 0 -> 2 3 4 5 6 7 8 9 10 11")


@both
@pytest.mark.parametrize("kind", [each for each in FaultKind if each is not FaultKind.FULL])
def test_a_crash_at_any_write_leaves_a_change_whole_or_not_at_all(settings, kind):
    for writes in range(6):
        topic, happened = Delayed(settings), True
        topic.store.inject(Fault(topic.store.mutation_count + writes, kind))
        try:
            topic.tell("cancel 2; move 3 8000")
        except AckStateError:
            happened = False
        topic.crash()
        found = set(topic.due(7_000).split(" "))  # of both alike: they would be joined by another word
        assert not happened or not {"2", "3"} & found
        assert found | {"2", "3"} == set(map(str, range(12)))


@pytest.mark.parametrize("had_changes", [False, True])
def test_a_former_owner_changes_nothing(had_changes):
    topic = Delayed()
    if had_changes:
        topic.cancel(0)
    former = topic.topic
    topic.crash()
    with pytest.raises(CursorFencedError):
        former.cancel(topic.positions[1], now_ms=0)
    topic.tell("due 1100 -> 1" if had_changes else "due 1100 -> 0 1")


def test_changes_that_cannot_be_read_name_themselves_and_are_repaired_as_a_cursor():
    topic = Delayed()
    topic.tell("cancel 0; move 1 8000")
    path = cursor_path("t", SCHEDULE)
    version = topic.store.metadata.get(path).version
    topic.store.metadata.put(path, b"damaged", expected_version=version)
    with pytest.raises(
        UnreadableCursorError, match=f"rescheduled messages of topic 't', cursor '{SCHEDULE}'"
    ) as refused:
        topic.crash()
    found = {each.name.subscription: each for each in inspect_store(topic.store)}[SCHEDULE]
    assert "no subscription: the cancelled and rescheduled" in str(found.notes[0])
    assert tuple(each.repair for each in found.problems[0].repairs) == refused.value.repairs
    log = MessageLog.open(topic.store, topic="t", now_ms=0)
    ManagedCursor.open(
        topic.store, topic="t", subscription=SCHEDULE, ledgers=log.ledgers, repair=refused.value.repairs[0], now_ms=0
    )
    topic.tell("crash; due 7999 -> 2 3 4 5 6 7 8 9 10 11")


def test_an_ack_that_a_limit_has_no_room_for_is_made_later():
    topic = Delayed(names="a", limits=GateLimits(max_unacked_ranges=1))
    topic.tell("cancel 2; cancel 6; cancel 10")
    assert [topic.subscriptions[0].cursor.is_acked(topic.positions[number]) for number in (2, 6)] == [True, False]
    found = " ".join(topic.due(now_ms) for now_ms in range(1_000, 9_000, 500))
    assert sorted(found.replace("-", "").split(), key=int) == ["0", "1", "3", "4", "5", "7", "8", "9", "11"]
    topic.tell("backlog -> 0")


def test_a_trim_forgets_changes_and_a_deletion_leaves_nothing_of_them():
    topic = Delayed()
    topic.tell("cancel 0; cancel 8; move 1 1050; move 11 9000")
    assert [each.name for each in topic.topic.stored_subscriptions()] == ["a", "b"]
    topic.due(2_500)
    topic.topic.tick(now_ms=3_000)
    assert topic.topic.trim(now_ms=3_000) == 2
    for _ in range(2):
        log = topic.topic.log
        assert (list(log.cancelled), list(log.rescheduled)) == ([topic.positions[8]], [topic.positions[11]])
        topic.crash()
    assert delete_topic(topic.store, "t")
    assert (topic.store.ledgers.owners(), topic.store.metadata.children("/managed-ledgers")) == ([], [])
