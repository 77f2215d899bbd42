"""Stories of each tracker, without chance."""

import pytest

from delay_driver import ALL, NO_DELAY, DelayBroker
from tracker_kinds import KINDS


def asks_every_ms(kind):
    """Both subscriptions poll at every moment at which something could come too early."""
    broker = DelayBroker(kind, tick_ms=100)
    broker.publish(1, 99, 100, 101, 163, 164, 199, 200, 228, 250)
    broker.feed()
    for _ in range(400):
        for dispatcher in broker.dispatchers:
            dispatcher.work()
        broker.clock_ms += 1
    broker.drain()


def asks_for_one_at_a_time(kind):
    broker = DelayBroker(kind)
    broker.publish(*[64] * 6, *range(20, 90, 9))
    broker.feed()
    for _ in range(40):
        for dispatcher in broker.dispatchers:
            dispatcher.read(2)
            dispatcher.poll(1)
            dispatcher.send_again()
        broker.clock_ms += 4
    broker.check()
    broker.drain()


def sleeps_until_woken(kind):
    """The topic is idle, and its tick is set below the broker's."""
    broker = DelayBroker(kind, tick_ms=1_000)
    for dispatcher in broker.dispatchers:
        dispatcher.set_tick(100)
    broker.publish(5_000, 5_500, 6_001, 7_777)
    broker.drain()


def reads_what_waits_again_when_it_is_due(kind):
    """The messages are in sealed buckets, where those are."""
    broker = DelayBroker(kind)
    messages = broker.publish(*range(50, 130, 10))
    broker.publish(500)
    dispatcher = broker.dispatchers[0]
    dispatcher.read()
    broker.clock_ms += 95
    dispatcher.rewind(ALL)
    dispatcher.read()
    broker.clock_ms += 5
    dispatcher.work()
    assert set(dispatcher.sent) >= set(messages[:5])
    broker.drain()


def acks_what_waits(kind):
    broker = DelayBroker(kind)
    first, second, third = broker.publish(50, 60, 70)
    dispatcher = broker.dispatchers[0]
    dispatcher.read()
    dispatcher.ack(second)
    broker.clock_ms += 200
    dispatcher.poll()
    dispatcher.send_again()
    assert dispatcher.sent == [first, third]
    broker.drain()


def seeks_back(kind):
    broker = DelayBroker(kind)
    messages = broker.publish(NO_DELAY, 50, 90, 900)
    dispatcher = broker.dispatchers[0]
    dispatcher.work()
    broker.clock_ms += 60
    dispatcher.work()
    assert dispatcher.sent == messages[:2]
    broker.clock_ms += 60
    dispatcher.poll(0)
    dispatcher.seek(1)
    assert dispatcher.poll() == []
    dispatcher.read()
    assert dispatcher.sent == messages[1:3]
    broker.check()
    broker.drain()


def crashes_while_most_wait(kind):
    broker = DelayBroker(kind)
    broker.publish(*range(30, 330, 10))
    broker.feed()
    for dispatcher in broker.dispatchers:
        dispatcher.read()
    broker.clock_ms += 100
    broker.dispatchers[0].work()
    broker.dispatchers[0].ack(broker.log[0])
    broker.crash()
    broker.check()
    broker.drain()


def crashes_when_a_message_falls_due(kind):
    """The message is in a sealed bucket, where those are, in one segment with a message that is due later."""
    broker = DelayBroker(kind, tick_ms=1)
    broker.publish(NO_DELAY, 9, 64, 64, 9)
    broker.dispatchers[0].read()
    broker.clock_ms += 9
    broker.crash()
    broker.check()
    broker.drain()


def waits_for_what_is_due_last(kind):
    """Four ledgers in which the later messages are due earlier: whichever segment comes first, none is left out."""
    broker = DelayBroker(kind)
    broker.publish(*range(400, 80, -20), 500)
    broker.dispatchers[0].read()
    broker.check()
    for _ in range(50):
        broker.dispatchers[0].work()
        broker.clock_ms += 10
    broker.drain()


def the_clock_runs_back(kind):
    broker = DelayBroker(kind, tick_ms=64)
    broker.publish(30, 60, 90, 128, 300)
    for ahead_ms in (0, 70, -50, 20, 200, -300, 100):
        broker.clock_ms += ahead_ms
        broker.dispatchers[0].work()
        broker.check()
    broker.drain()


STORIES = [
    asks_every_ms,
    asks_for_one_at_a_time,
    sleeps_until_woken,
    reads_what_waits_again_when_it_is_due,
    acks_what_waits,
    seeks_back,
    crashes_while_most_wait,
    crashes_when_a_message_falls_due,
    waits_for_what_is_due_last,
    the_clock_runs_back,
]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_the_stories_that_find_planted_bugs_end_well(story, kind):
    story(kind)
