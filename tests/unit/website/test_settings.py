"""Every key of Pulsar changes a setting, and the one whose description names it."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest

from ackstate import CursorConfig
from ackstate.cursor.pulsar_conf import CURSOR_KEYS
from ackstate.delay import DelayConfig
from ackstate.limits.policies import ENABLED_KEY, MAX_DELAY_KEY, TICK_KEY
from ackstate.limits.rules import GATE_KEYS
from website import settings
from website.pulsar_keys import KEYS

NAMES = [key.name for key in KEYS]
WITHOUT_EFFECT = {
    "delayedDeliveryPruneMinIntervalMillis",
    "delayedDeliveryPruneEligibleRatio",
    "delayedDeliveryTopicManagerIdleMillis",
}


def is_known_to_delays(key):
    try:
        DelayConfig.from_pulsar_conf({key: "x"})
    except ValueError as error:
        return "unknown key" not in str(error)
    return True


def test_every_key_that_is_read_is_listed_once():
    of_delays = {name for name in NAMES if "elayedDelivery" in name}
    assert all(is_known_to_delays(name) for name in of_delays)
    assert not is_known_to_delays("delayedDeliveryNonsense")
    named = set(re.findall(r"``(\w*elayedDelivery\w+)``", DelayConfig.__doc__ + DelayConfig.from_pulsar_conf.__doc__))
    assert named - {"InMemoryTopicDelayedDeliveryTrackerFactory"} == of_delays
    assert set(NAMES) == {*CURSOR_KEYS, *GATE_KEYS, ENABLED_KEY, TICK_KEY, MAX_DELAY_KEY, *of_delays}
    assert len(NAMES) == len(set(NAMES))


def test_every_key_but_those_of_no_effect_changes_a_setting():
    assert {key.name for key in KEYS if not settings.settings_changed_by(key)} == WITHOUT_EFFECT


@pytest.mark.parametrize("kind", [CursorConfig, DelayConfig])
def test_a_key_changes_the_setting_whose_description_names_it(kind):
    read = {name: set(keys) for (owner, name), keys in settings.keys_by_setting().items() if owner is kind}
    for name, description in settings.descriptions(kind).items():
        keys = {key for key in re.findall(r"``(\w+)``", description) if key in NAMES}
        assert keys <= read.get(name, set()), name


def test_no_setting_of_a_cursor_or_of_delays_lacks_its_description():
    for kind in (CursorConfig, DelayConfig):
        assert set(settings.descriptions(kind)) == {each.name for each in fields(kind)}


def test_a_key_that_changes_nothing_is_noticed():
    rate = next(key for key in KEYS if key.name == "managedLedgerMaxBatchDeletedIndexToPersist")
    assert settings.settings_changed_by(rate) == [(CursorConfig, "batch_count_max")]
    assert settings.settings_changed_by(replace(rate, other_value="10000")) == []
