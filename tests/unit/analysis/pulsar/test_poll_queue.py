"""The order in which topics are polled, with brokers that do not answer."""

from __future__ import annotations

from ackstate.analysis.pulsar.recorder import PollQueue


def filled(topics, *, at_once=8):
    queue = PollQueue(at_once, lambda topic: topic.partition("/")[0])
    for due_s, topic in enumerate(topics):
        queue.put(topic, float(due_s))
    return queue


def names(taken):
    return [topic for topic, _ in taken]


def test_topics_are_taken_in_the_order_in_which_they_are_due():
    queue = filled(["a/3", "a/1", "a/2"])
    assert names(queue.take(0.5)) == ["a/3"]
    assert names(queue.take(9.0)) == ["a/1", "a/2"]
    assert queue.take(9.0) == []


def test_the_only_broker_has_all_polls():
    queue = filled([f"a/{number}" for number in range(20)])
    assert len(queue.take(99.0)) == 8
    assert queue.take(99.0) == []
    queue.done("a")
    assert names(queue.take(99.0)) == ["a/8"]


def test_a_broker_that_does_not_answer_delays_no_other():
    queue = filled([*(f"dead/{number}" for number in range(500)), "a/1", "b/1"])
    assert names(queue.take(999.0)) == ["dead/0", "dead/1", "a/1", "b/1"]
    for number in range(50):
        queue.done("a")
        queue.put(f"a/{number}", 1_000.0 + number)
        assert names(queue.take(1_000.0 + number)) == [f"a/{number}"]
    queue.done("dead")
    assert names(queue.take(2_000.0)) == ["dead/2"]


def test_topics_of_unknown_brokers_have_half():
    queue = filled([f"/{number}" for number in range(20)])
    assert len(queue.take(99.0)) == 4
    assert len(filled(["/1", "/2"], at_once=1).take(9.0)) == 1
