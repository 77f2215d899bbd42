"""A crash between any two appends, with the log, the cursor and the delay buckets in one store.

Afterwards each message that is not acked comes, none early, and of those acked no more than the gauge said.
"""

import pytest

from ackstate import CursorConfig, MemoryStore, Position
from ackstate.stores.memory import Fault, FaultKind, PowerCutError
from delayed_topic import NONE, Bucketed, DelayedTopic

CUTS = [FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER]
CONFIG = CursorConfig(compaction_bytes_min=0, ledger_entry_count_max=6)


def trackers():
    return Bucketed(max_bucket_count=1)


def cut_at(mutation, kind, disk=None):
    """Return a store whose power is cut at one write."""
    return MemoryStore(disk, faults=[] if mutation is None else [Fault(mutation, kind)])


class WorkloadUntilPowerCut:
    """The actions of one subscription until the power is cut; `acked` and `gauge` are those of the last call that
    ended."""

    def __init__(self, mutation=None, kind=None):
        self.store, self.topic = cut_at(mutation, kind), None
        self.acked, self.gauge, self.attempted, self.now_ms = set(), 0, [], 0
        try:
            self.topic = DelayedTopic(trackers(), self.store, config=CONFIG)
            self.run()
        except PowerCutError:
            pass

    def run(self):
        self.publish(*range(300, 1_500, 100), NONE, 100, 150)
        self.work(0)
        self.ack(3)
        self.persist()
        self.work(330)
        self.publish(400, 5_000, 600, NONE, 450, 800)
        self.work(700)
        self.persist()
        self.work(1_000)
        self.ack(16)
        self.work(1_250)
        self.persist()
        self.publish(3_000, 2_000)
        self.work(2_500)

    def publish(self, *deliver_at_ms):
        for each in deliver_at_ms:
            self.attempted.append(each)
            self.topic.publish(each)

    def work(self, now_ms):
        self.now_ms = now_ms
        for number in self.topic.dispatch(now_ms=now_ms):
            self.ack(number)
        self.topic.tracker["s"].advance_mark_delete(self.topic.cursors["s"].mark_delete_position)

    def ack(self, number):
        self.topic.ack(number, now_ms=self.now_ms)
        self.noted({number})

    def persist(self):
        self.topic.cursors["s"].persist(now_ms=self.now_ms)
        self.noted(set())

    def noted(self, acked):
        self.acked |= acked
        self.gauge = self.topic.cursors["s"].redelivery_if_crashed

    def crash(self, mutation=None, kind=None):
        self.store = cut_at(mutation, kind, self.store.disk)

    def recover(self):
        """Restart from the stored state, and return the deliveries."""
        topic = DelayedTopic(trackers(), self.store, config=CONFIG, now_ms=self.now_ms)
        topic.positions = [
            Position(ledger_id, entry_id)
            for ledger_id in topic.log.ledgers
            for entry_id in range(topic.store.ledgers.last(ledger_id) + 1)
        ]
        topic.deliver_at_ms = self.attempted[: len(topic.positions)]
        known = 0 if self.topic is None else len(self.topic.positions)
        assert known <= len(topic.positions) <= len(self.attempted)
        again = self.acked & set(topic.unacked())
        assert len(again) <= self.gauge, f"{len(again)} acked come again, and the gauge said {self.gauge}"
        came = topic.drain(now_ms=self.now_ms)
        assert set(came) & self.acked == again
        return topic, came


@pytest.mark.slow
@pytest.mark.parametrize("kind", CUTS)
def test_a_crash_at_any_write_loses_nothing_and_hastens_nothing(kind):
    mutations = WorkloadUntilPowerCut().store.mutation_count
    for mutation in range(mutations):
        work = WorkloadUntilPowerCut(mutation, kind)
        work.crash()
        topic, _ = work.recover()
        assert topic.tracker["s"].delayed_message_count == 0, f"after a crash at write {mutation}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", CUTS)
def test_a_crash_at_any_write_of_what_follows_a_crash_is_survived_too(kind):
    mutations = WorkloadUntilPowerCut().store.mutation_count
    for mutation in range(4, mutations, 9):
        for second in range(12):
            work = WorkloadUntilPowerCut(mutation, kind)
            work.crash(second, kind)
            try:
                topic = DelayedTopic(trackers(), work.store, config=CONFIG, now_ms=work.now_ms)
                topic.subscriptions["s"].dispatch("a", 100, now_ms=work.now_ms)
            except PowerCutError:
                pass
            work.crash()
            work.recover()


@pytest.mark.slow
def test_no_snapshot_is_left_behind_for_good():
    """After a crash at any write: data without a name is deleted by the next start, or the one after."""
    mutations = WorkloadUntilPowerCut().store.mutation_count
    for mutation in range(0, mutations, 5):
        work = WorkloadUntilPowerCut(mutation, FaultKind.CRASH_AFTER)
        work.crash()
        topic, _ = work.recover()
        topic.tracker["s"].delete_retired()
        registered = topic.trackers.storage(topic, "s").registry.get_all().values()
        assert set(topic.store.ledgers.owned_by("delayed s")) == set(map(int, registered))
