"""Every key of Pulsar sets a field of a class of settings, and the one whose description names it."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass

import pytest

from ackstate import BrokerLimit, CursorConfig, GateLimits
from ackstate.delay import DelayConfig
from ackstate.limits import BrokerDelayedDelivery
from ackstate.pulsar_conf import PAUSE, SETTINGS
from website import settings

KINDS = {kind.__name__: kind for kind in (CursorConfig, GateLimits, BrokerLimit, DelayConfig, BrokerDelayedDelivery)}
KEYS = list(dict.fromkeys(each.key for each in SETTINGS))
# A valid value of a key, other than the default, if 77 is none.
VALUES = {
    "managedLedgerPersistIndividualAckAsLongArray": "false",
    "managedLedgerUnackedRangesOpenCacheSetEnabled": "false",
    "managedCursorInfoCompressionType": "ZSTD",
    "acknowledgmentAtBatchIndexLevelEnabled": "false",
    "maxUnPersistAckRecordsBytes": "7777",
    "maxUnackedMessagesPerSubscriptionOnBrokerBlocked": "0.5",
    PAUSE: "true",
    "delayedDeliveryEnabled": "false",
    "delayedDeliveryTrackerFactoryClassName": "org.apache.pulsar.broker.delayed.BucketDelayedDeliveryTrackerFactory",
    "isDelayedDeliveryDeliverAtTimeStrict": "true",
}
NEEDED = {
    ("CursorConfig", "managedLedgerUnackedRangesOpenCacheSetEnabled"): {
        "managedLedgerPersistIndividualAckAsLongArray": "true"
    },
    ("GateLimits", "managedLedgerMaxUnackedRangesToPersist"): {PAUSE: "true"},
    ("BrokerLimit", "maxUnackedMessagesPerSubscriptionOnBrokerBlocked"): {"maxUnackedMessagesPerBroker": "77"},
}


def values(kind, properties):
    read = kind.from_pulsar_conf(properties)
    names = [each.name for each in fields(read)] if is_dataclass(read) else ["max_unacked_messages", "blocked_share"]
    return {name: getattr(read, name) for name in names}


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize("key", KEYS)
def test_a_key_changes_the_fields_that_the_table_names_and_no_other(kind, key):
    needed = NEEDED.get((kind.__name__, key), {})
    before, after = values(kind, needed), values(kind, {**needed, key: VALUES.get(key, "77")})
    changed = {name for name in after if after[name] != before[name]}
    # With only one of the rate and the interval, the other has Pulsar's default.
    paced = {"flush_interval_ms", "mark_delete_rate_limit"}
    named = {each.field for each in SETTINGS if (each.key, each.kind) == (key, kind.__name__)} - {""}
    assert changed - paced == named - paced
    assert named & paced <= changed


def test_each_key_has_one_row_with_its_default():
    assert [each.key for each in SETTINGS if each.default] == KEYS


def test_the_keys_of_delays_are_those_that_the_class_describes():
    of_delays = {key for key in KEYS if "elayedDelivery" in key}
    named = set(re.findall(r"``(\w*elayedDelivery\w+)``", DelayConfig.__doc__ + DelayConfig.from_pulsar_conf.__doc__))
    assert named - {"InMemoryTopicDelayedDeliveryTrackerFactory"} == of_delays


@pytest.mark.parametrize("kind", [CursorConfig, DelayConfig])
def test_a_key_sets_the_field_whose_description_names_it(kind):
    for name, description in settings.descriptions(kind).items():
        keys = {key for key in re.findall(r"``(\w+)``", description) if key in KEYS}
        assert keys <= set(settings.keys_of_setting(kind, name)), name


def test_no_setting_of_a_cursor_or_of_delays_lacks_its_description():
    for kind in (CursorConfig, DelayConfig):
        assert set(settings.descriptions(kind)) == {each.name for each in fields(kind)}
