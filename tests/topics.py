"""A topic with one subscription on a store in memory, in few words."""

import re

import pytest

from ackstate import CursorConfig, DeadLetterPolicy, ManagedCursor, MemoryStore, Message, Subscription
from ackstate.delay import TopicDelayIndex
from ackstate.dispatch import SubscriptionOptions, SubscriptionType
from ackstate.limits import DispatchGate, GateLimits
from ackstate.message import NO_DELAY
from ackstate.stores.memory import Fault, FaultKind
from ackstate.topic import MessageLog


class NumberedTopic:
    """Messages are known by their number, in order of publishing."""

    entries_per_ledger_max = 50

    def __init__(self, kind=SubscriptionType.SHARED, *, tick_time_ms=None, options=None, config=None, **limits):
        self.kind, self.options, self.config = kind, options or SubscriptionOptions(), config or CursorConfig()
        self.tick_time_ms = None if kind.is_single_active else tick_time_ms
        self.positions = []
        self.open(MemoryStore(), **limits)

    def open(self, store, **limits):
        self.log = MessageLog.open(store, topic="t", entries_per_ledger_max=self.entries_per_ledger_max)
        self.subscribe("s", **limits)

    def subscribe(self, name, **limits):
        self.cursor = ManagedCursor.open(
            self.log.store, topic="t", subscription=name, ledgers=self.log.ledgers, config=self.config, now_ms=0
        )
        self.gate = None if self.kind.is_single_active else DispatchGate(GateLimits(**limits))
        self.tracker = None if self.tick_time_ms is None else self.open_tracker()
        self.subscription = Subscription(
            self.log, self.cursor, gate=self.gate, delays=self.tracker,
            kind=self.kind, options=self.options,
        )  # fmt: skip

    def open_tracker(self):
        return TopicDelayIndex(tick_time_ms=self.tick_time_ms).open_view(self.cursor.is_acked)

    def restart(self, **limits):
        self.open(MemoryStore(self.log.store.disk), **limits)

    def publish(self, count=1, *, key=None, deliver_at_ms=NO_DELAY, message_count=1):
        self.positions += self.log.publish(
            [Message(b"", key=key, deliver_at_ms=deliver_at_ms, message_count=message_count)] * count
        )

    def publish_keys(self, keys):
        """A message for each letter, which is its key."""
        self.positions += self.log.publish([Message(b"", key=key.encode()) for key in keys])

    def dispatch(self, consumer="a", count=100, *, now_ms=0):
        """Return the numbers of a consumer's messages."""
        return [number for number, _ in self.deliveries(consumer, count, now_ms=now_ms)]

    def deliveries(self, consumer="a", count=100, *, now_ms=0):
        """Return the same with how often each was sent before."""
        sent = self.subscription.dispatch(consumer, count, now_ms=now_ms)
        self.check()
        return [(self.positions.index(each.position), each.redelivery_count) for each in sent]

    def ack(self, *numbers, now_ms=0):
        for number in numbers:
            self.subscription.ack(self.positions[number], now_ms=now_ms)
        self.check()

    def ack_up_to(self, number, *, now_ms=0):
        self.subscription.ack_cumulative(self.positions[number], now_ms=now_ms)
        self.check()

    def nack(self, *numbers, delay_ms=0, now_ms=0):
        given_back = [
            self.subscription.nack(self.positions[number], delay_ms=delay_ms, now_ms=now_ms) for number in numbers
        ]
        self.check()
        return given_back

    def unacked(self):
        return [number for number, position in enumerate(self.positions) if not self.cursor.is_acked(position)]

    def check(self):
        """Assert the invariants of all parts."""
        self.subscription.check_invariants()


STEP = re.compile(r"(?P<verb>\w+)(?P<rest>[^>!]*?)(?: -> (?P<answer>.*)| ! (?P<error>\w+) ?(?P<said>.*))?")
RUN = re.compile(r"(\d+)\.\.(\d+)(?:/(\d+))?")
LIMITS = {
    "bytes": "max_unpersisted_ack_record_bytes", "ranges": "max_unacked_ranges", "messages": "max_unacked_messages",
    "each": "max_unacked_messages_per_consumer",
}  # fmt: skip


def for_each_kind(stories):
    """Return the parameters of stories by name, the first of which is the kinds to tell each for."""
    return [
        pytest.param(kind, *rest, id=f"{name}-{kind.value}")
        for name, (kinds, *rest) in stories.items()
        for kind in kinds
    ]


def limits_of(words):
    """Return the limits that some words like `ranges=3` give."""
    return {LIMITS[name]: int(value) for name, _, value in (word.partition("=") for word in words)}


class Storyteller:
    """Does steps that are words, `verb words -> answer`, by a method `do`, and a `check` after each.

    `1..7/2` is 1 3 5 7, and `! AckRefusedError too little / by far` an error with which a step ends, and what it says.
    """

    def tell(self, story):
        for step in story.split("; "):
            told, met = STEP.fullmatch(RUN.sub(self.written_out, step)), None
            try:
                answer = self.do(told["verb"], told["rest"].split())
            except Exception as error:
                if not told["error"]:
                    error.add_note(step)
                    raise
                met = error
            if told["error"]:
                said = " ".join(map(str, (met, met.__cause__, getattr(met, "__notes__", ()))))
                assert type(met).__name__ == told["error"], f"{step}: {met!r}"
                assert all(part in said for part in told["said"].split(" / ")), f"{step}: {said}"
            elif told["answer"]:
                assert (answer or "-") == told["answer"], f"{step}: {answer}"
            self.check()
        return self

    @staticmethod
    def written_out(run):
        first, last, step = run.groups()
        return " ".join(map(str, range(int(first), int(last) + 1, int(step or 1))))


class StoryTopic(Storyteller, NumberedTopic):
    """A topic whose steps are words: `nack 1 +10; at 9; send a -> -`, with the answer of a step behind its arrow.

    Messages that are sent have the number of their earlier deliveries behind them, but not those that are taken.
    Consumers have a waiter each.
    """

    def __init__(self, kind=SubscriptionType.SHARED, *, dead_after=None, retries=None, options=None, **settings):
        self.now_ms, self.failures, self.dead, self.woken = 0, 0, [], []
        letters = None if dead_after is None else DeadLetterPolicy(dead_after, self.hand_over)
        options = SubscriptionOptions(dead_letters=letters, retries=retries, **options or {})
        super().__init__(kind, options=options, **{"tick_time_ms": 1} | settings)

    def hand_over(self, delivery):
        assert not self.cursor.is_acked(delivery.position)
        if self.failures:
            self.failures -= 1
            raise OSError("the topic of dead letters is away")
        self.dead.append(f"{self.positions.index(delivery.position)}/{delivery.redelivery_count}")

    def wake(self):
        self.woken.append("round")

    def do(self, verb, words):  # noqa: PLR0911, PLR0912, PLR0915 - one case a verb
        now, subscription = {"now_ms": self.now_ms}, self.subscription
        numbers = [int(word) for word in words if word.isdigit()]
        marked = {word[0]: int(word[1:]) for word in words if word[0] in "x@+*p" and word[1:].isdigit()}
        match verb:
            case "at":
                self.now_ms = numbers[0]
            case "publish":
                key = b"k" if "k" in words else None
                self.publish(numbers[0], key=key, message_count=marked.get("x", 1), deliver_at_ms=marked.get("@", -1))
            case "keys":  # a message for each letter
                self.publish_keys(words[0] * (numbers or [1])[0])
            case "send" | "take":
                sent = self.deliveries(words[0], numbers[0] if numbers else 100, **now)
                sent = sorted(sent) if "sorted" in words else sent
                return " ".join(
                    f"{number}/{count}" if count and verb == "send" else f"{number}" for number, count in sent
                )
            case "singly":
                sent = []
                while one := self.dispatch(words[0], 1, **now):
                    sent += one
                return " ".join(map(str, sent))
            case "round":
                deliveries, self.wake_ms = subscription.dispatch_all(waiter=self.wake, **now)
                sent = {name: [self.positions.index(each.position) for each in mine] for name, mine in deliveries}
                return ", ".join(f"{name} {' '.join(map(str, mine))}" for name, mine in sent.items())
            case "settle":  # rounds until nothing is sent any more
                sent = []
                while got := self.do("round", ()):
                    sent.append(got)
                self.woken.clear()
                assert (self.do("round", ()), self.woken) == ("", [])
                return ", ".join(sent)
            case "wakes":  # when the last round said that it is to be called again
                return str(self.wake_ms)
            case "ack":
                self.ack(*numbers, **now)
            case "past":  # with the cursor itself
                self.cursor.ack_many([self.positions[number] for number in numbers], **now)
            case "upto":
                self.ack_up_to(*numbers, **now)
            case "part":  # of a batch, all but some of its messages
                number, *left = numbers
                subscription.ack_batch(self.positions[number], [sum(1 << index for index in left)], **now)
            case "nack":
                return " ".join(map(str, self.nack(*numbers, delay_ms=marked.get("+", 0), **now)))
            case "retry":  # give back, for as long as the policy says
                self.nack(*numbers, delay_ms=None, **now)
            case "redeliver":
                return str(subscription.redeliver_all(words[0], **now))
            case "persist":
                return str(self.cursor.persist(**now).counts_cut)
            case "covers":
                return str(self.cursor.persist(**now).messages_covered)
            case "promote":
                self.cursor.promote(0, **now)
            case "writes":
                return str(self.cursor.stats().persist_count)
            case "crash" | "close":  # and its counts after the restart, with the times that messages wait for
                if verb == "close":
                    subscription.close(**now)
                self.restart(**limits_of(words))
                counts = sorted(self.cursor.view.delivery_counts.items())
                return " ".join(f"{self.positions.index(each)}/{count}@{time_ms}" for each, (count, time_ms) in counts)
            case "full":
                for write in range(9):
                    self.log.store.inject(Fault(self.log.store.mutation_count + write, FaultKind.FULL))
            case "works":
                self.log.store.forget_faults()
            case "broken":
                self.log.store.break_ledgers()
            case "mended":
                self.log.store.mend_ledgers()
            case "seek":
                subscription.seek(self.positions[numbers[0]], **now)
            case "skip":
                subscription.skip(numbers[0], **now)
            case "clear":
                subscription.clear_backlog(**now)
            case "join":
                subscription.consumer_opened(words[0], priority=marked.get("p", 0), permits=marked.get("*", 0))
            case "leave":
                return str(subscription.consumer_closed(words[0]))
            case "permits":
                if "+" in marked:
                    subscription.add_permits(words[0], marked["+"])
                return str(subscription.permits(words[0]))
            case "consumers":
                return " ".join(subscription.consumers)
            case "active":
                return str(subscription.active_consumer)
            case "limits":
                subscription.change_limits(GateLimits(**limits_of(words)))
            case "closed":
                return " ".join(reason.rule.name for reason in subscription.why_blocked())
            case "bytes":
                return str(sum(subscription.usage()[:2]))
            case "ranges":
                return str(sum(subscription.usage()[3:5]))
            case "unpersisted":
                return str(self.cursor.view.unpersisted_record_bytes)
            case "runs":
                return str(self.cursor.deleted.range_count)
            case "wait":
                subscription.when_open(lambda: self.woken.append(words[0]), words[0])
            case "woken":  # since it was last asked
                woken = " ".join(self.woken)
                self.woken.clear()
                return woken
            case "fail":
                self.failures = numbers[0]
            case "unacked":
                return " ".join(map(str, self.unacked()))
            case "marked":  # the entry of the mark-delete position
                return str(self.cursor.mark_delete_position.entry_id)
            case "held":
                return str(subscription.unacked_messages)
            case "wake":
                return str(subscription.next_wake_ms)
            case "dead":
                return " ".join(self.dead)
            case _:
                raise ValueError(verb)
        return ""
