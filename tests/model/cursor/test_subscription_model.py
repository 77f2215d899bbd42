"""The limits of a subscription in random schedules, and the effect of each kind of bug there.

`SCHEDULES` says how many, `FIRST_SCHEDULE` from which seed on: a failure names its seed.
"""

import os
from dataclasses import replace

import pytest

from ackstate import CursorConfig, Format, Message
from ackstate.limits import GateLimits, Rule
from ackstate.stores.memory import Fault, FaultKind
from crash.model.checks import uses
from crash.model.client_events import ack, append, dispatch
from crash.model.settings import Tracker
from crash.model.simulation import BrokerSimulation
from schedule_stories import ScheduleStory


def run(seed, **settings):
    """Run the schedule of a seed, which seldom crashes: `Schedule(seed, settings).run()` repeats a failure."""
    settings = replace(BrokerSimulation(seed).settings, crash_weight=1, reconfigures=False, **settings)
    try:
        BrokerSimulation(seed, settings).run(range(70))
    except BaseException as error:
        error.add_note(f"seed {seed}, with {settings.text()}")
        raise


@pytest.mark.slow
def test_no_limit_is_passed_and_nothing_gets_stuck_in_random_schedules():
    first = int(os.environ.get("FIRST_SCHEDULE", "0"))
    for seed in range(first, first + int(os.environ.get("SCHEDULES", "24"))):
        run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("tracker", Tracker)
def test_any_tracker_keeps_what_the_others_keep_in_random_schedules(tracker):
    for seed in range(4):
        run(seed, delay_share=0.5, tracker=tracker)


class GatedStory(ScheduleStory):
    """A story of the one gate of one subscription."""

    def publish(self, count):
        self("publish", count)

    def dispatch(self, count, consumer="a"):
        """Send, and return the numbers of the sent messages."""
        before = set(self.side.model.in_flight)
        self("dispatch", consumer, count)
        return sorted(set(self.side.model.in_flight) - before)

    def give_back(self, numbers, *, delay_ms=0):
        self("give_back", numbers, delay_ms=delay_ms)

    def limit(self, **limits):
        self.side.subscription.change_limits(GateLimits(**limits))
        self.side.forgive()

    def fail_writes(self):
        """Let every write of the next step fail, to the ledger and to the metadata store."""
        store = self.side.store
        for mutation in range(store.mutation_count, store.mutation_count + 8):
            store.inject(Fault(mutation, FaultKind.FULL))

    def persist_while(self, work):
        """Persist, and let others work before the record is on the disk."""
        self.schedule.meanwhile, self.schedule.meanwhile_share = lambda *_: work(), 1
        self("persist")

    def used(self):
        return next(used for rule, used, _ in uses(self.side) if rule is Rule.UNPERSISTED_ACK_RECORD_BYTES)

    def send_and_ack_every_other(self):
        """Go on until nothing is sent any more."""
        self.publish(300)
        while sent := self.dispatch(10):
            self.ack(*sent[::2])
            self.ack(*sent[1::4])


def acks_every_other():
    story = GatedStory()
    story.send_and_ack_every_other()
    assert 0.8 * 1_024 < story.used() <= 1_024
    story.end()


def acks_what_was_given_back():
    """Late acks come when all the room is reserved for others."""
    story = GatedStory(consumer_count=1)
    story.publish(200)
    early = story.dispatch(40)
    story.give_back(early, delay_ms=10_000)
    while story.dispatch(20):
        pass
    story.fail_writes()
    story.ack(*early[5:6])
    assert story.side.model.acked == set()
    story.end()


def cuts_a_range_where_its_first_id_becomes_longer():
    """Entries 1 to 199 are one range; from 150 on they are young, and 149 takes a byte more than 0."""
    story = GatedStory(config=CursorConfig(become_old_ack_record_seconds=1), limits=GateLimits())
    story.publish(400)
    story.ack(*story.dispatch(150)[1:])
    story.schedule.now_ms = 500
    story.ack(*story.dispatch(50))
    story.dispatch(100)
    story.limit(max_unpersisted_ack_record_bytes=story.used())
    story.schedule.now_ms = 1_200
    story("persist")
    story.end()


def puts_a_lower_range_in_the_place_of_a_longer_one():
    """One range may be durable, the lower one of two: that of entry 200, with its longer ids, has to give way."""
    config = CursorConfig(format=Format.PULSAR, range_count_max=1)
    story = GatedStory(config=config, limits=GateLimits())
    story.publish(400)
    assert len(story.dispatch(300)) == 300
    story.ack(200)
    story("persist")
    assert story.side.model.durable == {200}
    story.ack(5)
    story.limit(max_unpersisted_ack_record_bytes=story.used())
    story("persist")
    story.end()


def acks_while_all_acks_are_young():
    story = GatedStory(config=CursorConfig(become_old_ack_record_seconds=60))
    story.send_and_ack_every_other()
    # The messages in flight keep it closed, which no persist can change.
    assert story.side.subscription.usage().reserved_bytes > 0.8 * 1_024
    story.end()


STORIES = [
    acks_every_other,
    acks_what_was_given_back,
    cuts_a_range_where_its_first_id_becomes_longer,
    puts_a_lower_range_in_the_place_of_a_longer_one,
    acks_while_all_acks_are_young,
]


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_the_stories_that_find_planted_bugs_end_well(story):
    story()


def test_what_falls_due_fills_a_hole_although_what_waits_finds_no_room():
    """Messages 0 and 3 are delayed. Either of 1 and 2 would be a range of its own, and 4 is one already."""
    story = GatedStory(limits=GateLimits(), delay_share=1, consumer_count=1)
    schedule = story.schedule
    append(schedule, [Message(b"", deliver_at_ms=deliver_at_ms) for deliver_at_ms in (100, -1, -1, 100, -1)])
    assert story.dispatch(9) == [1, 2, 4]
    story.ack(4)
    story.give_back([1, 2])
    story.limit(max_unacked_ranges=1)
    assert story.dispatch(2) == []
    schedule.now_ms = 200
    assert story.dispatch(2) == [0, 3]
    story.end()


def test_a_hole_whose_lower_part_was_acked_as_a_whole_is_still_filled():
    story = GatedStory(limits=GateLimits(), consumer_count=1)
    story.publish(7)
    assert story.dispatch(7) == [0, 1, 2, 3, 4, 5, 6]
    story.ack(6)
    story.give_back([0, 1, 2, 3, 4, 5])
    story.limit(max_unacked_ranges=1)
    assert story.dispatch(1) == [0]
    story.give_back([0])
    story("ack_up_to", 2)
    assert story.dispatch(1) == [3]
    story.end()


def test_an_ack_beside_what_is_being_written_is_counted_as_what_it_will_be_alone():
    """While entries 51 to 99 and 101 to 149 are written, 50 and 100 join them; after it they are alone."""
    config = CursorConfig(become_old_ack_record_seconds=1)
    story = GatedStory(config=config, limits=GateLimits(), promotes_young=False)
    story.publish(400)
    sent = story.dispatch(150)
    story.ack(*sent[51:100], *sent[101:])
    story.schedule.now_ms = 500
    story.ack(*story.dispatch(50)[1:])
    story.dispatch(60)
    story.limit(max_unpersisted_ack_record_bytes=story.used(), unpersisted_release_ratio=1)
    story.schedule.now_ms = 1_200

    def work():
        for number in set(story.side.model.in_flight) & {50, 100}:
            ack(story.schedule, story.side, number)
        dispatch(story.schedule, story.side, "b", 5)

    story.persist_while(work)
    story.end()


def test_what_a_limit_cut_off_and_what_is_young_beside_it_do_not_part_beyond_the_limit():
    """Entries 121 to 128 found no room in the durable state. When they do, 129 to 140 begin with a longer id."""
    config = CursorConfig(become_old_ack_record_seconds=1_000, range_count_max=1)
    story = GatedStory(config=config, limits=GateLimits(), promotes_young=False)
    story.publish(400)
    sent = story.dispatch(300)
    story.ack(10)
    story.side.cursor.promote(0, now_ms=0)
    story.ack(*sent[121:129])
    story.side.cursor.promote(0, now_ms=0)
    assert story.side.model.durable == {10}
    story.ack(*sent[129:141])
    story("ack_up_to", 10)
    story.limit(max_unpersisted_ack_record_bytes=story.used(), unpersisted_release_ratio=1)
    story("persist")
    story.end()
