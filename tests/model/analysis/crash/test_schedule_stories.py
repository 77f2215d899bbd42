"""L0, event by event: each story ends well, and breaks its promise with the bug that it is for."""

from __future__ import annotations

import pytest

from ackstate.analysis.crash.oracle import Promise
from crash.model.simulation import judged
from crash.promises import PromiseBrokenError
from museum.exhibits import EXHIBITS
from schedule_stories import (
    acks_into_a_batch,
    acks_the_batch_that_closed_the_limit_of_the_broker,
    acks_until_the_gate_is_shut,
    acks_up_to_old_acks_while_no_write_succeeds,
    acks_while_a_persist_writes,
    appends_with_unknown_outcome_where_nothing_else_has_room,
    attaches_properties,
    compacts,
    crashes_while_it_recovers_from_a_persist_of_unknown_outcome,
    falls_behind,
    fills_the_first_hole_while_a_persist_writes,
    has_more_ranges_than_may_be_durable,
    is_fenced_after_a_crash,
    opens_copies_that_are_damaged,
    persists_after_the_ledger_became_old,
    persists_into_a_full_disk,
    persists_together_where_nothing_has_room,
    persists_together_with_a_fault,
    persists_without_ledgers,
    publishes_as_an_earlier_owner,
    restarts_above_a_limit,
    restarts_in_the_other_format,
    restarts_when_a_delayed_message_is_due,
    seeks_back,
    seeks_in_vain,
    ticks_after_the_interval,
    ticks_more_often_than_the_rate_limit_lets_through,
    trims,
)

PLAIN = {exhibit.name: exhibit for exhibit in EXHIBITS}


STORIES = {
    "M5": (acks_while_a_persist_writes, Promise.I4),
    "M6": (persists_into_a_full_disk, Promise.I9),
    "M7": (ticks_more_often_than_the_rate_limit_lets_through, Promise.I2),
    "M8": (has_more_ranges_than_may_be_durable, Promise.I4),
    "M9": (acks_until_the_gate_is_shut, Promise.I4),
    "M10": (fills_the_first_hole_while_a_persist_writes, Promise.I9),
    "M12": (opens_copies_that_are_damaged, Promise.I10),
    "M13": (restarts_above_a_limit, Promise.I8),
    "M15": (restarts_in_the_other_format, Promise.I2),
    "M16": (restarts_when_a_delayed_message_is_due, Promise.I8),
}


@pytest.mark.parametrize(
    "story",
    [
        *(story for story, _ in STORIES.values()),
        *(seeks_back, is_fenced_after_a_crash, persists_together_with_a_fault, falls_behind),
        *(ticks_after_the_interval, persists_without_ledgers, seeks_in_vain, attaches_properties, acks_into_a_batch),
        persists_together_where_nothing_has_room,
        publishes_as_an_earlier_owner,
        appends_with_unknown_outcome_where_nothing_else_has_room,
        acks_up_to_old_acks_while_no_write_succeeds,
        acks_the_batch_that_closed_the_limit_of_the_broker,
        persists_after_the_ledger_became_old,
        compacts,
        trims,
        crashes_while_it_recovers_from_a_persist_of_unknown_outcome,
    ],
    ids=lambda each: each.__name__,
)
def test_each_story_ends_well(story):
    story()


@pytest.mark.parametrize("name", STORIES)
def test_a_bug_of_the_museum_breaks_a_promise_in_a_short_story(name):
    story, promise = STORIES[name]
    with PLAIN[name].plant(), pytest.raises(PromiseBrokenError) as caught, judged():
        story()
    assert caught.value.promise is promise
