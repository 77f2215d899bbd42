"""Young acks are persisted before their time, the oldest first, before they would shut the gate by themselves.

The messages of these stories come one by one; every second one is acked, so each ack is a range of its own: of 14
bytes, from entry 129 on of 16. Of 1,031 bytes 64 of the former and 8 of the latter take 1,024.
"""

import pytest

from ackstate import CursorConfig, Format, StoreError
from ackstate.cursor import PersistTarget
from ackstate.limits import Rule
from ackstate.stores.memory import Fault, FaultKind
from topics import NumberedTopic, StoryTopic

BYTES = Rule.UNPERSISTED_ACK_RECORD_BYTES
YOUNG_S = 60
# A cursor ledger that cannot be written leaves nothing: the metadata store is not given so much.
CONFIG = CursorConfig(become_old_ack_record_seconds=YOUNG_S, metadata_bytes_max=1, ledger_retry_ms=0)


class YoungAcks(StoryTopic):
    """A subscription whose acks are all young."""

    def __init__(self, *, config=CONFIG, promotes_young=True):
        options = {"promotes_young": promotes_young}
        super().__init__(config=config, options=options, max_unpersisted_ack_record_bytes=1_031)
        self.publish(2_000)  # one ledger
        self.receipts = {}

    def do(self, verb, words):
        match verb:
            case "go":
                return str(self.go_on())
            case "fill":  # until the next message has no room
                while self.go_on() < 143:
                    pass
                assert self.cursor.view.unpersisted_record_bytes == 64 * 14 + 8 * 16 == 1_024
            case "durable":
                return " ".join(str(number) for number, each in self.receipts.items() if self.cursor.durable(each))
            case "promoted":
                stats = self.cursor.stats()
                return f"{stats.promotion_count} {stats.promoted_message_count}"
            case "gauge":
                return str(self.cursor.redelivery_if_crashed)
            case _:
                return super().do(verb, words)
        return ""

    def go_on(self):
        """Take one message more; ack it if its number is odd, else give it back for long. Return its number."""
        (number,) = self.dispatch("a", 1, now_ms=self.now_ms)
        if number % 2:
            self.receipts[number] = self.subscription.ack(self.positions[number], now_ms=self.now_ms)
        else:
            self.nack(number, delay_ms=10**9, now_ms=self.now_ms)
        return number


def test_the_oldest_are_promoted_and_about_as_much_as_the_release_mark_says_stays_young():
    # With the 16 bytes of message 144 the use may be 824: the highest 48 ranges of 14 bytes and 8 of 16 take 800.
    story = YoungAcks().tell("fill; at 1; go -> 144; durable -> 1..31/2; unpersisted -> 800; promoted -> 1 16")
    stats = story.cursor.stats()
    assert (stats.redelivery_if_crashed, stats.redelivery_young) == (56, 56)
    assert story.subscription.why_blocked() == ()


@pytest.mark.slow
@pytest.mark.parametrize("format_", Format)
def test_young_acks_alone_never_close_the_gate(format_):
    story = YoungAcks(
        config=CursorConfig(format=format_, become_old_ack_record_seconds=YOUNG_S, metadata_bytes_max=900_000)
    )
    for number in range(400):
        story.tell(f"at {number}; go -> {number}")
    assert story.gate.blocked_count(BYTES) == 0
    promotions, promoted = map(int, story.do("promoted", ()).split())
    # Each makes room for about 13 acks of 16 bytes.
    assert 9 <= promotions <= 12
    story.tell(f"gauge -> {200 - promoted}; durable -> 1..{2 * promoted - 1}/2")


def test_switched_off_the_gate_closes_until_the_acks_are_old():
    story = YoungAcks(promotes_young=False).tell("fill; at 1; take a 1 -> -; wait a")
    (reason,) = story.subscription.why_blocked()
    assert (reason.rule, reason.used, reason.limit, reason.released_at) == (BYTES, 1_024, 1_031, 824)
    assert (reason.since_ms, reason.store_error) == (1, None)
    story.tell(
        f"at {YOUNG_S * 1_000 - 1}; persist; durable -> -; woken -> -; at {YOUNG_S * 1_000}; persist; promoted -> 0 0; "
        "durable -> 1..143/2; woken -> a; take a 1 -> 144"
    )


def test_a_store_that_fails_closes_the_gate_and_is_named_as_the_cause():
    story = YoungAcks().tell("fill; broken; at 5; take a 1 -> -")
    (reason,) = story.subscription.why_blocked()
    assert (reason.rule, reason.used, reason.since_ms) == (BYTES, 1_024, 5)
    assert isinstance(reason.store_error, StoreError)
    assert "The store is the cause: no ledger can be written, as scripted" in reason.detail
    story.tell("promoted -> 0 0; durable -> -; gauge -> 72")


def test_a_failed_promotion_is_tried_again_after_a_second_and_then_the_gate_opens():
    story = YoungAcks().tell("fill; broken; at 5; take a 1 -> -; wake -> 1005; mended; at 1004")
    mutations = story.log.store.mutation_count
    story.tell("take a 1 -> -; wake -> 1005")
    assert story.log.store.mutation_count == mutations
    story.tell("at 1005; take a 1 -> 144; wake -> 1000000000; closed -> -; promoted -> 1 16; durable -> 1..31/2")


def test_after_a_persist_that_succeeds_a_failed_promotion_is_tried_again_at_once():
    YoungAcks().tell("fill; broken; at 5; take a 1 -> -; mended; at 6; persist; take a 1 -> 144; promoted -> 1 16")


def test_a_gate_that_no_promotion_opens_waits_for_no_time():
    story = YoungAcks().tell("take a 1; ack 0; at 60000; persist; take a 99 -> 1..73; take a 1 -> -; ack 9; at 120000")
    story.tell("broken; persist ! StoreError; wake -> None")


def test_a_persist_that_succeeds_takes_the_blame_off_the_store():
    story = YoungAcks(promotes_young=False).tell("fill; at 1; take a 1 -> -; broken; at 2; persist ! StoreError")
    assert isinstance(story.subscription.why_blocked()[0].store_error, StoreError)
    story.tell("mended; at 3; persist")  # All that is young stays so, but it was written.
    (reason,) = story.subscription.why_blocked()
    assert (reason.used, reason.since_ms, reason.store_error) == (1_024, 1, None)


def test_after_a_failed_promotion_a_persist_writes_nothing_until_an_ack_is_old():
    topic = NumberedTopic(config=CursorConfig(become_old_ack_record_seconds=YOUNG_S))
    topic.publish(3)
    topic.dispatch()
    topic.ack(1)
    topic.cursor.persist(now_ms=1)
    store = topic.log.store
    for mutation in range(store.mutation_count, store.mutation_count + 6):
        store.inject(Fault(mutation, FaultKind.FAIL_BEFORE))
    with pytest.raises(StoreError):
        topic.cursor.promote(0, now_ms=2)
    store.forget_faults()
    mutations = store.mutation_count
    assert topic.cursor.persist(now_ms=3).route is PersistTarget.NOTHING
    assert store.mutation_count == mutations
    assert topic.cursor.persist(now_ms=3_600_000).messages_covered == 1
