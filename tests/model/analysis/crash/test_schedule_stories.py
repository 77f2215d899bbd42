"""L0, event by event: each story ends well, and breaks its promise with the bug that it is for."""

import pytest

import schedule_stories
from ackstate.analysis.crash.oracle import Promise
from crash.model.simulation import judged
from crash.promises import PromiseBrokenError
from museum.exhibits import EXHIBITS

PLAIN = {exhibit.name: exhibit for exhibit in EXHIBITS}
BREAKS = {
    "M5": ("acks while a persist writes", Promise.I4),
    "M6": ("persists into a full disk", Promise.I9),
    "M7": ("ticks more often than the rate limit lets through", Promise.I2),
    "M8": ("has more ranges than may be durable", Promise.I4),
    "M9": ("acks until the gate is shut", Promise.I4),
    "M10": ("fills the first hole while a persist writes", Promise.I9),
    "M12": ("opens copies that are damaged", Promise.I10),
    "M13": ("restarts above a limit", Promise.I8),
    "M15": ("restarts in the other format", Promise.I2),
    "M16": ("restarts when a delayed message is due", Promise.I8),
}


@pytest.mark.parametrize("story", schedule_stories.STORIES)
def test_each_story_ends_well(story):
    schedule_stories.tell(story)


@pytest.mark.parametrize(
    "story",
    [
        schedule_stories.persists_together_with_a_fault,
        schedule_stories.crashes_while_it_recovers_from_a_persist_of_unknown_outcome,
    ],
)
def test_each_story_of_a_fault_ends_well(story):
    story()


@pytest.mark.parametrize("name", BREAKS)
def test_a_bug_of_the_museum_breaks_a_promise_in_a_short_story(name):
    story, promise = BREAKS[name]
    with PLAIN[name].plant(), pytest.raises(PromiseBrokenError) as caught, judged():
        schedule_stories.tell(story)
    assert caught.value.promise is promise
