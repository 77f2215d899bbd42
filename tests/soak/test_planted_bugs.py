"""Searches that find a planted bug by themselves, which takes seconds each; the story of each is in tests/model."""

from __future__ import annotations

import logging

import pytest
from hypothesis import strategies as st

from ackstate.analysis.replay.policy import Policy
from ackstate.delay.calendar import Calendar
from planted import assert_caught
from replay_runs import PLAIN, assert_agreement_fails
from tests.model.ackstate import test_deleted_ranges_model as ranges
from tests.model.analysis.replay import test_replay as replay
from tests.model.cursor import test_retention_model as retention
from tests.model.cursor import test_store_model as stores
from tests.model.delay import test_calendar_model as calendars

YOUNG = st.just([Policy.from_mapping({"flush_interval_ms": 1, "become_old_ack_record_seconds": 1})])


def test_a_removal_that_keeps_the_last_entry(monkeypatch):
    ranges.keeps_the_last_entry(monkeypatch.setattr)
    assert_caught(ranges.DeletedRangesMachine, by=AssertionError)


def test_a_calendar_that_cuts_ties_in_order_of_pages(monkeypatch):
    monkeypatch.setattr(Calendar, "take_until", calendars.cuts_ties_in_order_of_pages)
    assert_caught(calendars.CalendarMachine, by=AssertionError)


def test_versions_that_come_back():
    assert_caught(stores.ForgetsVersionsMachine, by=AssertionError)


@pytest.mark.parametrize("planted", replay.STORIES)
def test_a_replay(monkeypatch, caplog, planted):
    caplog.set_level(logging.ERROR)
    planted(monkeypatch.setattr)
    assert_agreement_fails(YOUNG if planted is replay.looks_at_young_acks_once else PLAIN)


@pytest.mark.parametrize("planted", retention.PLANTED, ids=lambda each: each.__name__)
def test_a_trim(monkeypatch, planted):
    planted(monkeypatch.setattr)
    assert_caught(retention.Trims, by=AssertionError)
